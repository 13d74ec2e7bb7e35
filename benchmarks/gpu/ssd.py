"""The scan against mamba-ssm's and against the chunked torch code: time, share of the floors, peak memory;
with and without documents.
"""
import sys
import torch
from elleci.core import fmt_bytes
from elleci.kernels import ssd as module
from elleci.kernels.ssd import ssd, ssd_cost
from elleci.kernels.ssd_reference import ssd_chunked
from gpu.bench import (
    LONG,
    RECIPE_A,
    TOY,
    TOY_WIDE,
    WIDE,
    Stopwatch,
    both_ways,
    failed,
    free,
    mamba_ssm,
    no_grad,
    note,
    peak,
    quick_tuning,
    row,
    scan_inputs,
)

TARGETS = {'forward': 2., 'forward + backward': 1.8}

def cases(dry):
    "(shape, documents, mamba-ssm's chunk sizes: 256 is its default)"
    if dry: return [(TOY_WIDE, False, (32,)), (TOY, True, ())]
    return [
        (WIDE, False, (256, 128)),
        (RECIPE_A, False, (256, 128)),
        (LONG, False, (256,)),
        (RECIPE_A, True, (256,)),
        (WIDE, True, ()),
        (LONG, True, ()),
    ]

def ours(**e): return ssd(**e, backend='triton', check=False)
def theirs(Q):
    m = mamba_ssm()
    def scan(x, dt, A, B, C, D, seq_idx=None):
        return m.mamba_chunk_scan_combined(x, dt, A, B, C, Q, D=D, seq_idx=seq_idx)
    return scan

def compare(ctx, watch, shape, docs, sizes):
    e = scan_inputs(shape, device=ctx.device, docs=docs)
    scans = {'ours': ours} | ({f'mamba_ssm, chunks of {Q}': theirs(Q) for Q in sizes} if mamba_ssm() else {})
    if not docs: scans['chunked torch'] = ssd_chunked
    label = f'{shape}{", documents" if docs else ""}'
    Q = module._tiles(shape[3], shape[5], torch.bfloat16, 64).Q
    if not ctx.dry or sizes:
        a = no_grad(ours, e)().float()
        for n in [n for n in scans if n.startswith('mamba')]:
            try: b = no_grad(scans[n], e)().float()
            except Exception as error:
                yield failed(f'{n}, {label}', error)
                del scans[n]
                continue
            yield row(
                f'{n} and ours, {label}',
                ((a - b).norm() / b.norm()).item(),
                'relative difference',
                2e-2,
                at_most=True,
            )
        a = b = None
    for kind, target in TARGETS.items():
        subjects = {n: (no_grad if kind == 'forward' else both_ways)(f, e) for n, f in scans.items()}
        times = watch(subjects)
        for n, t in times.items():
            if isinstance(t, Exception): yield failed(f'{n}, {kind} {label}', t)
        good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
        if 'ours' not in good: continue
        moved, flop, must = ssd_cost(*shape, Q)[kind]
        memory, arithmetic = (1e3*a/ctx.machine[b] for a, b in ((must, 'bandwidth'), (flop, 'flops')))
        mine = good.pop('ours')
        yield row(f'{kind} {label}', mine.ms, 'ms', **mine.fields(), moved=moved)
        yield row(
            f'{kind} {label}: floor of memory ({fmt_bytes(must)}) {memory:.3f} ms',
            memory / mine.ms,
            'of the bandwidth',
        )
        yield row(
            f'{kind} {label}: floor of arithmetic ({flop / 1e9:.0f} GFLOP) {arithmetic:.3f} ms',
            arithmetic / mine.ms,
            'of the matmul rate',
        )
        for n, t in good.items(): yield row(f'{kind} {label}: {n}', t.ms, 'ms', **t.fields())
        rivals = [n for n in good if n.startswith('mamba')]
        if rivals:
            best = min(rivals, key=lambda n: good[n].ms)
            yield row(
                f'{kind} {label}: faster than {best}',
                good[best].ms / mine.ms,
                '×',
                target if shape in (WIDE, RECIPE_A) and not docs else None,
            )
        if 'chunked torch' in good:
            yield row(f'{kind} {label}: faster than chunked torch', good['chunked torch'].ms/mine.ms, '×')
        if kind == 'forward': continue
        if ctx.dry: continue
        peaks = {n: peak(subjects[n]) for n in ('ours', *good)}
        yield row(f'peak memory {label}', peaks['ours']/2**20, 'MiB', bytes=peaks)
        if rivals:
            yield row(
                f'peak memory {label}: less than {min(rivals, key=peaks.get)}',
                min(peaks[n] for n in rivals) / peaks['ours'],
                '×',
                1.0,
            )
        if 'chunked torch' in good:
            yield row(
                f'peak memory {label}: less than chunked torch', peaks['chunked torch'] / peaks['ours'], '×'
            )

def run(ctx):
    watch = Stopwatch(ctx)
    if watch.gpu and 'triton' in sys.modules: quick_tuning()
    if mamba_ssm() is None: yield note('mamba_ssm is not installed here: no comparison with it')
    for n, (shape, docs, sizes) in enumerate(cases(ctx.dry)):
        if ctx.left < 10 and n:
            yield note(f'cut for time: {len(cases(ctx.dry)) - n} of {len(cases(ctx.dry))} cases', cut=True)
            return
        try: yield from compare(ctx, watch, shape, docs, sizes)
        except Exception as e: yield failed(f'{shape}', e)
        free()
