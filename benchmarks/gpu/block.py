"""A Mamba-2 block of recipe A, forward and backward under autocast: with our kernels and with torch code; and
its peak against the account's.
"""
import contextlib, dataclasses, functools
from unittest import mock
import torch
from torch import nn
from elleci.config import ModelConfig
from elleci.core import seed_everything
from elleci.engine.accumulate import autocast
from elleci.kernels.conv import conv_silu
from elleci.kernels.gated_norm import gated_rms_norm
from elleci.kernels.ssd import ssd
from elleci.kernels.ssd_reference import ssd_chunked
from elleci.layers import mamba2
from elleci.memory.allocator import replay
from elleci.memory.trace import dry_run
from gpu.bench import RECIPE_A, Stopwatch, failed, free, row

def config(dry): return dataclasses.replace(ModelConfig(), d_model=32, headdim=16) if dry else ModelConfig()
def size(dry): return (1, 34) if dry else RECIPE_A[:2]

def chunked(x, dt, A, B, C, chunk_size, D, seq_idx=None, check=None, backend=None):
    return ssd_chunked(x, dt, A, B, C, chunk_size, D, seq_idx=seq_idx)

@contextlib.contextmanager
def using(backend, scan=None):
    "Within it the block is made of these implementations"
    with contextlib.ExitStack() as stack:
        def scan_by(*args, **options): return ssd(*args, **options | dict(backend=backend))
        implementations = dict(
            ssd=scan or scan_by,
            conv_silu=functools.partial(conv_silu, backend=backend),
            gated_rms_norm=functools.partial(gated_rms_norm, backend=backend),
        )
        for name, f in implementations.items(): stack.enter_context(mock.patch.object(mamba2, name, f))
        yield

def stepper(block, x, patch=contextlib.nullcontext):
    def step():
        block.zero_grad(set_to_none=True)
        x.grad = None
        with patch():
            with autocast(x.device, 'bf16'): y = block(x)
            y.float().square().mean().backward()
    return step

def make(ctx, device):
    with torch.device(device):
        return mamba2.Mamba2(config(ctx.dry), nn.Linear), torch.randn(
            *size(ctx.dry), config(ctx.dry).d_model, requires_grad=True
        )

def predicted(ctx):
    block, x = make(ctx, 'meta')
    trace = dry_run(stepper(block, x), block, [x], steps=2)
    return replay(trace.replay_events()).peak_allocated

def run(ctx):
    seed_everything(0)
    block, x = make(ctx, ctx.device)
    ways = dict(
        ours=lambda: using('triton'), torch=lambda: using('torch'), chunked=lambda: using('torch', chunked)
    )
    steps = {n: stepper(block, x, patch) for n, patch in ways.items()}
    grads = {}
    for n in ('ours', 'chunked'):
        steps[n]()
        grads[n] = torch.cat([p.grad.flatten() for p in [*block.parameters(), x]])
    yield row(
        'gradients of ours and of chunked torch',
        ((grads['ours'] - grads['chunked']).norm() / grads['chunked'].norm()).item(),
        'relative difference',
        2e-2,
        at_most=True,
        must=True,
    )
    del grads
    times = Stopwatch(ctx)(steps, 3)
    for n, t in times.items():
        if isinstance(t, Exception): yield failed(n, t)
    good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
    if 'ours' in good:
        mine = good.pop('ours')
        yield row('forward + backward', mine.ms, 'ms', **mine.fields())
        for n, t in good.items():
            yield row(f'faster than the block with {n}', t.ms/mine.ms, '×', **t.fields())
    expected = predicted(ctx)
    if ctx.dry:
        yield row('peak predicted', expected/2**20, 'MiB')
        return
    block.zero_grad(set_to_none=True)
    x.grad = None
    free()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ours = sum(-(-t.nbytes//512)*512 for t in [*block.parameters(), *block.buffers(), x])
    # the stopwatch's buffer, the libraries' workspaces
    besides = torch.cuda.memory_allocated() - ours
    for _ in range(2): stepper(block, x, ways['ours'])()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - besides
    yield row('peak predicted', expected/2**20, 'MiB')
    yield row('peak measured', measured/2**20, 'MiB')
    yield row(
        'peak predicted against measured, off by', abs(expected / measured - 1), 'of it', 0.005, at_most=True
    )
