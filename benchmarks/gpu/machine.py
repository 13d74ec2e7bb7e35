"""The card, and its two ceilings, measured here: a copy (bytes read and written) and a bf16 matrix product,
both on the spot.
"""
import platform, statistics
import torch
from elleci.core import optional
from elleci.memory.measure import bandwidth
from gpu.bench import Stopwatch, note, row

def run(ctx):
    if ctx.dry: name, more = f'CPU ({platform.machine()})', {}
    else:
        p = torch.cuda.get_device_properties(0)
        name = p.name
        more = dict(
            capability=10 * p.major + p.minor,
            memory=p.total_memory,
            L2=p.L2_cache_size,
            multiprocessors=p.multi_processor_count,
        )
    peers = {
        n: getattr(m, '__version__', '?') if (m := optional(n)) else None
        for n in ('triton', 'numpy', 'lion_pytorch', 'transformers', 'causal_conv1d')
    }
    yield note(
        name,
        machine=dict(
            device=name,
            torch=torch.__version__,
            cuda=torch.version.cuda,
            python=platform.python_version(),
            **peers,
            **more,
        ),
    )
    speed = 1e9 * statistics.median(
        bandwidth(ctx.device, 2**20 if ctx.dry else 2**31, 5) for _ in range(1 if ctx.dry else 5)
    )
    yield row('copy within memory', speed/1e9, 'GB/s', machine=dict(bandwidth=speed))
    n = 64 if ctx.dry else 8192
    a, b = torch.randn(2, n, n, device=ctx.device).bfloat16()
    c = torch.empty_like(a)
    t = Stopwatch(ctx)(dict(matmul=lambda: torch.mm(a, b, out=c)))['matmul']
    yield row(
        'bf16 matrix product',
        2 * n**3 / t.ms / 1e9,
        'TFLOP/s',
        machine=dict(flops=2 * n**3 / t.ms * 1e3),
        **t.fields(),
    )
