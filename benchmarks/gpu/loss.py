"""Linear cross-entropy, forward and backward, at 65,536 tokens: against Liger's Triton, torch's own and plain
chunks; time, peak memory, budgets, tiles.
"""
import functools
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from elleci.core import autocast_device, optional
from elleci.kernels import linear_cross_entropy as module
from elleci.kernels.linear_cross_entropy import linear_cross_entropy
from gpu.bench import Stopwatch, failed, free, note, peak, row

MiB = 2**20
BUDGETS = (48, 96, 128, 192, 256, 384, 768)                      # MiB
TILES = ((2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (32768, 32))   # words, warps

def shape(dry): return (40, 16, 300) if dry else (65_536, 2048, 32_128)                # (tokens, D, V)
def budgets(dry): return (1, 2) if dry else BUDGETS
def vocabularies(dry): return (96, 300) if dry else (96, 32_000, 32_128, 50_257, 131_072)

def inputs(ctx, dtype, weight=None, size=None, seed=0):
    "Hidden states, head, labels of which a tenth is not counted"
    N, D, V = size or shape(ctx.dry)
    gen = torch.Generator(ctx.device).manual_seed(seed)
    def normal(*s): return torch.randn(s, generator=gen, device=ctx.device)
    h, w = normal(N, D).to(dtype).requires_grad_(), (normal(V, D)*D**-.5).to(weight or dtype).requires_grad_()
    y = torch.randint(V, (N,), generator=gen, device=ctx.device)
    return h, w, y.where(torch.rand(N, generator=gen, device=ctx.device) < .9, -100)

def plain_chunked(h, w, y, chunk):
    "What one writes without a kernel: chunks under checkpointing, logits in fp32 for the loss alone"
    def part(h, y): return F.cross_entropy(F.linear(h, w).float(), y, reduction='sum')
    return (
        sum(checkpoint(part, *c, use_reentrant=False) for c in zip(h.split(chunk), y.split(chunk)))
        / (y != -100).sum()
    )

def torch_native(h, w, y, policy):
    "torch's own; 'accurate' sums in fp32, as ours does"
    return F.linear_cross_entropy(h, w, y, options=torch.nn.LinearCrossEntropyOptions(acc_policy=policy))

def liger(h, w, y, accumulate):
    fused = optional('liger_kernel.ops.fused_linear_cross_entropy').LigerFusedLinearCrossEntropyFunction
    return fused.apply(h, w, y, None, None, -100, 0., 0., 'mean', None, False, accumulate)[0]

def subjects(ctx):
    "{name: loss of (h, w, y)}; the peers that are there, each in its fp32 sums and as it comes"
    found = {
        name: functools.partial(linear_cross_entropy, backend=b, check=False)
        for name, b in (('ours', 'triton'), ('torch', 'torch'))
    }
    found['plain_chunked'] = functools.partial(plain_chunked, chunk=16 if ctx.dry else 2048)
    if hasattr(F, 'linear_cross_entropy'):
        found |= {
            f'torch_native {p}': functools.partial(torch_native, policy=p) for p in ('accurate', 'compact')
        }
    if not ctx.dry and optional('liger_kernel.ops.fused_linear_cross_entropy'):
        found |= {
            'liger': functools.partial(liger, accumulate=None),
            'liger fp32 sums': functools.partial(liger, accumulate=torch.float32),
        }
    return found

PEERS = ('liger', 'torch_native', 'plain')

def fp32_gradient(e):
    "The same, the head's gradient wanted in fp32, as the engine has it"
    h, w, y = e
    w = w.detach().requires_grad_()
    w.grad_dtype = torch.float32
    return h, w, y

# a peer's failure is not ours
def broke(name, e): return failed(f'plain: {name}' if name.startswith(PEERS) else name, e)

def both(f, e, autocast=False):
    "A function that runs the loss and its gradients, as a training step does"
    h, w, y = e
    def run():
        h.grad = w.grad = None
        with torch.autocast(autocast_device(h.device), torch.bfloat16, autocast):
            loss = f(h, w, y)
        loss.backward()
        return loss
    return run

def tile(words, warps, x=None, y=None):
    "The kernel with another tile"
    x, y = (torch.empty(2, 32_128), torch.zeros(2, dtype=torch.int64)) if x is None else (x, y)
    loss, g = x.new_empty(len(x)), x.view(torch.bfloat16)
    with torch.cuda.device_of(x):
        module.cross_entropy_kernel[(len(x),)](
            x,
            g,
            y,
            loss,
            x.stride(0),
            g.stride(0),
            x.shape[1],
            -100,
            0.0,
            0.0,
            1.0,
            HAS_GRAD=True,
            HAS_SMOOTHING=False,
            BLOCK=words,
            num_warps=warps,
        )

# ------------------------------------------------------------------ numbers

def off(a, b): return ((a.double() - b).abs().max()/b.abs().max().clamp(min=1e-30)).item()

def exact(h, w, y):
    "In float64, with logits"
    h, w = (t.detach().double().requires_grad_() for t in (h, w))
    loss = F.cross_entropy(h @ w.T, y)
    loss.backward()
    return loss.detach(), h.grad, w.grad

def numerics(ctx):
    """Every vocabulary in bf16 and fp32 against float64; a wrong label gives NaN and nothing worse; the
    same bits twice"""
    for dtype, limits in ((torch.float32, (1e-5,)*3), (torch.bfloat16, (1e-3, 1e-2, 1e-2))):
        worst = {}
        for V in vocabularies(ctx.dry):
            N, D = (40, 16) if ctx.dry else (700, 256)
            e = inputs(ctx, dtype, size=(N, D, V))
            both(functools.partial(linear_cross_entropy, backend='triton', max_bytes=8*V*N + 2**20), e)()
            h, w, y = e
            with torch.no_grad(): loss = linear_cross_entropy(h, w, y, backend='triton')
            for name, a, b in zip(('loss', 'hidden', 'weight'), (loss, h.grad, w.grad), exact(*e)):
                worst[name] = max(worst.get(name, (0, 0)), (off(a, b), V))
            free()
        for (name, (error, V)), limit in zip(worst.items(), limits):
            yield row(
                f'{name}, {str(dtype)[6:]}, worst at V = {V}',
                error,
                'relative error',
                limit,
                at_most=True,
                must=True,
            )
    e = inputs(ctx, torch.bfloat16, size=(70, 16, 300) if ctx.dry else (4096, 2048, 32_128))
    h, w, y = e
    f = functools.partial(
        linear_cross_entropy, backend='triton', check=False, max_bytes=2**20 if ctx.dry else 96 * MiB
    )
    grads = []
    for _ in range(2):
        both(f, e)()
        grads.append((h.grad, w.grad))
    yield row(
        'run twice: gradients that differ',
        sum(not torch.equal(a, b) for a, b in zip(*grads)),
        'of 2',
        0,
        at_most=True,
        must=True,
    )
    bad = y.clone()
    bad[5] = 2**40
    loss = both(f, (h, w, bad))()
    yield row(
        'a label of 2^40 unchecked: rows of NaN',
        int(h.grad.isnan().any(1).sum()) if loss.isnan() else -1,
        'of 1',
        1,
        must=True,
    )

# ------------------------------------------------------------------ times

def run(ctx):
    watch, (N, D, V) = Stopwatch(ctx), shape(ctx.dry)
    e, fs = inputs(ctx, torch.bfloat16), subjects(ctx)
    fs = (
        {n: both(f, e) for n, f in fs.items()}
        | dict(ours=both(fs['ours'], fp32_gradient(e)))
        | {'ours, gradient in bf16': both(fs['ours'], e)}
    )
    times = watch(fs, 6)
    for n, t in times.items():
        if isinstance(t, Exception): yield broke(n, t)
    good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
    peaks = {} if ctx.dry else {n: peak(fs[n]) for n in good}
    for n, t in good.items():
        yield row(
            f'{n}: forward + backward, {N} × {D} × {V}, bf16', t.ms, 'ms', peak=peaks.get(n), **t.fields()
        )
        if n in peaks: yield row(f'{n}: peak beyond the inputs, gradients included', peaks[n]/MiB, 'MiB')
    mine = good.get('ours')
    if mine is None: return
    yield row(
        'ours: products alone at the rate measured',
        6 * N * D * V / ctx.machine.get('flops', 1e12) * 1e3 / mine.ms,
        'of the time',
    )
    for n in good:
        if n != 'ours': yield row(f'faster than {n}', good[n].ms/mine.ms, '×', 2. if n == 'liger' else None)
    if 'liger' in peaks:
        yield row('memory of ours against liger', peaks['ours']/peaks['liger'], 'of it', 1., at_most=True)
    if 'liger fp32 sums' in peaks:
        yield row(
            'memory of ours against liger with fp32 sums',
            peaks['ours'] / peaks['liger fp32 sums'],
            'of it',
            1.0,
            at_most=True,
        )
    if 'liger' not in good: yield note('liger is not installed: put its folder on PYTHONPATH')
    yield from sweep(ctx, watch, e)
    yield from floors(ctx, watch)

def sweep(ctx, watch, e):
    "Budgets, with the weight in bf16 and in fp32 under autocast; without gradients"
    for kind, autocast in (('bf16', False), ('fp32 weight, autocast', True)):
        if autocast:
            del e
            free()
            e = inputs(ctx, torch.bfloat16, torch.float32)
        fs = {
            M: both(
                functools.partial(linear_cross_entropy, backend='triton', check=False, max_bytes=M * MiB),
                e,
                autocast,
            )
            for M in budgets(ctx.dry)
        }
        for M, t in watch(fs, 3).items():
            if isinstance(t, Exception):
                yield failed(f'{kind}, {M} MiB', t)
                continue
            taken = {} if ctx.dry else dict(peak=peak(fs[M]))
            yield row(f'ours, {kind}, max_bytes {M} MiB', t.ms, 'ms', **taken, **t.fields())
    def evaluate():
        with torch.no_grad():
            return (
                linear_cross_entropy(*e, backend='triton', check=False) if e[1].dtype == e[0].dtype else None
            )
    if e[1].dtype != e[0].dtype: e = inputs(ctx, torch.bfloat16)
    t = watch(dict(loss=evaluate), 1)['loss']
    yield (
        failed('loss alone', t)
        if isinstance(t, Exception)
        else row('ours, without gradients', t.ms, 'ms', **t.fields())
    )

def floors(ctx, watch):
    "A chunk of the default budget, taken apart: its three products, and the kernel with several tiles"
    (_, D, V), C = shape(ctx.dry), 40 if ctx.dry else 1536
    h, w, y = inputs(ctx, torch.bfloat16 if not ctx.dry else torch.float32, size=(C, D, V))
    h = h.detach()
    w = w.detach()
    x, dw = torch.zeros(C, V, device=ctx.device), torch.zeros(V, D, device=ctx.device)
    g, dh = (x.view(h.dtype)[:, :V] if not ctx.dry else x), torch.empty_like(h)
    parts = dict(
        logits=lambda: module._matmul_into(h, w.t(), x),
        hidden=lambda: module._matmul_into(g, w, dh),
        weight=lambda: module._matmul_into(g.t(), h, dw, add=True),
        kernel=lambda: module._cross_entropy_triton(x, y, -100, 0.0, 0.0, h.dtype),
    )
    for n, t in watch(parts, 1).items():
        if isinstance(t, Exception):
            yield failed(f'chunk: {n}', t)
            continue
        rate = dict(rate=2*C*D*V/t.ms*1e3) if n != 'kernel' else dict(bandwidth=6*C*V/t.ms*1e3)
        yield row(f'a chunk of {C} tokens: {n}', t.ms, 'ms', **rate, **t.fields())
    if ctx.dry: return
    for n, t in watch({k: functools.partial(tile, *k, x, y) for k in TILES}, 1).items():
        yield (
            failed(f'tile {n}', t)
            if isinstance(t, Exception)
            else row(
                f'kernel, {n[0]} words a tile, {n[1]} warps', 6 * C * V / t.ms / 1e6, 'GB/s', **t.fields()
            )
        )
