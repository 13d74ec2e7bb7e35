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
from gpu import attention, bitnet, long_rows, loss
from gpu.bench import RECIPE_A, failed, free, leaves_of, row, scan_inputs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SHAPES = (
    (2, 1, 4, 48, 4, 4),
    (2, 7, 4, 16, 2, 8),
    (2, 63, 4, 64, 1, 24),
    (2, 500, 4, 80, 2, 64),
    (1, 500, 4, 128, 4, 128),
    (2, 500, 16, 64, 1, 16),
    (1, 500, 8, 64, 1, 128),
)
LARGE = (2, 4096, 64, 64, 1, 128)
CONVS, NORMS = ((37, 70, 4), (500, 4128, 4), (65, 6, 3)), (((9, 96), 3), ((130, 4096), 1), ((520, 20), 2))
# the last two: several rows to a backward program
POINTWISE = (9, 97), (520, 2048), (33000, 40)

def shapes(dry): return ((1, 70, 2, 16, 1, 16), (1, 7, 2, 24, 2, 4)) if dry else SHAPES
def large(dry): return (1, 130, 2, 16, 1, 16) if dry else LARGE

def scans(dry):
    return [
        (s, t, n % 2 == 0, n % 4 < 2) for n, (s, t) in enumerate(itertools.product(shapes(dry), TOLERANCE))
    ]

def off(mine, exact):
    "Largest difference, relative to the largest entry; 0 where nothing is to be found but rounding"
    largest = exact.abs().max().item()
    d = (mine.double() - exact).abs().max().item()
    return d if largest < 1e-12 and d < 1e-12 else d/max(largest, 1e-30)

def grads(f, e, gs):
    "Outputs of f(**e) and the gradients of all floats"
    leaves = leaves_of(e)
    out = f(**leaves)
    wanted = {k: v for k, v in leaves.items() if v is not None and v.is_floating_point()}
    got = torch.autograd.grad(out, list(wanted.values()), [g.to(o.dtype) for g, o in zip(gs, out)])
    return dict(zip(('y', 'state'), out)) | dict(zip(wanted, got))

def wide(e): return {k: v.double() if v is not None and v.is_floating_point() else v for k, v in e.items()}

def oracle(scan, x, dt, A, B, C, D, initial_state=None, seq_idx=None, z=None):
    y, h = scan(x, dt, A, B, C, D=D, initial_state=initial_state, seq_idx=seq_idx, return_final_state=True)
    return (y if z is None else y*F.silu(z)), h

def compared(ctx, shape, dtype, docs, gate, scan=ssd_recurrent):
    "{name: error} of outputs and all gradients"
    e = scan_inputs(shape, dtype, ctx.device, docs, sum(shape), state=docs)
    if gate: e['z'] = torch.randn_like(e['x'])
    gs = [torch.randn_like(e['x']), torch.randn(shape[0], shape[2], shape[3], shape[5], device=ctx.device)]
    mine = grads(lambda **e: ssd(**e, backend='triton', return_final_state=True, check=False), e, gs)
    exact = grads(functools.partial(oracle, scan), wide(e), gs)
    return {k: off(mine[k], exact[k]) for k in exact}

def worst(name, errors, limit):
    "A row of the worst of [(where, what, error)]"
    where, what, error = max(errors, key=lambda r: r[2] if r[2] == r[2] else float('inf'))
    return row(
        f'{name}: {what} at {where}, the worst of {len(errors)}',
        error,
        'relative error',
        limit,
        at_most=True,
        must=True,
    )

def check_scans(ctx):
    found = {t: [] for t in TOLERANCE}
    for shape, dtype, docs, gate in scans(ctx.dry):
        found[dtype] += [(shape, k, v) for k, v in compared(ctx, shape, dtype, docs, gate).items()]
    for dtype, errors in found.items():
        rates, rest = [r for r in errors if r[1] == 'A'], [r for r in errors if r[1] != 'A']
        yield worst(f'ssd, {str(dtype)[6:]}', rest, TOLERANCE[dtype])
        # a sum over all steps of what nearly cancels
        yield worst(f'ssd, {str(dtype)[6:]}', rates, 5*TOLERANCE[dtype])

def check_large(ctx):
    shape = large(ctx.dry)
    yield worst(
        'ssd, bfloat16',
        [(shape, k, v) for k, v in compared(ctx, shape, torch.bfloat16, False, False, ssd_chunked).items()],
        1e-2,
    )
    torch.set_float32_matmul_precision('high')
    errors = [(shape, k, v) for k, v in compared(ctx, shapes(ctx.dry)[-1], torch.float32, True, True).items()]
    torch.set_float32_matmul_precision('highest')
    yield worst('ssd, float32 through single tf32 products', errors, 1e-2)

