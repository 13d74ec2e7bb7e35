"""A BitLinear against bf16 nn.Linear, forward and backward; its pieces against the copy; decoding from packed
weights at the 1.5B model's shapes.
"""
import functools, time
from dataclasses import replace
import torch
import torch.nn.functional as F
from elleci.config import ModelConfig, TrainConfig, preset
from elleci.core import seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.kernels import bitnet
from elleci.kernels.bitnet import bit_linear, packed_matvec, quantize, rms_norm_quantize, ternarize_int8
from elleci.kernels.ternary import pack_ternary, ternary_linear
from elleci.optim.optimizers import make_optimizer
from gpu.bench import Stopwatch, failed, free, note, row

# (tokens, K, d_out)
def cases(dry): return [(40, 32, 48)] if dry else [(65_536, 2048, 5632), (4096, 2048, 11_264)]

def shapes(dry):
    "{name: (K, d_out)} of the ternary matrices of the 1.5B model, and one that fills a large card"
    if dry: return dict(toy=(32, 24), ragged=(37, 9))
    c = ModelConfig()
    return dict(
        in_proj=(c.d_model, 2 * c.d_inner + 2 * c.ngroups * c.d_state + c.n_ssm_heads),
        out_proj=(c.d_inner, c.d_model),
        gate_up=(c.d_model, 2 * c.d_ff),
        down=(c.d_ff, c.d_model),
        large=(8192, 32_768),
    )

def agrees(ctx):
    """Integers and outputs against the simulated layer, to the bit; gradients of the int8 backward
    against bf16's"""
    seed_everything(0)
    x, w = torch.randn(300, 272, device=ctx.device).bfloat16(), torch.randn(130, 272, device=ctx.device)*.02
    y, simulated = bit_linear(x, w, backend='triton'), ternary_linear(x, w)
    yield row(
        'outputs unlike the simulated layer',
        (y != simulated).sum().item(),
        'numbers',
        0,
        at_most=True,
        must=True,
    )
    q, s = quantize(x[:3], backend='triton')
    packed = pack_ternary(ternarize_int8(w)[0])
    decoded = packed_matvec(q, s, packed, ternarize_int8(w)[1], torch.bfloat16, backend='triton')
    yield row(
        'decoded outputs unlike the simulated layer',
        (decoded != simulated[:3]).sum().item(),
        'numbers',
        0,
        at_most=True,
        must=True,
    )
    def grads(**how):
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        return torch.autograd.grad(
            bit_linear(*leaves, seed=1, **how),
            leaves,
            torch.sin(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype),
        )
    exact = grads(backend='torch')
    for how, most in (('bf16', 2e-2), ('int8', 5e-2)):
        for name, mine, theirs in zip(('x', 'w'), grads(backend='triton', backward=how), exact):
            off = ((mine.float() - theirs.float()).norm()/theirs.float().norm()).item()
            yield row(
                f'gradient of {name}, {how} backward, and of torch',
                off,
                'relative difference',
                most,
                at_most=True,
                must=True,
            )
    twins = [
        (bitnet.round_rows(x, 3, k)[0], bitnet.round_columns(x, s.new_ones(300, 1), 3, k)[0])
        for k in (True, False)
    ]
    yield row(
        'integers rounded at random unlike the twin',
        sum((a != b).sum().item() for a, b in zip(*twins)),
        'numbers',
        0,
        at_most=True,
        must=True,
    )

def step(f, x, w, g):
    "A function that runs y = f(x, w) and both gradients"
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return lambda: torch.autograd.grad(f(x, w), (x, w), g)

def layers(ctx, watch, M, K, N):
    "Forward and backward of a layer whose weights are rounded once per step, and with all it does each time"
    x, g, w = (torch.randn(*s, device=ctx.device) for s in ((M, K), (M, N), (N, K)))
    x, g = x.bfloat16(), g.bfloat16()
    cached, wb, ours = ternarize_int8(w), w.bfloat16(), functools.partial(bit_linear, backend='triton')
    subjects = {
        'bf16 nn.Linear': step(F.linear, x, wb, g),
        'bf16 backward': step(lambda x, w: ours(x, w, ternary_weight=cached), x, w, g),
        'int8 backward': step(
            lambda x, w: ours(x, w, ternary_weight=cached, backward='int8', seed=1), x, w, g
        ),
        'bf16 backward, rounding its weights': step(ours, x, w, g),
        'plain simulated': step(ternary_linear, x, w, g),
    }
    times = watch(subjects, 2.5)
    for n, t in times.items():
        if isinstance(t, Exception): yield failed(f'{n}, {M} × {K} × {N}', t)
    good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
    for n, t in good.items(): yield row(f'{n}, {M} × {K} × {N}', 6*M*K*N/t.ms/1e9, 'Top/s', **t.fields())
    if 'bf16 nn.Linear' in good:
        for n, target in {'bf16 backward': 1., 'int8 backward': 1.35, 'plain simulated': None}.items():
            if n in good:
                yield row(
                    f'BitLinear, {n}: faster than bf16 nn.Linear, {M} × {K} × {N}',
                    good['bf16 nn.Linear'].ms / good[n].ms,
                    '×',
                    target,
                )

