"One token for many rows: tokens/s, and bytes/s of the states that it reads and writes, against the copy."
import torch
from elleci.kernels.ssd import _decode_triton, ssd_decode
from gpu.bench import Stopwatch, failed, mamba_ssm, row, scan_inputs

def cases(dry):  # (B, H, P, G, N)
    return [(2, 2, 16, 1, 16)] if dry else [(256, 64, 64, 1, 16), (128, 64, 64, 1, 128), (1, 64, 64, 1, 16)]

def token(b, H, P, G, N, device='cpu', fill=True):
    e = scan_inputs((b, 1, H, P, G, N), torch.bfloat16, device, state=True, fill=fill)
    return (e['initial_state'], e['x'][:, 0], e['dt'][:, 0], e['A'], e['B'][:, 0], e['C'][:, 0], e['D'])

def launches(dry):
    return [(f'decode {c}', lambda c=c: _decode_triton(*token(*c, fill=False))) for c in cases(dry)]

def run(ctx):
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
