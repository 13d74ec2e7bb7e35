"""The convolution with its SiLU, the norms and the gate against plain torch: GB/s of the bytes that must
move, as a share of the copy.
"""
import functools
import torch
import torch.nn.functional as F
from elleci.kernels.conv import conv_silu
from elleci.kernels.gated_norm import gated_rms_norm
from elleci.kernels.pointwise import rms_norm, silu_mul
from elleci.core import optional
from gpu.bench import Stopwatch, both_ways, failed, free, no_grad, row

# (B, T, channels of x, N)
def cases(dry): return [(1, 40, 32, 16)] if dry else [(4, 1024, 4096, 16), (8, 4096, 4096, 128)]

def plain_conv(u, weight, bias):
    return F.silu(
        F.conv1d(
            F.pad(u.mT, (weight.shape[1] - 1, 0)),
            weight[:, None].to(u.dtype),
            bias.to(u.dtype),
            groups=len(bias),
        )
    ).mT

def plain_norm(y, z, weight):
    h = y.float()*F.silu(z.float())
    return (h*torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)*weight).to(y.dtype)

def plain_rms(x, weight):
    x_ = x.float()
    return (x_*torch.rsqrt(x_.square().mean(-1, keepdim=True) + 1e-5)*weight).to(x.dtype)

# with an fp32 weight torch's kernel is not used
def torch_rms(x, weight): return F.rms_norm(x, weight.shape, weight.to(x.dtype), 1e-5)

def plain_gate(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate)*up

def dao_conv(u, weight, bias):
    return (
        optional('causal_conv1d')
        .causal_conv1d_fn(u.mT, weight.to(u.dtype), bias.to(u.dtype), activation='silu')
        .mT
    )

def inputs(B, T, D, N, device='cpu', fill=True):
    new = torch.randn if fill else torch.empty
    proj = (
        new(B, T, 2 * D + 2 * N + 64, device=device).bfloat16()
        if fill
        else new(B, T, 2 * D + 2 * N + 64, dtype=torch.bfloat16)
    )
    C = D + 2*N
    z, u, _ = proj.split([D, C, 64], -1)                            # views of one projection, as in the layer
    y = new(B, T, D, device=device).bfloat16() if fill else new(B, T, D, dtype=torch.bfloat16)
    return dict(u=u, weight=new(C, 4, device=device), bias=new(C, device=device)), dict(
        y=y, z=z, weight=new(D, device=device)
    )

def widths(dry): return (40, 24) if dry else (2048, 5632)                    # of the norm, of the gate

def pointwise_inputs(B, T, D, FF, device='cpu', fill=True):
    def new(*s):
        return torch.randn(s, device=device).bfloat16() if fill else torch.empty(s, dtype=torch.bfloat16)
    return dict(x=new(B, T, D), weight=torch.ones(D, device=device)), dict(gate_up=new(B, T, 2*FF))

def documents(B, T, device): return (torch.arange(T, device=device)//max(T//5, 30)).expand(B, T).contiguous()

def run(ctx):
    watch = Stopwatch(ctx)
    for case in cases(ctx.dry):
        conv, norm = inputs(*case, ctx.device)
        idx = documents(*case[:2], ctx.device)
        rms, gate = pointwise_inputs(*case[:2], *widths(ctx.dry), ctx.device)
        ours = {
            'conv_silu': (
                conv,
                conv_silu,
                2,
                3,
                dict(
                    plain_conv=plain_conv,
                    **(dict(causal_conv1d=dao_conv) if optional('causal_conv1d') else {}),
                ),
            ),
            'conv_silu, documents': (conv, functools.partial(conv_silu, seq_idx=idx), 2, 3, {}),
            'gated_rms_norm': (norm, gated_rms_norm, 3, 5, dict(plain_norm=plain_norm)),
            'rms_norm, D = {}'.format(rms['x'].shape[-1]): (
                rms,
                rms_norm,
                2,
                3,
                dict(plain_rms=plain_rms, torch_rms=torch_rms),
            ),
            'silu_mul, F = {}'.format(gate['gate_up'].shape[-1] // 2): (
                gate,
                silu_mul,
                1.5,
                2.5,
                dict(plain_gate=plain_gate),
            ),
        }
        for name, (e, f, forward, backward, others) in ours.items():
            for kind, passes, way in (
                ('forward', forward, no_grad),
                ('forward + backward', forward + backward, both_ways),
            ):
                label = f'{name} {kind} {case}'
                fs = dict(ours=functools.partial(f, backend='triton'), **others)
                times = watch({n: way(g, e) for n, g in fs.items()}, .6)
                for n, t in times.items():
                    if isinstance(t, Exception): yield failed(f'{n}, {label}', t)
                good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
                if 'ours' not in good: continue
                mine, nbytes = good.pop('ours'), passes*next(iter(e.values())).nbytes
                yield row(label, nbytes/mine.ms/1e6, 'GB/s', **mine.fields())
                yield row(
                    f'{label}: of the copy',
                    nbytes / mine.ms * 1e3 / ctx.machine['bandwidth'],
                    'of the bandwidth',
                )
                for n, t in good.items():
                    yield row(f'{label}: faster than {n}', t.ms/mine.ms, '×', **t.fields())
        free()