def conv(u, weight, bias, window=None, seq_idx=None, **kw):
    if u.dtype != torch.float64: return (conv_silu(u, weight, bias, seq_idx, window, backend='triton'),)
    return (conv_silu(u, weight, bias, seq_idx, window, backend='torch'),)

def norm(y, z, weight, groups):
    return (gated_rms_norm(y, z, weight, groups, backend='torch' if y.dtype == torch.float64 else 'triton'),)

def rms(x, weight): return (rms_norm(x, weight, backend='torch' if x.dtype == torch.float64 else 'triton'),)
def gate(gate_up):
    return (silu_mul(gate_up, backend='torch' if gate_up.dtype == torch.float64 else 'triton'),)

def check_pointwise(ctx):
    "The norm and SwiGLU's gate, oracle as in `check_fused`"
    def normal(*s, t=torch.float32): return torch.randn(s, device=ctx.device).to(t)
    for dtype, limit in TOLERANCE.items():
        norms, gates = [], []
        for R, D in ((5, 24),) if ctx.dry else POINTWISE:
            e = dict(x=normal(R, D, t=dtype), weight=1 + .3*normal(D))
            b = dict(gate_up=normal(R, 2*D + 11, t=dtype)[:, 3:-8])
            for f, i, found in ((rms, e, norms), (gate, b, gates)):
                mine, exact = (grads(f, j, [e['x'].flip(0)]) for j in (i, wide(i)))
                found += [((R, D), k, off(mine[k], exact[k])) for k in exact]
        yield worst(f'rms_norm, {str(dtype)[6:]}', norms, limit)
        yield worst(f'silu_mul, {str(dtype)[6:]}', gates, limit)

def check_fused(ctx):
    "In float64 the torch code is the oracle: the notebook holds it against plain formulas to 1e-12"
    def normal(*s, t=torch.float32): return torch.randn(s, device=ctx.device).to(t)
    for dtype, limit in TOLERANCE.items():
        convs, norms = [], []
        for (T, C, K), docs in itertools.product(((12, 10, 4),) if ctx.dry else CONVS, (True, False)):
            e = dict(u=normal(2, T, C + 9, t=dtype)[..., 5:-4], weight=normal(C, K)/K**.5, bias=normal(C))
            if docs:
                e |= dict(
                    window=normal(2, K - 1, C, t=dtype),
                    seq_idx=(torch.rand(2, T, device=ctx.device) < 0.05).cumsum(1),
                )
            mine, exact = (grads(conv, i, [e['u'].contiguous()]) for i in (e, wide(e)))
            convs += [((T, C, K), k, off(mine[k], exact[k])) for k in exact]
        for (R, D), G in (((5, 24), 2),) if ctx.dry else NORMS:
            e = dict(y=normal(R, D, t=dtype), z=normal(R, D + 11, t=dtype)[:, 3:-8], weight=1 + .3*normal(D))
            mine, exact = (
                grads(functools.partial(norm, groups=G), i, [e['y'].flip(0)]) for i in (e, wide(e))
            )
            norms += [((R, D), k, off(mine[k], exact[k])) for k in exact]
        yield worst(f'conv_silu, {str(dtype)[6:]}', convs, limit)
        yield worst(f'gated_rms_norm, {str(dtype)[6:]}', norms, limit)

def check_decode(ctx):
    for dtype, limit in TOLERANCE.items():
        errors = []
        for shape in ((2, 5, 4, 48, 2, 24), (2, 5, 4, 64, 1, 128), (3, 5, 8, 64, 1, 16))[
            : 1 if ctx.dry else 3
        ]:
            e = scan_inputs(shape, dtype, ctx.device, seed=1, state=True)
            mine, exact, w = e['initial_state'].clone(), e['initial_state'].double(), wide(e)
            def step(f, e, h, t, **kw):
                return f(h, e['x'][:, t], e['dt'][:, t], e['A'], e['B'][:, t], e['C'][:, t], e['D'], **kw)
            with torch.no_grad():
                for t in range(5):
                    errors.append(
                        (
                            shape,
                            'y',
                            off(step(ssd_decode, e, mine, t, backend='triton'), step(ssd_step, w, exact, t)),
                        )
                    )
            errors.append((shape, 'state', off(mine, exact)))
        yield worst(f'ssd_decode, {str(dtype)[6:]}', errors, limit)

def same_bits(a, b): return sum(not torch.equal(a[k], b[k]) for k in a)

