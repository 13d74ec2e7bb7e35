"""A BitLinear against bf16 nn.Linear, forward and backward; decoding from packed weights
at the shapes of the 1.5B model.
"""
import functools
import torch
import torch.nn.functional as F
from elleci.config import ModelConfig
from elleci.core import seed_everything
from elleci.kernels import bitnet as module
from elleci.kernels.bitnet import bit_linear, packed_matvec, quantize, ternarize_int8
from elleci.kernels.ternary import pack_ternary, ternary_linear
from gpu.bench import Stopwatch, check, free, of_the_copy, relative, row

ours = functools.partial(bit_linear, backend='triton')

def shapes(dry):
    "{name: (K, d_out)} of the ternary matrices of the 1.5B model, and one that fills a large card"
    if dry: return dict(toy=(32, 24), ragged=(37, 9))
    c = ModelConfig()
    return dict(in_proj=(c.d_model, 2*c.d_inner + 2*c.ngroups*c.d_state + c.n_ssm_heads),
                out_proj=(c.d_inner, c.d_model), gate_up=(c.d_model, 2*c.d_ff), down=(c.d_ff, c.d_model),
                large=(8192, 32_768))

def agrees(ctx):
    "Integers and outputs against the simulated layer, to the bit; gradients against those of the torch code"
    seed_everything(0)
    x, w = torch.randn(300, 272, device=ctx.device).bfloat16(), torch.randn(130, 272, device=ctx.device)*.02
    y, simulated = ours(x, w), ternary_linear(x, w)
    yield check('outputs unlike the simulated layer', (y != simulated).sum().item(), 'numbers', 0)
    (q, s), (w_int, scale) = quantize(x[:3], backend='triton'), ternarize_int8(w)
    decoded = packed_matvec(q, s, pack_ternary(w_int), scale, torch.bfloat16, backend='triton')
    differ = (decoded != simulated[:3]).sum().item()
    yield check('decoded outputs unlike the simulated layer', differ, 'numbers', 0)
    dy = torch.sin(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype)
    def grads(**how):
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        return torch.autograd.grad(bit_linear(*leaves, seed=1, **how), leaves, dy)
    exact = grads(backend='torch')
    for how, limit in (('bf16', 2e-2), ('int8', 5e-2)):
        for name, mine, theirs in zip(('x', 'w'), grads(backend='triton', backward=how), exact):
            label = f'gradient of {name}, {how} backward, and of torch'
            yield check(label, relative(mine, theirs), 'relative difference', limit)
    def rounded(k):
        return module.round_rows(x, 3, k)[0], module.round_columns(x, s.new_ones(300, 1), 3, k)[0]
    differ = sum((a != b).sum().item() for a, b in zip(rounded(True), rounded(False)))
    yield check('integers rounded at random unlike the twin', differ, 'numbers', 0)

def step(f, x, w, g):
    "A function that runs y = f(x, w) and both gradients"
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return lambda: torch.autograd.grad(f(x, w), (x, w), g)

def layers(ctx, watch, M, K, N):
    "Forward and backward of a layer whose weights are rounded once per step, and with all it does each time"
    x, g, w = (torch.randn(*s, device=ctx.device) for s in ((M, K), (M, N), (N, K)))
    x, g, size = x.bfloat16(), g.bfloat16(), f'{M} × {K} × {N}'
    cached = ternarize_int8(w)
    int8 = functools.partial(ours, ternary_weight=cached, backward='int8', seed=1)
    good = yield from watch.rows({
        'bf16 nn.Linear': step(F.linear, x, w.bfloat16(), g),
        'bf16 backward': step(functools.partial(ours, ternary_weight=cached), x, w, g),
        'int8 backward': step(int8, x, w, g),
        'bf16 backward, rounding its weights': step(ours, x, w, g),
        'plain simulated': step(ternary_linear, x, w, g),
    }, 2.5, size)
    for n, t in good.items(): yield row(f'{n}, {size}', 6*M*K*N/t.ms/1e9, 'Top/s', **t.fields())
    dense = good.get('bf16 nn.Linear')
    for n, target in {'bf16 backward': 1., 'int8 backward': 1.35, 'plain simulated': None}.items():
        if not dense or n not in good: continue
        yield row(f'BitLinear, {n}: faster than bf16 nn.Linear, {size}', dense.ms/good[n].ms, '×', target)

def decode(ctx, watch):
    "A product of one and of eight rows with packed weights, against bf16 weights"
    for name, (K, N) in shapes(ctx.dry).items():
        for n in (1, 8):
            w_int = torch.randint(-1, 2, (N, K), device=ctx.device, dtype=torch.int8)
            q = torch.randint(-127, 128, (n, K), device=ctx.device, dtype=torch.int8)
            scales, packed = torch.ones(n, 1, device=ctx.device), pack_ternary(w_int)
            one, label = torch.ones((), device=ctx.device), f'packed {name}, {n} rows'
            wide = torch.randn(N, K, device=ctx.device).bfloat16()
            x = torch.randn(n, K, device=ctx.device).bfloat16()
            good = yield from watch.rows(dict(
                ours=lambda: packed_matvec(q, scales, packed, one, torch.bfloat16, backend='triton'),
                plain=lambda: F.linear(x, wide),
            ), .4, label)
            if (mine := good.get('ours')) is None: continue
            nbytes = q.nbytes + packed.nbytes + 2*n*N
            yield of_the_copy(ctx, label, nbytes, mine, .5 if n == 1 else None, **mine.fields())
            if 'plain' in good: yield row(f'{label}: faster than bf16', good['plain'].ms/mine.ms, '×')
        free()

def bitnet(ctx):
    watch = Stopwatch(ctx)
    for case in [(40, 32, 48)] if ctx.dry else [(65_536, 2048, 5632), (4096, 2048, 11_264)]:
        yield from layers(ctx, watch, *case)
        free()
    yield from decode(ctx, watch)
