"""Linear cross-entropy, forward and backward, at 65,536 tokens: against Liger's Triton, torch's own and plain
chunks; time and peak memory.
"""
import functools
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from elleci.core import MiB, optional
from elleci.kernels.linear_cross_entropy import linear_cross_entropy
from gpu.bench import Stopwatch, check, free, most, note, peak, row

ours = functools.partial(linear_cross_entropy, backend='triton', check=False)

def shape(dry): return (40, 16, 300) if dry else (65_536, 2048, 32_128)                # (tokens, D, V)

def inputs(ctx, dtype, size=None):
    "Hidden states, head, labels of which a tenth is not counted"
    N, D, V = size or shape(ctx.dry)
    gen = torch.Generator(ctx.device).manual_seed(0)
    def normal(*s): return torch.randn(s, generator=gen, device=ctx.device)
    h, w = normal(N, D).to(dtype).requires_grad_(), (normal(V, D)*D**-.5).to(dtype).requires_grad_()
    y = torch.randint(V, (N,), generator=gen, device=ctx.device)
    return h, w, y.where(torch.rand(N, generator=gen, device=ctx.device) < .9, -100)

def plain_chunked(h, w, y, chunk):
    "What one writes without a kernel: chunks under checkpointing, logits in fp32 for the loss alone"
    def part(h, y): return F.cross_entropy(F.linear(h, w).float(), y, reduction='sum')
    parts = (checkpoint(part, *c, use_reentrant=False) for c in zip(h.split(chunk), y.split(chunk)))
    return sum(parts)/(y != -100).sum()

def torch_native(h, w, y, policy):
    "torch's own; 'accurate' sums in fp32, as ours does"
    return F.linear_cross_entropy(h, w, y, options=torch.nn.LinearCrossEntropyOptions(acc_policy=policy))

def liger(h, w, y, accumulate):
    fused = optional('liger_kernel.ops.fused_linear_cross_entropy').LigerFusedLinearCrossEntropyFunction
    return fused.apply(h, w, y, None, None, -100, 0., 0., 'mean', None, False, accumulate)[0]

def subjects(ctx):
    "{name: loss of (h, w, y)}; the peers that are there, each in its fp32 sums and as it comes"
    found = dict(ours=ours, torch=functools.partial(linear_cross_entropy, backend='torch', check=False))
    found['plain_chunked'] = functools.partial(plain_chunked, chunk=16 if ctx.dry else 2048)
    policies = ('accurate', 'compact') if hasattr(F, 'linear_cross_entropy') else ()
    found |= {f'torch_native {p}': functools.partial(torch_native, policy=p) for p in policies}
    if not ctx.dry and optional('liger_kernel.ops.fused_linear_cross_entropy'):
        found['liger'] = functools.partial(liger, accumulate=None)
        found['liger fp32 sums'] = functools.partial(liger, accumulate=torch.float32)
    return found

def fp32_gradient(e):
    "The same, the head's gradient wanted in fp32, as the engine has it"
    h, w, y = e
    w = w.detach().requires_grad_()
    w.grad_dtype = torch.float32
    return h, w, y

def both(f, e):
    "A function that runs the loss and its gradients, as a training step does"
    h, w, y = e
    def run():
        h.grad = w.grad = None
        loss = f(h, w, y)
        loss.backward()
        return loss
    return run

def off(a, b): return ((a.double() - b).abs().max()/b.abs().max().clamp(min=1e-30)).item()

def exact(h, w, y):
    "In float64, with logits"
    h, w = (t.detach().double().requires_grad_() for t in (h, w))
    loss = F.cross_entropy(h @ w.T, y)
    loss.backward()
    return loss.detach(), h.grad, w.grad

def numerics(ctx):
    "Every vocabulary in bf16 and fp32 against float64; the same bits twice; a wrong label gives NaN alone"
    for dtype, limits in ((torch.float32, (1e-5,)*3), (torch.bfloat16, (1e-3, 1e-2, 1e-2))):
        worst = {}
        for V in (96, 300) if ctx.dry else (96, 32_000, 32_128, 50_257, 131_072):
            N, D = (40, 16) if ctx.dry else (700, 256)
            h, w, y = e = inputs(ctx, dtype, size=(N, D, V))
            both(functools.partial(ours, max_bytes=8*V*N + 2**20), e)()
            with torch.no_grad(): loss = ours(h, w, y)
            for name, a, b in zip(('loss', 'hidden', 'weight'), (loss, h.grad, w.grad), exact(*e)):
                worst[name] = max(worst.get(name, (0, 0)), (off(a, b), V))
            free()
        for (name, (error, V)), limit in zip(worst.items(), limits):
            yield check(f'{name}, {str(dtype)[6:]}, worst at V = {V}', error, 'relative error', limit)
    h, w, y = e = inputs(ctx, torch.bfloat16, size=(70, 16, 300) if ctx.dry else (4096, 2048, 32_128))
    f, grads = functools.partial(ours, max_bytes=2**20 if ctx.dry else 96*MiB), []
    for _ in range(2):
        both(f, e)()
        grads.append((h.grad, w.grad))
    differ = sum(not torch.equal(a, b) for a, b in zip(*grads))
    yield check('run twice: gradients that differ', differ, 'of 2', 0)
    bad = y.clone()
    bad[5] = 2**40
    loss = both(f, (h, w, bad))()
    n_bad = int(h.grad.isnan().any(1).sum()) if loss.isnan() else -1
    yield row('a label of 2^40 unchecked: rows of NaN', n_bad, 'of 1', 1, must=True)

def loss(ctx):
    watch, (N, D, V), e = Stopwatch(ctx), shape(ctx.dry), inputs(ctx, torch.bfloat16)
    runs = {n: both(f, e) for n, f in subjects(ctx).items()}
    runs |= {'ours': both(ours, fp32_gradient(e)), 'ours, gradient in bf16': both(ours, e)}
    good = yield from watch.rows(runs, 6, 'forward + backward')
    peaks = {} if ctx.dry else {n: peak(runs[n]) for n in good}
    for n, t in good.items():
        label = f'{n}: forward + backward, {N} × {D} × {V}, bf16'
        yield row(label, t.ms, 'ms', peak=peaks.get(n), **t.fields())
        if n in peaks: yield row(f'{n}: peak beyond the inputs, gradients included', peaks[n]/MiB, 'MiB')
    mine = good.get('ours')
    if mine is None: return
    floor = 6*N*D*V/ctx.machine.get('flops', 1e12)*1e3
    yield row('ours: products alone at the rate measured', floor/mine.ms, 'of the time')
    for n in good:
        if n != 'ours': yield row(f'faster than {n}', good[n].ms/mine.ms, '×', 2. if n == 'liger' else None)
    for peer, label in (('liger', 'liger'), ('liger fp32 sums', 'liger with fp32 sums')):
        if peer not in peaks: continue
        yield most(f'memory of ours against {label}', peaks['ours']/peaks[peer], 'of it', 1.)
    if 'liger' not in good: yield note('liger is not installed: put its folder on PYTHONPATH')