def check_bits(ctx):
    """Documents: with another first document, nothing of the second changes. And no sum depends on who
    came first"""
    b, T, H, P, G, N = shape = (1, 70, 2, 16, 1, 16) if ctx.dry else RECIPE_A
    def scan(**e): return (ssd(**e, backend='triton', check=False),)
    def short(**e): return (conv_silu(**e, backend='triton'),)
    for dtype in (torch.bfloat16, torch.float32):
        one, other = (scan_inputs(shape, dtype, ctx.device, seed=s) for s in (3, 4))
        u, v = (
            torch.randn(
                b, T, H * P, generator=torch.Generator(ctx.device).manual_seed(s), device=ctx.device
            ).to(dtype)
            for s in (5, 6)
        )
        w, bias, differ = torch.randn(H*P, 4, device=ctx.device), torch.randn(H*P, device=ctx.device), 0
        for at in (40,) if ctx.dry else (T//3, T//64*64, T - 3):
            idx = (torch.arange(T, device=ctx.device) >= at).long().expand(b, T)
            def swap(a, b): return torch.cat([b[:, :at], a[:, at:]], 1)
            results = []
            for e, x in (
                (one, u),
                ({k: swap(one[k], other[k]) if one[k].ndim > 2 else one[k] for k in one}, swap(u, v)),
            ):
                got = grads(scan, e | dict(seq_idx=idx), [one['x']])
                got |= {
                    f'conv {k}': v
                    for k, v in grads(short, dict(u=x, weight=w, bias=bias, seq_idx=idx), [u]).items()
                }
                results.append({k: v[:, at:] for k, v in got.items() if v.ndim > 2})
            differ += same_bits(*results)
        yield row(
            f'documents apart, {str(dtype)[6:]}: tensors that differ',
            differ,
            f'of {8 if ctx.dry else 24}',
            0,
            at_most=True,
            must=True,
        )
        e = one | dict(seq_idx=(torch.arange(T, device=ctx.device)//40).expand(b, T))
        rows = dict(y=u.flatten(0, 1), z=v.flatten(0, 1), weight=bias)
        twice = [
            grads(scan, e, [other['x']])
            | {f'conv {k}': t for k, t in grads(short, dict(u=u, weight=w, bias=bias), [v]).items()}
            | {f'norm {k}': t for k, t in grads(functools.partial(norm, groups=1), rows, [rows['z']]).items()}
            | {f'rms_norm {k}': t for k, t in grads(rms, dict(x=rows['y'], weight=bias), [rows['z']]).items()}
            for _ in range(2)
        ]
        yield row(
            f'run twice, {str(dtype)[6:]}: tensors that differ',
            same_bits(*twice),
            f'of {len(twice[0])}',
            0,
            at_most=True,
            must=True,
        )

def check_lion8(ctx):
    "Three steps of 8-bit Lion by the kernel and by its torch twin, ragged sizes: numbers that differ"
    for dtype, n in itertools.product(
        (torch.bfloat16, torch.float32), (1000, 2**12 + 77) if ctx.dry else (1000, 2**22 + 77)
    ):
        gen, differ = torch.Generator(ctx.device).manual_seed(0), 0
        def draw(): return torch.randn(n, generator=gen, device=ctx.device)
        w = draw().mul_(.02).to(dtype)
        pair = [(v := w.clone(), *lion8_state(v)) for _ in range(2)]
        for k in range(3):
            # outliers, and zeros
            g = draw()*torch.where(draw() > 2, 1e3, 1e-3)*(draw() > -1)
            for way, (v, m, s) in zip(('torch', 'triton'), pair):
                lion8_step(v, g, m, s, 3e-4, weight_decay=.1, seed=k, backend=way)
        for a, b in zip(*pair): differ += int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
        label = f'lion8, {str(dtype)[6:]}, {n} numbers: bytes that differ from the torch twin'
        yield row(label, differ, '', 0, at_most=True, must=True)

def check_attention(ctx):
    for T, documents in attention.cases(ctx.dry):
        if T > 2048: break
        e = attention.inputs(T, documents, ctx.device, **(dict(H=2, P=16) if ctx.dry else {}))
        yield from attention.exact(e, f'attention, T {T}, {documents} documents')

def check_eigenstate(ctx):
    yield row('eigenstate scan', long_rows.accuracy(ctx), 'relative error', 1e-5, at_most=True, must=True)

CHECKS = (check_scans, check_large, check_fused, check_pointwise, check_decode, check_bits, loss.numerics,
          bitnet.agrees, check_lion8, check_attention, check_eigenstate)

def run(ctx):
    # torch.empty is full of NaN: what a kernel forgets to write shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter('ignore')
    assert torch.empty(3, device=ctx.device).isnan().all()
    for check in CHECKS:
        try: yield from check(ctx)
        except Exception as e: yield failed(check.__name__, e)
        free()
