"""The SSD scan against mamba-ssm's and against chunked torch: time, share of the floors, peak memory; the
sizes in `_tiles`, tried out; a Mamba-2 block with our kernels and without.
"""
import contextlib, dataclasses, functools, itertools, sys
from unittest import mock
import torch
from torch import nn
from elleci.config import ModelConfig
from elleci.core import fmt_bytes, seed_everything
from elleci.engine.accumulate import autocast
from elleci.kernels import ssd as module
from elleci.kernels.conv import conv_silu
from elleci.kernels.gated_norm import gated_rms_norm
from elleci.kernels.ssd import ssd as our_scan, ssd_cost
from elleci.kernels.ssd_reference import ssd_chunked
from elleci.layers import mamba2
from gpu.bench import (
    LONG, RECIPE_A, TOY, TOY_WIDE, WIDE, Stopwatch, both_ways, check, failed, guarded, mamba_ssm, most,
    no_grad, note, peak, quick_tuning, race, relative, row, scan_inputs
)

TARGETS = {'forward': 2., 'forward + backward': 1.8}

def cases(dry):
    "(shape, documents, mamba-ssm's chunk sizes: 256 is its default)"
    if dry: return [(TOY_WIDE, False, (32,)), (TOY, True, ())]
    return [(WIDE, False, (256, 128)), (RECIPE_A, False, (256, 128)), (LONG, False, (256,)),
            (RECIPE_A, True, (256,)), (WIDE, True, ()), (LONG, True, ())]

def ours(**e): return our_scan(**e, backend='triton', check=False)

def theirs(Q):
    def scan(x, dt, A, B, C, D, seq_idx=None):
        return mamba_ssm().mamba_chunk_scan_combined(x, dt, A, B, C, Q, D=D, seq_idx=seq_idx)
    return scan

def agreeing(scans, e, label):
    "A row for each of mamba-ssm's: how far it is from ours; what cannot run is taken out"
    a = no_grad(ours, e)()
    for n in [n for n in scans if n.startswith('mamba')]:
        try: b = no_grad(scans[n], e)()
        except Exception as error:
            yield failed(f'{n}, {label}', error)
            del scans[n]
            continue
        yield most(f'{n} and ours, {label}', relative(a, b), 'relative difference', 2e-2)

def compare(ctx, watch, shape, docs, sizes):
    e = scan_inputs(shape, device=ctx.device, docs=docs)
    scans = {'ours': ours} | ({f'mamba_ssm, chunks of {Q}': theirs(Q) for Q in sizes} if mamba_ssm() else {})
    if not docs: scans['chunked torch'] = ssd_chunked
    label = f'{shape}{", documents" if docs else ""}'
    Q = module._tiles(shape[3], shape[5], torch.bfloat16, 64).Q
    if not ctx.dry or sizes: yield from agreeing(scans, e, label)
    for kind, target in TARGETS.items():
        name = f'{kind} {label}'
        subjects = {n: (no_grad if kind == 'forward' else both_ways)(f, e) for n, f in scans.items()}
        good = yield from watch.rows(subjects, 1.5, name)
        if 'ours' not in good: continue
        moved, flop, must = ssd_cost(*shape, Q)[kind]
        memory, arithmetic = 1e3*must/ctx.machine['bandwidth'], 1e3*flop/ctx.machine['flops']
        mine = good.pop('ours')
        yield row(name, mine.ms, 'ms', **mine.fields(), moved=moved)
        floor = f'{name}: floor of memory ({fmt_bytes(must)}) {memory:.3f} ms'
        yield row(floor, memory/mine.ms, 'of the bandwidth')
        floor = f'{name}: floor of arithmetic ({flop/1e9:.0f} GFLOP) {arithmetic:.3f} ms'
        yield row(floor, arithmetic/mine.ms, 'of the matmul rate')
        for n, t in good.items(): yield row(f'{name}: {n}', t.ms, 'ms', **t.fields())
        rivals = [n for n in good if n.startswith('mamba')]
        if rivals:
            best = min(rivals, key=lambda n: good[n].ms)
            wanted = target if shape in (WIDE, RECIPE_A) and not docs else None
            yield row(f'{name}: faster than {best}', good[best].ms/mine.ms, '×', wanted)
        chunked = good.get('chunked torch')
        if chunked: yield row(f'{name}: faster than chunked torch', chunked.ms/mine.ms, '×')
        if kind == 'forward' or ctx.dry: continue
        peaks = {n: peak(subjects[n]) for n in ('ours', *good)}
        yield row(f'peak memory {label}', peaks['ours']/2**20, 'MiB', bytes=peaks)
        if rivals:
            least = min(rivals, key=peaks.get)
            yield row(f'peak memory {label}: less than {least}', peaks[least]/peaks['ours'], '×', 1.)
        if chunked:
            ratio = peaks['chunked torch']/peaks['ours']
            yield row(f'peak memory {label}: less than chunked torch', ratio, '×')

