"""The layer-major engine at a middling size: the weights of the ordinary step, no growth over two hundred
steps, what copies cost, the 8-bit Lion's speed, pinned memory.
"""
import contextlib, functools, itertools, statistics, time, warnings
from dataclasses import replace
import numpy as np
import torch
from elleci.core import KiB, MiB, memory_in_use, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.engine.offload import HostMemory, ActivationStore
from elleci.kernels.lion8 import lion8_state, lion8_step
from elleci.planning.account import account
from gpu.bench import Stopwatch, failed, free, note, row
from gpu.recipe import STREAMED, as_ordinary, engine_for, recipe, seconds
from gpu.step_time import MAJOR, MEDIUM, TOY, TRAIN

HIDDEN = 1.02
COPY = .8
SAME = 1e-4
GROWS = dict(allocated=0., host=64*KiB)

def batches(ctx, model, train, micro=None):
    "Tokens, labels, documents, on the device"
    shape = train.batch_size, train.seq_len
    def draw(): return torch.randint(model.vocab_size, shape, device=ctx.device)
    return [
        [draw(), draw(), (torch.arange(shape[1], device=ctx.device) // 99).expand(shape).contiguous()]
        for _ in range(micro or train.grad_accum_steps)
    ]

def lion8_speed(ctx):
    n = 2**12 if ctx.dry else 2**28
    w = torch.zeros(n, dtype=torch.bfloat16, device=ctx.device)
    g = torch.ones(n, device=ctx.device)
    state = lion8_state(w)
    subjects = dict(ours=lambda: lion8_step(w, g, *state, 1e-5, seed=1, backend='triton'))
    times, nbytes = Stopwatch(ctx)(subjects, 1.), 2*(w.nbytes + sum(t.nbytes for t in state)) + g.nbytes
    for name, t in times.items():
        if isinstance(t, Exception):
            yield failed(f'lion8, {name}', t)
            continue
        yield row(f'lion8, {name}: {nbytes/n:.2f} bytes a parameter', nbytes/t.ms/1e6, 'GB/s', **t.fields())
        if name == 'ours':
            yield row(
                'lion8: of the copy',
                nbytes / t.ms * 1e3 / ctx.machine['bandwidth'],
                'of the bandwidth',
                None if ctx.dry else COPY,
            )

def pinning(ctx):
    "Whether memory registered with the driver counts as pinned, and is as fast as what torch pins"
    if ctx.dry:
        yield note('pinning: no GPU to pin for')
        return
    memory = HostMemory('pinned', ctx.device)
    mine = memory.empty((256*MiB,), torch.uint8, 'activations')
    yield row(
        'pinning: cudaHostRegister gives pinned memory',
        int(mine.is_pinned() and memory.placement == 'pinned'),
        '',
        1,
    )
    with warnings.catch_warnings():  # twice: refused
        warnings.simplefilter('ignore')
        memory._pin(mine)
    try:
        torch.ones(1, device=ctx.device).add_(1).item()
        clean = 1
    except RuntimeError: clean = 0
    yield row('pinning: after a refusal the next kernel runs', clean, '', 1)
    whole, raw = torch.empty(64*KiB + 9000, dtype=torch.uint8), torch.cuda.cudart()
    halves = [
        h
        for h in whole.split(whole.numel() // 2)
        if int(raw.cudaHostRegister(h.data_ptr(), h.nbytes, 0)) == 0
    ]
    yield row('pinning: neighbours that share a page are both pinned', int(len(halves) == 2), '', 1)
    for h in halves: raw.cudaHostUnregister(h.data_ptr())
    # takes a refusal's error with it
    with contextlib.suppress(RuntimeError): torch.ones(1, device=ctx.device)
    there = torch.empty_like(mine, device=ctx.device)
    theirs = torch.empty(256*MiB, dtype=torch.uint8, pin_memory=True)
    times = Stopwatch(ctx)(
        {
            name: functools.partial(there.copy_, t, non_blocking=True)
            for name, t in dict(mine=mine, theirs=theirs).items()
        },
        0.5,
    )
    yield row(
        "pinning: its copies against torch's pinned memory",
        times['theirs'].ms / times['mine'].ms,
        '×',
        0.95,
        GB_per_s=mine.nbytes / times['mine'].ms / 1e6,
    )

def copied(model): return [p.detach().to('cpu', copy=True) for p in model.parameters()]

@torch.no_grad()
def load(model, values):
    for p, v in zip(model.parameters(), values): p.copy_(v)

def equal(ctx):
    """Three steps in fp32 by either engine. Both add the same numbers in another order, so the largest
    difference is a share of the largest move"""
    model = replace(TOY if ctx.dry else MEDIUM, n_layers=4, ternary=False)
    for where in (
        MAJOR | dict(block_inputs_on='device'),
        MAJOR | STREAMED | dict(block_inputs_on='pageable' if ctx.dry else 'pinned'),
    ):
        train = replace(
            TRAIN,
            **where
            | dict(precision='fp32', batch_size=2, seq_len=48 if ctx.dry else 300, grad_accum_steps=3),
        )
        ways = as_ordinary(train, 'none'), train
        if ctx.absent:
            for way in ways: account(model, way)
            continue
        ends, micro = [], batches(ctx, model, train)
        for way in ways:
            seed_everything(0)
            m = make_model(model, way, 'cpu' if way.weights_on == 'host' else ctx.device)
            if not ends: first = copied(m)
            # Made on another device, its weights were drawn by another generator.
            else: load(m, first)
            sgd = torch.optim.SGD(m.parameters(), .1, momentum=.9)
            made = make_engine(m, sgd, way, device=ctx.device)
            for _ in range(3): made.step(micro)
            ends.append(copied(m))
        def far(a, b): return max(float((x - y).abs().max()) for x, y in zip(a, b))
        yield row(
            f"layer-major, weights on the {train.weights_on}: off the ordinary step's weights",
            far(*ends) / far(ends[0], first),
            'of the move',
            SAME,
            at_most=True,
            must=True,
        )

def copies(ctx, engine, micro):
    "A short step with the layers' inputs on the device, in pinned and in pageable memory, in turns"
    kinds = ('device', 'pageable') if ctx.dry else ('device', 'pinned', 'pageable')
    stashes = {k: ActivationStore(k, ctx.device, engine.transfer_stream) for k in kinds}
    taken = {k: [] for k in kinds}
    before = engine.activations
    for turn, k in itertools.product(range(3), kinds):
        if turn > 1 and ctx.left < 2*max(map(max, taken.values())) + 6: break
        engine.activations = stashes[k]
        s, _ = seconds(ctx, engine, micro)
        if turn: taken[k].append(s)
    engine.activations = before
    near = statistics.median(taken['device'])
    for k in kinds:
        yield row(
            f'copies: step of {len(micro)} micro-batches, inputs {k}',
            statistics.median(taken[k]),
            's',
            seconds=taken[k],
        )
    for k in kinds[1:]:
        yield row(
            f'copies: inputs {k}, against the device',
            statistics.median(taken[k]) / near,
            '×',
            HIDDEN if k == 'pinned' else None,
            at_most=True,
        )

def flat(ctx, most=30.):
    """Two hundred small steps with everything on the host, or as many as fit: bytes that the device and
    the process have after each"""
    small = dict(batch_size=1, seq_len=32 if ctx.dry else 128, grad_accum_steps=2)
    model = replace(TOY if ctx.dry else MEDIUM, ternary=True)
    train = replace(recipe(ctx)[1], **STREAMED, **small)
    if ctx.absent: return account(model, train)
    engine = engine_for(ctx, model, train)
    micro = batches(ctx, model, train)
    began = time.monotonic()
    seen = dict(allocated=[], host=[])
    most = min(most, ctx.left - 6, ctx.limit/8)
    for k in range(24 if ctx.dry else 200):
        if k > 20 and time.monotonic() - began > most: break
        engine.step(micro)
        if not ctx.dry: seen['allocated'].append(torch.cuda.memory_allocated())
        seen['host'].append(memory_in_use(torch.device('cpu')))
    for what, y in seen.items():
        if not y: continue
        y = np.array(y[min(20, len(y)//2):], float)
        grows = float(np.polyfit(np.arange(len(y)), y, 1)[0]) if np.ptp(y) else 0.
        yield row(
            f'flat: {what}, growth over the last {len(y)} of {len(seen["host"])} steps',
            grows,
            'B/step',
            None if ctx.dry else GROWS[what],
            at_most=True,
            first=y[0],
            last=y[-1],
            must=what == 'allocated' and not ctx.dry,
        )

def guarded(ctx, name, f, least=8):
    "The rows of f; what broke, or that there was no time"
    if ctx.left < least:
        yield note(f'cut for time: {name}', cut=True)
        return
    try: yield from f()
    except Exception as e: yield failed(name, e)
    free()

def copies_of_a_step(ctx):
    model = replace(TOY if ctx.dry else MEDIUM, ternary=True)
    train = replace(TRAIN, **MAJOR | dict(block_inputs_on='pageable' if ctx.dry else 'pinned'))
    if ctx.dry: train = replace(train, seq_len=48, batch_size=2, grad_accum_steps=2)
    if ctx.absent: return account(model, train)
    yield from copies(ctx, engine_for(ctx, model, train), batches(ctx, model, train))

def run(ctx):
    parts = dict(lion8=lion8_speed, pinning=pinning, equal=equal, flat=flat, copies=copies_of_a_step)
    if ctx.absent: del parts['pinning']
    if ctx.dry: del parts['flat']
    for name, f in parts.items(): yield from guarded(ctx, name, functools.partial(f, ctx))
