"""The layer-major engine at a middling size: the weights of the ordinary step, no growth over two hundred
steps, the 8-bit Lion's speed, pinned memory.
"""
import functools, time
from dataclasses import replace
import numpy as np
import torch
from elleci.core import KiB, MiB, memory_in_use, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.engine.offload import HostMemory
from elleci.kernels.lion8 import lion8_state, lion8_step
from elleci.planning.account import account
from gpu.bench import Stopwatch, check, guarded, most, note, of_the_copy, row
from gpu.recipe import as_ordinary, recipe
from gpu.training import MAJOR, MEDIUM, STREAMED, TOY, TRAIN, engine_for, random_batches

def lion8(ctx):
    n = 2**12 if ctx.dry else 2**28
    w, g = (torch.ones(n, dtype=t, device=ctx.device) for t in (torch.bfloat16, torch.float32))
    state = lion8_state(w)
    subjects = dict(ours=lambda: lion8_step(w, g, *state, 1e-5, seed=1, backend='triton'))
    nbytes = 2*(w.nbytes + sum(t.nbytes for t in state)) + g.nbytes
    for t in (yield from Stopwatch(ctx).rows(subjects, 1., 'lion8')).values():
        yield row(f'lion8, ours: {nbytes/n:.2f} bytes a parameter', nbytes/t.ms/1e6, 'GB/s', **t.fields())
        yield of_the_copy(ctx, 'lion8', nbytes, t, None if ctx.dry else .8)

def pinning(ctx):
    "Whether memory registered with the driver counts as pinned, and is as fast as what torch pins"
    if ctx.dry: return (yield note('pinning: no GPU to pin for'))
    memory = HostMemory('pinned', ctx.device)
    mine = memory.empty((256*MiB,), torch.uint8, 'activations')
    pinned = int(mine.is_pinned() and memory.placement == 'pinned')
    yield row('pinning: cudaHostRegister gives pinned memory', pinned, '', 1)
    there = torch.empty_like(mine, device=ctx.device)
    both = dict(mine=mine, theirs=torch.empty(256*MiB, dtype=torch.uint8, pin_memory=True))
    subjects = {name: functools.partial(there.copy_, t, non_blocking=True) for name, t in both.items()}
    good = yield from Stopwatch(ctx).rows(subjects, .5, 'pinning')
    ratio, rate = good['theirs'].ms/good['mine'].ms, mine.nbytes/good['mine'].ms/1e6
    yield row("pinning: its copies against torch's pinned memory", ratio, '×', .95, GB_per_s=rate)

def copied(model): return [p.detach().to('cpu', copy=True) for p in model.parameters()]

@torch.no_grad()
def load(model, values):
    for p, v in zip(model.parameters(), values): p.copy_(v)

def equal(ctx):
    "Three steps in fp32 by either engine: the largest difference is a share of the largest move"
    model = replace(TOY if ctx.dry else MEDIUM, n_layers=4, ternary=False)
    small = dict(precision='fp32', batch_size=2, seq_len=48 if ctx.dry else 300, grad_accum_steps=3)
    streamed = STREAMED | dict(block_inputs_on='pageable' if ctx.dry else 'pinned')
    for where in (dict(block_inputs_on='device'), streamed):
        train = replace(TRAIN, **MAJOR | where | small)
        ways = as_ordinary(train, 'none'), train
        if ctx.absent:
            for way in ways: account(model, way)
            continue
        first, ends, micro = None, [], random_batches(ctx, model, train)
        for way in ways:
            seed_everything(0)
            m = make_model(model, way, 'cpu' if way.weights_on == 'host' else ctx.device)
            # Made on another device, its weights were drawn by another generator.
            if ends: load(m, first)
            else: first = copied(m)
            made = make_engine(m, torch.optim.SGD(m.parameters(), .1, momentum=.9), way, device=ctx.device)
            for _ in range(3): made.step(micro)
            ends.append(copied(m))
        def far(a, b): return max(float((x - y).abs().max()) for x, y in zip(a, b))
        label = f"layer-major, weights on the {train.weights_on}: off the ordinary step's weights"
        yield check(label, far(*ends)/far(ends[0], first), 'of the move', 1e-4)

def flat(ctx):
    "Two hundred small steps with everything on the host, or as many as fit: bytes held after each"
    small = dict(batch_size=1, seq_len=128, grad_accum_steps=2)
    model, train = replace(MEDIUM, ternary=True), replace(recipe(ctx)[1], **STREAMED, **small)
    if ctx.absent: return account(model, train)
    engine, micro = engine_for(ctx, model, train), random_batches(ctx, model, train)
    seen = dict(allocated=[], host=[])
    began, longest = time.monotonic(), min(30., ctx.left - 6, ctx.limit/8)
    for k in range(200):
        if k > 20 and time.monotonic() - began > longest: break
        engine.step(micro)
        seen['allocated'].append(torch.cuda.memory_allocated())
        seen['host'].append(memory_in_use(torch.device('cpu')))
    for (what, y), limit in zip(seen.items(), (0., 64*KiB)):
        label, y = f'of {len(y)} steps', np.array(y[min(20, len(y)//2):], float)
        grows = float(np.polyfit(np.arange(len(y)), y, 1)[0]) if np.ptp(y) else 0.
        label = f'flat: {what}, growth over the last {len(y)} {label}'
        more = dict(first=y[0], last=y[-1], must=what == 'allocated')
        yield most(label, grows, 'B/step', limit, **more)

def engine(ctx):
    chosen = [lion8, *(() if ctx.absent else (pinning,)), equal, *(() if ctx.dry else (flat,))]
    yield from guarded(ctx, {f.__name__: functools.partial(f, ctx) for f in chosen}, 8)