def ssd(ctx):
    watch = Stopwatch(ctx)
    if watch.gpu and 'triton' in sys.modules: quick_tuning()
    if mamba_ssm() is None: yield note('mamba_ssm is not installed here: no comparison with it')
    found = {f'{case[:2]}': functools.partial(compare, ctx, watch, *case) for case in cases(ctx.dry)}
    yield from guarded(ctx, found, 10)

# ------------------------------------------------------------------ tiles

def variants(dry):
    "Chunk, channels, warps, and loads that run ahead in the forward pass"
    if dry: return [(16, 16, 4, 1), (32, 16, 4, 2)]
    # 128 steps fit into no 4 warps
    every = itertools.product((64, 32, 128), (64, 32, 16), (4, 8), (1, 2))
    return [v for v in every if v[0] < 128 or v[2] > 4]

def with_tiles(variant):
    "Within it the scan works with these sizes"
    own, names = module._tiles, ('Q', 'BP', 'num_warps', 'num_stages')
    def tiles(*args): return own(*args)._replace(**dict(zip(names, variant)))
    return mock.patch.object(module, '_tiles', tiles)

def tiles(ctx):
    "The sizes in `_tiles`, with a stopwatch: forward alone, and both ways"
    watch, shape = Stopwatch(ctx), TOY if ctx.dry else RECIPE_A
    e = scan_inputs(shape, device=ctx.device)
    ways = {'forward': no_grad(ours, e), 'forward + backward': both_ways(ours, e)}
    truth, base, table = no_grad(ours, e)(), watch(ways, .4), {}
    for n, v in enumerate(variants(ctx.dry)):
        if ctx.left < 3:
            yield note(f'{shape} cut for time: {n} of {len(variants(ctx.dry))} variants', cut=True)
            break
        label = f'{shape}: Q {v[0]}, BP {v[1]}, warps {v[2]}, stages {v[3]}'
        with with_tiles(v):
            try: off = relative(no_grad(ours, e)(), truth)
            except Exception as error:    # it takes more registers or shared memory than there are
                yield note(f'{label}: {type(error).__name__}: {" ".join(str(error).split())[:160]}')
                continue
            if not off < 2e-2: yield note(f'{label}: off by {off:.1e}')
            else: table[v] = watch(ways, .4)
    for kind, mine in base.items():
        yield row(f'{shape} {kind}: as it is', mine.ms, 'ms', **mine.fields())
        ms = {v: found[kind].ms for v, found in table.items() if not isinstance(found[kind], Exception)}
        if not ms: continue
        best = min(ms, key=ms.get)
        table_of_kind = [[*v, t] for v, t in ms.items()]
        label = f'{shape} {kind}: faster with Q {best[0]}, BP {best[1]}, warps {best[2]}, stages {best[3]}'
        yield row(label, mine.ms/ms[best], '×', table=table_of_kind)

# ------------------------------------------------------------------ block

def chunked(x, dt, A, B, C, chunk_size, D, seq_idx=None, check=None, backend=None):
    return ssd_chunked(x, dt, A, B, C, chunk_size, D, seq_idx=seq_idx)

def using(backend, scan=None):
    "Within it the block is made of these implementations"
    def scan_by(*args, **options): return our_scan(*args, **options | dict(backend=backend))
    parts = dict(ssd=scan or scan_by, conv_silu=functools.partial(conv_silu, backend=backend))
    parts['gated_rms_norm'] = functools.partial(gated_rms_norm, backend=backend)
    return mock.patch.multiple(mamba2, **parts)

def stepper(block, x, patch=contextlib.nullcontext):
    def step():
        block.zero_grad(set_to_none=True)
        x.grad = None
        with patch():
            with autocast(x.device, 'bf16'): y = block(x)
            y.float().square().mean().backward()
    return step

def make_block(ctx, device):
    cfg = dataclasses.replace(ModelConfig(), d_model=32, headdim=16) if ctx.dry else ModelConfig()
    size = (1, 34) if ctx.dry else RECIPE_A[:2]
    with torch.device(device):
        return mamba2.Mamba2(cfg, nn.Linear), torch.randn(*size, cfg.d_model, requires_grad=True)

def block(ctx):
    "A Mamba-2 block of recipe A, forward and backward under autocast"
    seed_everything(0)
    layer, x = make_block(ctx, ctx.device)
    ways = dict(
        ours=lambda: using('triton'), torch=lambda: using('torch'), chunked=lambda: using('torch', chunked)
    )
    steps, grads = {n: stepper(layer, x, patch) for n, patch in ways.items()}, {}
    for n in ('ours', 'chunked'):
        steps[n]()
        grads[n] = torch.cat([p.grad.flatten() for p in [*layer.parameters(), x]])
    off = relative(grads.pop('ours'), grads.pop('chunked'))
    yield check('gradients of ours and of chunked torch', off, 'relative difference', 2e-2)
    yield from race(ctx, Stopwatch(ctx), 'forward + backward', steps, 3)
