"""Every kernel on this card against float64, forward and gradients; documents bit by bit; the same bits
twice. Missing a target here is a failure.
"""
import functools, itertools, warnings
import torch
import torch.nn.functional as F
from elleci.kernels.conv import conv_silu
from elleci.kernels.gated_norm import gated_rms_norm
from elleci.kernels.lion8 import lion8_state, lion8_step
from elleci.kernels.pointwise import rms_norm, silu_mul
from elleci.kernels.ssd import ssd, ssd_decode
from elleci.kernels.ssd_reference import ssd_chunked, ssd_recurrent, ssd_step
from gpu import attention, bitnet, loss
from gpu.bench import RECIPE_A, check, failed, free, leaves_of, scan_inputs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
TOYS = (1, 70, 2, 16, 1, 16), (1, 7, 2, 24, 2, 4)
SHAPES = ((2, 1, 4, 48, 4, 4), (2, 7, 4, 16, 2, 8), (2, 63, 4, 64, 1, 24), (2, 500, 4, 80, 2, 64),
          (1, 500, 4, 128, 4, 128), (2, 500, 16, 64, 1, 16), (1, 500, 8, 64, 1, 128))
LARGE = (2, 4096, 64, 64, 1, 128)
DECODED = (2, 5, 4, 48, 2, 24), (2, 5, 4, 64, 1, 128), (3, 5, 8, 64, 1, 16)
CONVS, NORMS = ((37, 70, 4), (500, 4128, 4), (65, 6, 3)), (((9, 96), 3), ((130, 4096), 1), ((520, 20), 2))
# the last two: several rows to a backward program
POINTWISE = (9, 97), (520, 2048), (33000, 40)

def off(mine, exact):
    "Largest difference, relative to the largest entry; 0 where nothing is to be found but rounding"
    largest = exact.abs().max().item()
    d = (mine.double() - exact).abs().max().item()
    return 0. if largest < 1e-12 and d < 1e-12 else d/max(largest, 1e-30)

def grads(f, e, gs):
    "Outputs of f(**e) and the gradients of all floats"
    leaves = leaves_of(e)
    out = f(**leaves)
    out = out if isinstance(out, tuple) else (out,)
    wanted = {k: v for k, v in leaves.items() if v is not None and v.is_floating_point()}
    got = torch.autograd.grad(out, list(wanted.values()), [g.to(o.dtype) for g, o in zip(gs, out)])
    return dict(zip(('y', 'state'), out)) | dict(zip(wanted, got))

def wide(e): return {k: v.double() if v is not None and v.is_floating_point() else v for k, v in e.items()}

def worst(name, errors, limit):
    "A row of the worst of [(where, what, error)]; NaN is worse than all"
    where, what, error = max(errors, key=lambda r: r[2] if r[2] == r[2] else float('inf'))
    return check(f'{name}: {what} at {where}, the worst of {len(errors)}', error, 'relative error', limit)

def oracle(scan, x, dt, A, B, C, D, initial_state=None, seq_idx=None, z=None):
    y, h = scan(x, dt, A, B, C, D=D, initial_state=initial_state, seq_idx=seq_idx, return_final_state=True)
    return (y if z is None else y*F.silu(z)), h

def compared(ctx, shape, dtype, docs, gate, scan=ssd_recurrent):
    "[(shape, name, error)] of outputs and all gradients"
    e = scan_inputs(shape, dtype, ctx.device, docs, sum(shape), state=docs)
    if gate: e['z'] = torch.randn_like(e['x'])
    gs = [torch.randn_like(e['x']), torch.randn(shape[0], shape[2], shape[3], shape[5], device=ctx.device)]
    mine = grads(functools.partial(ssd, backend='triton', return_final_state=True, check=False), e, gs)
    exact = grads(functools.partial(oracle, scan), wide(e), gs)
    return [(shape, k, off(mine[k], exact[k])) for k in exact]

