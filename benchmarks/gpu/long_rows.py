"""Long rows: the eigenstate scan's kernels against float64 and against the chunked scan in torch; attention
to a share of the past against all of it, in rows of 4K to 32K tokens. Time, share of the bandwidth, peak.
"""
import functools, math
import torch
from elleci.kernels.document_attention import document_attention
from elleci.kernels.eigenstate import eigenstate_scan
from elleci.kernels.eigenstate_reference import eigenstate_recurrent
from elleci.kernels.sparse_attention import sparse_attention
from gpu.bench import Stopwatch, both_ways, failed, free, no_grad, row

# (B, T, K)
def cases(dry): return [(1, 70, 5)] if dry else [(4, 32_768, 128), (16, 2048, 128), (1, 32_768, 64)]
def lengths(dry): return (130,) if dry else (4096, 8192, 16_384, 32_768)
DENSITIES = .5, .25, .125

def inputs(B, T, K, device, dtype=torch.bfloat16):
    "u as half of a projection's output, rates, documents"
    generator = torch.Generator().manual_seed(0)
    life, period = (
        torch.exp(torch.empty(K).uniform_(math.log(low), math.log(32_768), generator=generator))
        for low in (1, 2)
    )
    u = torch.randn(B, T, 4*K, generator=generator).to(device, dtype)[..., :2*K].unflatten(-1, (K, 2))
    log_rate, log_freq = (math.log(2)/life).log().to(device), (2*math.pi/period).log().to(device)
    seq_idx = (torch.arange(T, device=device)//max(T//5, 30)).expand(B, T).contiguous()
    return dict(u=u, log_rate=log_rate, log_freq=log_freq, seq_idx=seq_idx)

def accuracy(ctx):
    "Worst error of states and gradients, relative to the largest entry"
    e = inputs(2, 70 if ctx.dry else 1000, 33, ctx.device, torch.float32)
    names = 'u', 'log_rate', 'log_freq'
    worst = 0.
    found = []
    ours = functools.partial(eigenstate_scan, backend='triton')
    for f, dtype in ((ours, torch.float32), (eigenstate_recurrent, torch.float64)):
        leaves = {k: v.detach().to(dtype).requires_grad_() if k in names else v for k, v in e.items()}
        h = f(**leaves)
        found.append([h, *torch.autograd.grad(h.sin().sum(), [leaves[k] for k in names])])
    for ours, exact in zip(*found):
        worst = max(worst, ((ours.double() - exact).abs().max()/exact.abs().max()).item())
    return worst

def attention_inputs(T, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 4, 64, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    return dict(q=q, k=k, v=v, seq_idx=torch.zeros(1, T, dtype=torch.long, device=device))

def run(ctx):
    watch = Stopwatch(ctx)
    for case in cases(ctx.dry):
        e = inputs(*case, ctx.device)
        n = 2*math.prod(case)
        # u read and h written; g and h read, du written besides.
        for kind, way, nbytes in (('forward', no_grad, 6*n), ('forward + backward', both_ways, 16*n)):
            fs = {b: functools.partial(eigenstate_scan, backend=b) for b in ('triton', 'torch')}
            times = watch({b: way(f, e) for b, f in fs.items()}, .6)
            label = f'eigenstate scan {kind} {case}'
            for b, t in times.items():
                if isinstance(t, Exception): yield failed(f'{b}, {label}', t)
            if any(isinstance(t, Exception) for t in times.values()): continue
            ours = times['triton']
            yield row(label, nbytes/ours.ms/1e6, 'GB/s', **ours.fields())
            share = nbytes/ours.ms*1e3/ctx.machine['bandwidth']
            yield row(f'{label}: of the copy', share, 'of the bandwidth')
            torch_times = times['torch']
            yield row(f'{label}: faster than torch', torch_times.ms/ours.ms, '×', **torch_times.fields())
        free()
    for T in lengths(ctx.dry):
        e = attention_inputs(T, ctx.device)
        fs = {'dense': document_attention}
        fs |= {f'density {d:g}': functools.partial(sparse_attention, density=d) for d in DENSITIES}
        times = watch({n: both_ways(f, e) for n, f in fs.items()}, 1.)
        for name, t in times.items():
            label = f'attention, {name}, forward + backward, 1 × {T} × 4 heads of 64'
            if isinstance(t, Exception): yield failed(label, t)
            else: yield row(label, t.ms, 'ms', **t.fields())
        free()