def pieces(ctx, watch, M, K, N):
    "Kernels one by one: bytes against the copy, operations of the product"
    x, g, w, n = (torch.randn(*s, device=ctx.device) for s in ((M, K), (M, N), (N, K), (K,)))
    x, g, scale = x.bfloat16(), g.bfloat16(), w.abs().mean()
    (q, sx), (w_int, sw) = quantize(x), ternarize_int8(w)
    gq, sg = bitnet.round_rows(g, 1, not ctx.dry)
    gT, sT = bitnet.round_columns(g, sx, 1, not ctx.dry)
    turned = w_int.T.contiguous()
    moving = {
        'quantize': (lambda: quantize(x, 'triton'), 3 * M * K),
        'norm and quantize': (lambda: rms_norm_quantize(x, n, backend='triton'), 3 * M * K),
        'ternarize': (lambda: bitnet.ternarize_rows(w, scale), 5 * N * K),
        'rounding of rows': (lambda: bitnet.round_rows(g, 1, True), 3 * M * N),
        'rounding of columns': (lambda: bitnet.round_columns(g, sx, 1, True), 3 * M * N),
        'dequantise': (lambda: bitnet.rescale(q, sx, torch.bfloat16), 3 * M * K),
    }
    products = {'forward': lambda: bitnet.int8_product(q, sx, w_int, sw, torch.bfloat16),
                'gradient of x': lambda: bitnet.int8_product(gq, sg, turned, sw, torch.bfloat16),
                'gradient of w': lambda: bitnet.weight_grad(gT, sT, q, torch.float32)}
    times = watch({**{k: f for k, (f, _) in moving.items()}, **products}, 2)
    for name, t in times.items():
        if isinstance(t, Exception): yield failed(f'{name}, {M} × {K} × {N}', t)
        elif name in moving:
            yield row(
                f'{name}, {M} × {K} × {N}: of the copy',
                moving[name][1] / t.ms * 1e3 / ctx.machine['bandwidth'],
                'of the bandwidth',
                **t.fields(),
            )
        else: yield row(f'int8 product, {name}, {M} × {K} × {N}', 2*M*K*N/t.ms/1e9, 'Top/s', **t.fields())

def matrices(ctx, K, N, rows):
    w_int = torch.randint(-1, 2, (N, K), device=ctx.device, dtype=torch.int8)
    x = torch.randint(-127, 128, (rows, K), device=ctx.device, dtype=torch.int8)
    return x, torch.ones(rows, 1, device=ctx.device), pack_ternary(w_int), torch.ones((), device=ctx.device)

def decode(ctx, watch):
    for name, (K, N) in shapes(ctx.dry).items():
        for rows in (1, 8):
            args = matrices(ctx, K, N, rows)
            wide = torch.randn(N, K, device=ctx.device).bfloat16()
            x = torch.randn(rows, K, device=ctx.device).bfloat16()
            times = watch(
                dict(
                    ours=lambda: packed_matvec(*args, torch.bfloat16, backend='triton'),
                    plain=lambda: F.linear(x, wide),
                ),
                0.4,
            )
            mine, label = times['ours'], f'packed {name}, {rows} rows'
            if isinstance(mine, Exception):
                yield failed(label, mine)
                continue
            nbytes = args[0].nbytes + args[2].nbytes + 2*rows*N
            yield row(
                f'{label}: of the copy',
                nbytes / mine.ms * 1e3 / ctx.machine['bandwidth'],
                'of the bandwidth',
                0.5 if rows == 1 else None,
                **mine.fields(),
            )
            if not isinstance(times['plain'], Exception):
                yield row(f'{label}: faster than bf16', times['plain'].ms/mine.ms, '×')
        free()