def check_scans(ctx):
    found = {t: [] for t in TOLERANCE}
    for n, (shape, dtype) in enumerate(itertools.product(TOYS if ctx.dry else SHAPES, TOLERANCE)):
        found[dtype] += compared(ctx, shape, dtype, n % 2 == 0, n % 4 < 2)
    for dtype, errors in found.items():
        label = f'ssd, {str(dtype)[6:]}'
        yield worst(label, [r for r in errors if r[1] != 'A'], TOLERANCE[dtype])
        # a sum over all steps of what nearly cancels
        yield worst(label, [r for r in errors if r[1] == 'A'], 5*TOLERANCE[dtype])

def check_large(ctx):
    shape, last = ((1, 130, 2, 16, 1, 16), TOYS[-1]) if ctx.dry else (LARGE, SHAPES[-1])
    yield worst('ssd, bfloat16', compared(ctx, shape, torch.bfloat16, False, False, ssd_chunked), 1e-2)
    torch.set_float32_matmul_precision('high')
    errors = compared(ctx, last, torch.float32, True, True)
    torch.set_float32_matmul_precision('highest')
    yield worst('ssd, float32 through single tf32 products', errors, 1e-2)

def both_backends(f, e, g):
    "[(name, error)]: the kernel against the torch code in float64, which a notebook holds against formulas"
    mine = grads(functools.partial(f, backend='triton'), e, [g])
    exact = grads(functools.partial(f, backend='torch'), wide(e), [g])
    return [(k, off(mine[k], exact[k])) for k in exact]

def pointwise_cases(ctx, dtype):
    "(kernel, function, inputs, gradient, where) of the convolution, the norms and SwiGLU's gate"
    def normal(*s, t=torch.float32): return torch.randn(s, device=ctx.device).to(t)
    for (T, C, K), docs in itertools.product(((12, 10, 4),) if ctx.dry else CONVS, (True, False)):
        e = dict(u=normal(2, T, C + 9, t=dtype)[..., 5:-4], weight=normal(C, K)/K**.5, bias=normal(C))
        documents = (torch.rand(2, T, device=ctx.device) < .05).cumsum(1)
        if docs: e |= dict(window=normal(2, K - 1, C, t=dtype), seq_idx=documents)
        yield 'conv_silu', conv_silu, e, e['u'].contiguous(), (T, C, K)
    for (R, D), G in (((5, 24), 2),) if ctx.dry else NORMS:
        e = dict(y=normal(R, D, t=dtype), z=normal(R, D + 11, t=dtype)[:, 3:-8], weight=1 + .3*normal(D))
        yield 'gated_rms_norm', functools.partial(gated_rms_norm, groups=G), e, e['y'].flip(0), (R, D)
    for R, D in ((5, 24),) if ctx.dry else POINTWISE:
        e = dict(x=normal(R, D, t=dtype), weight=1 + .3*normal(D))
        yield 'rms_norm', rms_norm, e, e['x'].flip(0), (R, D)
        gates = dict(gate_up=normal(R, 2*D + 11, t=dtype)[:, 3:-8])
        yield 'silu_mul', silu_mul, gates, e['x'].flip(0), (R, D)

def check_pointwise(ctx):
    for dtype, limit in TOLERANCE.items():
        found = {}
        for name, f, e, g, where in pointwise_cases(ctx, dtype):
            found.setdefault(name, []).extend((where, *error) for error in both_backends(f, e, g))
        for name, errors in found.items(): yield worst(f'{name}, {str(dtype)[6:]}', errors, limit)

def check_decode(ctx):
    def step(f, e, h, t, **kw):
        return f(h, e['x'][:, t], e['dt'][:, t], e['A'], e['B'][:, t], e['C'][:, t], e['D'], **kw)
    for dtype, limit in TOLERANCE.items():
        errors = []
        for shape in DECODED[:1] if ctx.dry else DECODED:
            e = scan_inputs(shape, dtype, ctx.device, seed=1, state=True)
            mine, exact, w = e['initial_state'].clone(), e['initial_state'].double(), wide(e)
            with torch.no_grad():
                for t in range(5):
                    y = step(ssd_decode, e, mine, t, backend='triton')
                    errors.append((shape, 'y', off(y, step(ssd_step, w, exact, t))))
            errors.append((shape, 'state', off(mine, exact)))
        yield worst(f'ssd_decode, {str(dtype)[6:]}', errors, limit)

def unequal(a, b): return sum(not torch.equal(a[k], b[k]) for k in a)

