"""One token for many rows: tokens/s, and bytes/s of the states that it reads and writes, against the copy.
Then a token of the whole 1.5B model in two bits a weight: its share of the bandwidth, with a CUDA graph and
without."""
import dataclasses
import torch
from elleci.config import preset
from elleci.decode_step import DecodeStep
from elleci.kernels.ssd import ssd_decode
from elleci.layers.ffn import pack_model
from elleci.model import Elleci
from gpu.bench import Stopwatch, failed, free, mamba_ssm, note, row, scan_inputs

def cases(dry):  # (B, H, P, G, N)
    return [(2, 2, 16, 1, 16)] if dry else [(256, 64, 64, 1, 16), (128, 64, 64, 1, 128), (1, 64, 64, 1, 16)]

def token(b, H, P, G, N, device='cpu', fill=True):
    e = scan_inputs((b, 1, H, P, G, N), torch.bfloat16, device, state=True, fill=fill)
    return (e['initial_state'], e['x'][:, 0], e['dt'][:, 0], e['A'], e['B'][:, 0], e['C'][:, 0], e['D'])

def packed_model(ctx):
    "The 1.5B model with two bits a weight and the rest in bf16, or a small one"
    cfg = preset('elleci-tiny' if ctx.dry else 'elleci-1b5').model
    if ctx.dry: cfg = dataclasses.replace(cfg, n_layers=2, pattern='MA', d_model=64, d_ff=64)
    with torch.device(ctx.device): model = Elleci(cfg)
    return pack_model(model.bfloat16())

def bytes_of_a_token(model, cache):
    "Read and written by one step: weights, all of the cache, and the states once more"
    weights = sum(p.nbytes for p in model.parameters())
    if not model.cfg.tie_embeddings: weights -= model.embedding.weight.nbytes     # rows of it are looked up
    return weights + cache.nbytes + sum(t.nbytes for layer in cache.layers for t in layer.states.values())

def milliseconds(ctx, f, n):
    "Of one call of n, one behind the other, the host's part included"
    if ctx.dry: return 1.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n): f()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)/n

@torch.no_grad()
def whole_model(ctx):
    "Rows about a token of the whole model, with and without a graph"
    model, prompt, n = packed_model(ctx), 8 if ctx.dry else 512, 4 if ctx.dry else 64
    for batch in (1, 8):
        for name, static in (('graph', None), ('no graph', False)):
            cache = model.new_cache(batch, prompt + 2*n)
            model(torch.zeros(batch, prompt, dtype=torch.long, device=ctx.device), cache=cache)
            step = DecodeStep(model, cache, static)
            token = torch.zeros(batch, 1, dtype=torch.long, device=ctx.device)
            for _ in range(n): token = step(token).argmax(-1, keepdim=True)          # warm
            def next_token():
                nonlocal token
                token = step(token).argmax(-1, keepdim=True)
            ms, label = milliseconds(ctx, next_token, n), f'whole model, {batch} rows, {name}'
            if static is None and step.graph is None: yield note(f'{label}: {step.why_not}')
            nbytes = bytes_of_a_token(model, cache)
            yield row(f'{label}: tokens', batch/ms*1e3, 'tokens/s', ms=ms)
            yield row(f'{label}: weights and cache', nbytes/2**20, 'MiB a token')
            share = nbytes/ms*1e3/ctx.machine['bandwidth']
            target = .5 if batch == 1 and static is None else None
            yield row(f'{label}: of the bandwidth', share, 'of the bandwidth', target=target)

def run(ctx):
    yield from one_layer(ctx)
    free()
    yield from whole_model(ctx)

def one_layer(ctx):
    watch, peer = Stopwatch(ctx), mamba_ssm('selective_state_update')
    for b, H, P, G, N in cases(ctx.dry):
        args = state, x, dt, A, B, C, D = token(b, H, P, G, N, ctx.device)
        def ask(backend):
            def f():
                with torch.no_grad(): return ssd_decode(*args, backend=backend)
            return f
        subjects = dict(ours=ask('triton'), torch=ask('torch'))
        wide = dict(
            dt=dt[..., None].expand(b, H, P), A=A[:, None, None].expand(H, P, N), D=D[:, None].expand(H, P)
        )
        wide['dt_bias'] = torch.zeros_like(D)[:, None].expand(H, P)
        if peer: subjects['mamba_ssm'] = lambda: peer.selective_state_update(state, x, B=B, C=C, **wide)
        times, label = watch(subjects, .6), f'{b} rows, H {H}, P {P}, N {N}'
        for n, t in times.items():
            if isinstance(t, Exception): yield failed(f'{n}, {label}', t)
        good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
        if 'ours' not in good: continue
        mine, nbytes = good.pop('ours'), 2*state.nbytes + 2*x.nbytes + B.nbytes + C.nbytes + dt.nbytes
        yield row(f'{label}: one layer', b/mine.ms*1e3, 'tokens/s', **mine.fields())
        yield row(f'{label}: as Python asks for it', b/max(mine.ms, mine.host)*1e3, 'tokens/s')
        yield row(f'{label}: states and inputs moved', nbytes/mine.ms/1e6, 'GB/s')
        yield row(f'{label}: of the copy', nbytes/mine.ms*1e3/ctx.machine['bandwidth'], 'of the bandwidth')
        for n, t in good.items(): yield row(f'{label}: faster than {n}', t.ms/mine.ms, '×', **t.fields())