def whole_token(ctx, watch):
    """All ternary matrices of the model's Mamba and feed-forward layers, one after another in a CUDA
    graph: what a token reads"""
    count = 1 if ctx.dry else ModelConfig().n_layers
    sets = [
        matrices(ctx, K, N, 1)
        for _ in range(count)
        for name, (K, N) in shapes(ctx.dry).items()
        if name != 'large'
    ]
    def token():
        for args in sets: packed_matvec(*args, torch.bfloat16, backend='triton')
    if not ctx.dry:
        token()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): token()
    t = watch(dict(token=token if ctx.dry else graph.replay), .6)['token']
    if isinstance(t, Exception):
        yield failed('one token', t)
        return
    nbytes = sum(a[2].nbytes for a in sets)
    yield row(
        'one token, 24 Mamba and feed-forward layers: of the copy',
        nbytes / t.ms * 1e3 / ctx.machine['bandwidth'],
        'of the bandwidth',
        0.5,
        **t.fields(),
    )
    yield row('one token, 24 Mamba and feed-forward layers', 1e3/t.ms, 'tokens/s')

def on_the_cpu(M=256, K=2048, N=2048):
    "The product of bytes on this processor against the float ones: why the torch code uses it"
    a, b = torch.randint(-127, 128, (M, K)).to(torch.int8), torch.randint(-1, 2, (K, N)).to(torch.int8)
    times = {}
    products = dict(
        bytes=functools.partial(torch._int_mm, a, b),
        fp32=functools.partial(torch.mm, a.float(), b.float()),
        bf16=functools.partial(torch.mm, a.bfloat16(), b.bfloat16()),
    )
    for name, f in products.items():
        f()
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            f()
            taken.append(time.perf_counter() - began)
        times[name] = min(taken)
    for name in ('fp32', 'bf16'):
        yield row(
            f'product of bytes on the CPU, {M} × {K} × {N}: faster than {name}',
            times[name] / times['bytes'],
            '×',
        )

def whole_step(ctx, watch):
    """Training steps of four layers of recipe A: ternary with both backward passes, against ordinary bf16
    layers"""
    wide = replace(preset('elleci-tiny').model, n_layers=1) if ctx.dry else replace(ModelConfig(), n_layers=4)
    train = TrainConfig(
        seq_len=64 if ctx.dry else 1024,
        batch_size=1 if ctx.dry else 8,
        grad_accum_steps=2,
        optimizer='lion8',
        precision='bf16-weights',
    )
    ways = {
        'bf16 nn.Linear': (False, False),
        'ternary, bf16 backward': (True, False),
        'ternary, int8 backward': (True, True),
    }
    subjects = {}
    tokens = torch.randint(wide.vocab_size, (train.batch_size, train.seq_len), device=ctx.device)
    for name, (ternary, int8) in ways.items():
        seed_everything(0)
        t = replace(train, int8_backward=int8)
        model = make_model(replace(wide, ternary=ternary), t, ctx.device)
        engine = make_engine(model, make_optimizer(model, t), t)
        subjects[name] = lambda engine=engine: engine.step(
            [[tokens, tokens, torch.zeros_like(tokens)]] * train.grad_accum_steps
        )
    times = watch(subjects, 4)
    for name, t in times.items():
        if isinstance(t, Exception): yield failed(f'step of four layers, {name}', t)
        else:
            yield row(
                f'step of four layers, {name}', train.tokens_per_step / t.ms * 1e3, 'tokens/s', **t.fields()
            )
    if not any(isinstance(t, Exception) for t in times.values()):
        for name, target in (('ternary, bf16 backward', None), ('ternary, int8 backward', 1.10)):
            yield row(
                f'step of four layers, {name}: faster than bf16 nn.Linear',
                times['bf16 nn.Linear'].ms / times[name].ms,
                '×',
                target,
            )

def run(ctx):
    watch = Stopwatch(ctx)
    if ctx.dry: yield from on_the_cpu()
    for case in cases(ctx.dry):
        yield from layers(ctx, watch, *case)
        free()
        yield from pieces(ctx, watch, *case)
        free()
    if ctx.left < 10:
        yield note('no time for decoding', cut=True)
        return
    yield from decode(ctx, watch)
    yield from whole_token(ctx, watch)
    free()
    if ctx.left > 8:
        yield from whole_step(ctx, watch)
        free()