def scan_and_conv(scan, conv, g):
    "Outputs and gradients of both kernels, for inputs of each"
    found = grads(functools.partial(ssd, backend='triton', check=False), scan, [g])
    short = grads(functools.partial(conv_silu, backend='triton'), conv, [conv['u'].detach()])
    return found | {f'conv {k}': v for k, v in short.items()}

def check_bits(ctx):
    "With another first document, nothing of the second changes; and no sum depends on who came first"
    b, T, H, P, G, N = shape = (1, 70, 2, 16, 1, 16) if ctx.dry else RECIPE_A
    for dtype in (torch.bfloat16, torch.float32):
        one, other = (scan_inputs(shape, dtype, ctx.device, seed=s) for s in (3, 4))
        u, v = (e['x'].flatten(2) for e in (one, other))
        taps = dict(weight=torch.randn(H*P, 4, device=ctx.device), bias=torch.randn(H*P, device=ctx.device))
        differ, places = 0, (40,) if ctx.dry else (T//3, T//64*64, T - 3)
        for at in places:
            idx = dict(seq_idx=(torch.arange(T, device=ctx.device) >= at).long().expand(b, T))
            def swap(a, b): return torch.cat([b[:, :at], a[:, at:]], 1)
            swapped = {k: swap(t, other[k]) if t.ndim > 2 else t for k, t in one.items()}
            results = []
            for e, x in ((one, u), (swapped, swap(u, v))):
                got = scan_and_conv(e | idx, dict(u=x, **taps) | idx, one['x'])
                results.append({k: t[:, at:] for k, t in got.items() if t.ndim > 2})
            differ += unequal(*results)
        label, tensors = str(dtype)[6:], 8*len(places)
        yield check(f'documents apart, {label}: tensors that differ', differ, f'of {tensors}', 0)
        e = one | dict(seq_idx=(torch.arange(T, device=ctx.device)//40).expand(b, T))
        twice = []
        for _ in range(2):
            twice.append(scan_and_conv(e, dict(u=u, **taps), other['x']))
            gated = dict(y=u.flatten(0, 1), z=v.flatten(0, 1), weight=taps['bias'])
            plain = dict(x=gated['y'], weight=taps['bias'])
            for name, f, inputs in (('norm', gated_rms_norm, gated), ('rms_norm', rms_norm, plain)):
                found = grads(functools.partial(f, backend='triton'), inputs, [gated['z']])
                twice[-1] |= {f'{name} {k}': t for k, t in found.items()}
        yield check(f'run twice, {label}: tensors that differ', unequal(*twice), f'of {len(twice[0])}', 0)

def check_lion8(ctx):
    "Three steps of 8-bit Lion by the kernel and by its torch twin, ragged sizes: bytes that differ"
    sizes = (1000, 2**12 + 77) if ctx.dry else (1000, 2**22 + 77)
    for dtype, n in itertools.product((torch.bfloat16, torch.float32), sizes):
        gen = torch.Generator(ctx.device).manual_seed(0)
        def draw(): return torch.randn(n, generator=gen, device=ctx.device)
        w = draw().mul_(.02).to(dtype)
        pair = [(v := w.clone(), *lion8_state(v)) for _ in range(2)]
        for k in range(3):
            # outliers, and zeros
            g = draw()*torch.where(draw() > 2, 1e3, 1e-3)*(draw() > -1)
            for way, (v, m, s) in zip(('torch', 'triton'), pair):
                lion8_step(v, g, m, s, 3e-4, weight_decay=.1, seed=k, backend=way)
        differ = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(*pair))
        label = f'lion8, {str(dtype)[6:]}, {n} numbers: bytes that differ from the torch twin'
        yield check(label, differ, '', 0)

CHECKS = (check_scans, check_large, check_pointwise, check_decode, check_bits, loss.numerics, bitnet.agrees,
          check_lion8, attention.exact, attention.exact_scan)

def numerics(ctx):
    # torch.empty is full of NaN: what a kernel forgets to write shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter('ignore')
    assert torch.empty(3, device=ctx.device).isnan().all()
    for one in CHECKS:
        try: yield from one(ctx)
        except Exception as e: yield failed(one.__name__, e)
        free()
