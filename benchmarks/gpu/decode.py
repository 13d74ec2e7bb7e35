"""One token for many rows: tokens/s, and bytes/s of the states that it reads and writes, against the copy. A
token of the whole 1.5B model in two bits a weight, with a CUDA graph and without. And the kernels that do
little but move bytes: convolution, norms, SwiGLU's gate.
"""
import dataclasses, functools
import torch
import torch.nn.functional as F
from elleci.config import preset
from elleci.core import optional
from elleci.decode_step import DecodeStep
from elleci.kernels.conv import conv_silu
from elleci.kernels.gated_norm import gated_rms_norm
from elleci.kernels.pointwise import rms_norm, silu_mul
from elleci.kernels.ssd import ssd_decode
from elleci.layers.ffn import pack_model
from elleci.model import Elleci
from gpu.bench import (
    WAYS, Stopwatch, documents_of, faster, free, mamba_ssm, no_grad, note, of_the_copy, race, row, scan_inputs
)

# (B, H, P, G, N)
CASES = (256, 64, 64, 1, 16), (128, 64, 64, 1, 128), (1, 64, 64, 1, 16)

def one_layer(ctx):
    watch, peer = Stopwatch(ctx), mamba_ssm('selective_state_update')
    for b, H, P, G, N in ((2, 2, 16, 1, 16),) if ctx.dry else CASES:
        e = scan_inputs((b, 1, H, P, G, N), device=ctx.device, state=True)
        state, A, D = e['initial_state'], e['A'], e['D']
        x, dt, B, C = (e[k][:, 0] for k in ('x', 'dt', 'B', 'C'))
        def step(backend): return ssd_decode(state, x, dt, A, B, C, D, backend=backend)
        subjects = {n: no_grad(step, dict(backend=b)) for n, b in (('ours', 'triton'), ('torch', 'torch'))}
        wide = dict(dt=dt[..., None].expand(b, H, P), A=A[:, None, None].expand(H, P, N))
        wide |= dict(D=D[:, None].expand(H, P), dt_bias=torch.zeros_like(D)[:, None].expand(H, P))
        if peer: subjects['mamba_ssm'] = lambda: peer.selective_state_update(state, x, B=B, C=C, **wide)
        label = f'{b} rows, H {H}, P {P}, N {N}'
        good = yield from watch.rows(subjects, .6, label)
        if (mine := good.pop('ours', None)) is None: continue
        nbytes = 2*state.nbytes + 2*x.nbytes + B.nbytes + C.nbytes + dt.nbytes
        yield row(f'{label}: one layer', b/mine.ms*1e3, 'tokens/s', **mine.fields())
        yield row(f'{label}: as Python asks for it', b/max(mine.ms, mine.host)*1e3, 'tokens/s')
        yield row(f'{label}: states and inputs moved', nbytes/mine.ms/1e6, 'GB/s')
        yield of_the_copy(ctx, label, nbytes, mine)
        yield from faster(label, mine, good)

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

def decode(ctx):
    yield from one_layer(ctx)
    free()
    with torch.no_grad(): model = packed_model(ctx)
    for batch in (1, 8):
        for name, static in (('graph', None), ('no graph', False)):
            yield from whole_model(ctx, model, batch, name, static)

@torch.no_grad()
def whole_model(ctx, model, batch, name, static):
    prompt, n = (8, 4) if ctx.dry else (512, 64)
    cache = model.new_cache(batch, prompt + 2*n)
    model(torch.zeros(batch, prompt, dtype=torch.long, device=ctx.device), cache=cache)
    step, label = DecodeStep(model, cache, static), f'whole model, {batch} rows, {name}'
    token = torch.zeros(batch, 1, dtype=torch.long, device=ctx.device)
    def next_token(): token.copy_(step(token).argmax(-1, keepdim=True))
    for _ in range(n): next_token()     # warm
    ms = milliseconds(ctx, next_token, n)
    if static is None and step.graph is None: yield note(f'{label}: {step.why_not}')
    nbytes = bytes_of_a_token(model, cache)
    yield row(f'{label}: tokens', batch/ms*1e3, 'tokens/s', ms=ms)
    yield row(f'{label}: weights and cache', nbytes/2**20, 'MiB a token')
    share, target = nbytes/ms*1e3/ctx.machine['bandwidth'], .5 if batch == 1 and static is None else None
    yield row(f'{label}: of the bandwidth', share, 'of the bandwidth', target)

# ------------------------------------------------------------------ fused

def plain_conv(u, weight, bias):
    taps, padded = weight[:, None].to(u.dtype), F.pad(u.mT, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, taps, bias.to(u.dtype), groups=len(bias))).mT

def plain_rms(x, weight):
    wide = x.float()
    return (wide*torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)*weight).to(x.dtype)

def plain_norm(y, z, weight): return plain_rms(y.float()*F.silu(z.float()), weight).to(y.dtype)

# with an fp32 weight torch's kernel is not used
def torch_rms(x, weight): return F.rms_norm(x, weight.shape, weight.to(x.dtype), 1e-5)

def plain_gate(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate)*up

def causal_conv1d(u, weight, bias):
    fused = optional('causal_conv1d').causal_conv1d_fn
    return fused(u.mT, weight.to(u.dtype), bias.to(u.dtype), activation='silu').mT

def fused_kernels(ctx, B, T, D, N):
    "{name: (inputs, kernel, tensors like the first input that move forward, and backward, peers)}"
    width, F_ = (40, 24) if ctx.dry else (2048, 5632)
    def normal(*s): return torch.randn(s, device=ctx.device)
    C = D + 2*N
    # views of one projection, as in the layer
    z, u, _ = normal(B, T, D + C + 64).bfloat16().split([D, C, 64], -1)
    conv = dict(u=u, weight=normal(C, 4), bias=normal(C))
    gated = dict(y=normal(B, T, D).bfloat16(), z=z, weight=normal(D))
    norm = dict(x=normal(B, T, width).bfloat16(), weight=torch.ones(width, device=ctx.device))
    peers = dict(plain_conv=plain_conv)
    if optional('causal_conv1d'): peers['causal_conv1d'] = causal_conv1d
    by_document = functools.partial(conv_silu, seq_idx=documents_of(T, max(T//5, 30), B, ctx.device))
    gates = dict(gate_up=normal(B, T, 2*F_).bfloat16())
    return {
        'conv_silu': (conv, conv_silu, 2, 3, peers),
        'conv_silu, documents': (conv, by_document, 2, 3, {}),
        'gated_rms_norm': (gated, gated_rms_norm, 3, 5, dict(plain_norm=plain_norm)),
        f'rms_norm, D = {width}': (norm, rms_norm, 2, 3, dict(plain_rms=plain_rms, torch_rms=torch_rms)),
        f'silu_mul, F = {F_}': (gates, silu_mul, 1.5, 2.5, dict(plain_gate=plain_gate)),
    }

def fused(ctx):
    "GB/s of the bytes that must move, as a share of the copy"
    watch = Stopwatch(ctx)
    for case in [(1, 40, 32, 16)] if ctx.dry else [(4, 1024, 4096, 16), (8, 4096, 4096, 128)]:
        for name, (e, f, forward, backward, peers) in fused_kernels(ctx, *case).items():
            fs = dict(ours=functools.partial(f, backend='triton'), **peers)
            for (kind, way), passes in zip(WAYS.items(), (forward, forward + backward)):
                label, nbytes = f'{name} {kind} {case}', passes*next(iter(e.values())).nbytes
                yield from race(ctx, watch, label, {n: way(g, e) for n, g in fs.items()}, nbytes=nbytes)
        free()
