"""elleci-1b5 at 64 × 1,024 tokens under a cap of 12 GiB, then 6.5 (resident) and 3 (streamed): peaks,
seconds, copies, a flat line; the 8-bit Lion; pinned memory.
"""
import contextlib, functools, itertools, math, statistics, time, warnings
from dataclasses import replace
import numpy as np
import torch
from elleci.planning.account import account
from elleci.config import preset
from elleci.core import GiB, KiB, MiB, memory_in_use, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.kernels import lion8 as kernel
from elleci.kernels.lion8 import lion8_state, lion8_step
from elleci.engine.offload import HostMemory, ActivationStore
from elleci.optim.optimizers import make_optimizer
from elleci.planning.step_time import measured_machine, step_flops
from gpu import fused
from gpu.bench import Stopwatch, failed, free, note, row
from gpu.ssd import launch
from gpu.step_time import MAJOR, MEDIUM, TOY, TRAIN

PLACES = dict(streamed=dict(weights_on='host', states_on='host'), resident={})
CAPS, LIMITS = dict(streamed=3*GiB, resident=6.5*GiB), dict(allocated=.005, reserved=.01)
SLOWER = 1.05
HIDDEN = 1.02
COPY = .8
SAME = 1e-4
GROWS = dict(allocated=0., host=64*KiB)
SHORT = 4                                       # micro-batches of a step whose seconds alone are wanted

def recipe(ctx, **changes):
    "Model and training of the preset for 12 GiB, residuals in pinned memory; toys on the CPU"
    c = preset('elleci-1b5-12gib', block_inputs_on='pageable' if ctx.dry else 'pinned')
    small = dict(seq_len=48, batch_size=2, grad_accum_steps=4) if ctx.dry else {}
    return replace(TOY, ternary=True) if ctx.dry else c.model, replace(c.train, **small | changes)

def ordinary(train, checkpointing='block'):
    return replace(
        train,
        engine='grad_accum',
        block_inputs_on='auto',
        weights_on='device',
        states_on='device',
        checkpointing=checkpointing,
    )

def launches(dry):
    H = MEDIUM.n_ssm_heads
    scans = [
        (
            'layer-major (4, 1024, 64)',
            functools.partial(launch, (4, 1024, 64, 64, 1, 16), torch.bfloat16, True, save=(False, True)),
        ),
        *(
            (
                f'layer-major {shape} {str(t)[6:]}',
                functools.partial(launch, (*shape, H, 64, 1, 16), t, True, save=(False, True)),
            )
            for shape, t in (((1, 128), torch.bfloat16), ((2, 300), torch.float32))
        ),
    ]
    return kernel.launches()[:1] if dry else kernel.launches() + scans + fused.launches(dry)

def wait(ctx):
    if not ctx.dry: torch.cuda.synchronize()

def batches(ctx, model, train, micro=None):
    "Tokens, labels, documents, on the device"
    shape = train.batch_size, train.seq_len
    def draw(): return torch.randint(model.vocab_size, shape, device=ctx.device)
    return [
        [draw(), draw(), (torch.arange(shape[1], device=ctx.device) // 99).expand(shape).contiguous()]
        for _ in range(micro or train.grad_accum_steps)
    ]

def engine_for(ctx, model, train):
    "From nothing; what is to live on the host is drawn on the card all the same, for speed"
    seed_everything(0)
    m = make_model(model, train, ctx.device)
    if train.weights_on == 'host': m = m.to('cpu')
    return make_engine(m, make_optimizer(m, train), train, device=ctx.device)

def seconds(ctx, engine, micro):
    wait(ctx)
    began = time.perf_counter()
    engine.step(micro)
    wait(ctx)
    return time.perf_counter() - began

def cap(ctx, nbytes=None):
    "No more than this for torch's allocator; None: the whole card"
    if not ctx.dry:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, nbytes / torch.cuda.mem_get_info()[1]) if nbytes else 1.0
        )

def from_nothing(ctx):
    free()
    if not ctx.dry: torch.cuda.reset_peak_memory_stats()

def workspaces(ctx):
    "Bytes of the blocks that remain when a small training is over: what the libraries keep"
    if ctx.dry: return []
    small = replace(TRAIN, batch_size=1, seq_len=128)
    for t in (small, replace(small, **MAJOR)):
        engine_for(ctx, replace(TOY, ternary=True), t).step(batches(ctx, TOY, t, 2))
    free()
    return [
        b['size']
        for s in torch.cuda.memory_snapshot()
        for b in s['blocks']
        if b['state'] == 'active_allocated'
    ]

def peaks(ctx, name, model, train, taken):
    "Measured since `from_nothing` against the account's"
    a = account(model, train, workspaces=taken)
    for kind, limit in LIMITS.items():
        said = getattr(a, f'peak_{kind}')
        got = None if ctx.dry else getattr(torch.cuda, f'max_memory_{kind}')()
        off = None if ctx.dry else abs(said/got - 1)
        yield row(
            f'{name}: {kind}, predicted {said / GiB:.3f} GiB',
            said / GiB if ctx.dry else got / GiB,
            'GiB',
            predicted=said,
            host=a.host,
        )
        yield row(f'{name}: {kind}, predicted off by', off, 'of it', limit, at_most=True)

# ------------------------------------------------------------------ small things first: a miss here is a
# failure

def same_bits(ctx):
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
        yield row(
            f'lion8, {str(dtype)[6:]}, {n} numbers: bytes that differ from the torch twin',
            differ,
            '',
            0,
            at_most=True,
            must=True,
        )

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
        MAJOR | PLACES['streamed'] | dict(block_inputs_on='pageable' if ctx.dry else 'pinned'),
    ):
        train = replace(
            TRAIN,
            **where
            | dict(precision='fp32', batch_size=2, seq_len=48 if ctx.dry else 300, grad_accum_steps=3),
        )
        ends, micro = [], batches(ctx, model, train)
        for way in (ordinary(train, 'none'), train):
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

# ------------------------------------------------------------------ the recipe

def capped(ctx, name, taken):
    "Two steps, under 12 GiB and under less; (engine or None, batches, seconds of the second); yields rows"
    model, train = recipe(ctx, **PLACES[name])
    from_nothing(ctx)
    rows, engine, least = [], None, CAPS[name]
    try:
        engine = engine_for(ctx, model, train)
        micro = batches(ctx, model, train)
        from_nothing(ctx)
        cap(ctx, 12*GiB)
        warm = seconds(ctx, engine, micro)
        cap(ctx, least)
        taken_s = seconds(ctx, engine, micro)
    except torch.OutOfMemoryError as e:
        cap(ctx)
        rows.append(row(f'{name}: trains under {least/GiB:.1f} GiB', 0, '', 1, said=str(e)[:300]))
        return rows, None, None, math.nan
    cap(ctx)
    rows.append(row(f'{name}: trains under {least/GiB:.1f} GiB', 1, '', 1, first_step=warm))
    rows += list(peaks(ctx, name, model, train, taken))
    if not ctx.dry:
        rows.append(
            row(
                f'{name}: allocated at most',
                torch.cuda.max_memory_allocated() / GiB,
                'GiB',
                least / GiB,
                at_most=True,
            )
        )
        free_now, total = torch.cuda.mem_get_info()
        rows.append(
            row(
                f'{name}: of the card, its context and all other processes included',
                (total - free_now) / GiB,
                'GiB',
                12,
                at_most=True,
                context=total - free_now - torch.cuda.memory_reserved(),
                host=memory_in_use(torch.device('cpu')),
            )
        )
    return rows, engine, micro, taken_s

def speed(ctx, name, model, train, s, rate):
    """Tokens a second, and the share of the card's bf16 products that the model's operations are,
    recompute not counted"""
    ops, tokens = step_flops(model, train), train.tokens_per_step
    asked = sum(sum(ops[k].values()) for k in ('forward', 'backward'))
    yield row(f'{name}: a step of {tokens:,} tokens', s, 's')
    yield row(f'{name}: tokens', tokens/s, '/s')
    yield row(
        f'{name}: model FLOP utilisation',
        asked / s / rate,
        'of the products',
        with_recompute=sum(sum(p.values()) for p in ops.values()) / s / rate,
    )

def in_turns(ctx, engines, micro, kept, most=3):
    "Steps of either engine in turns, as many as there is time for; {name: seconds}"
    for _ in range(most):
        if ctx.left < sum(map(statistics.median, kept.values())) + 6: break
        for name, e in engines.items(): kept[name].append(seconds(ctx, e, micro))
    return kept

def copies(ctx, engine, micro):
    "A short step with the layers' inputs on the device, in pinned and in pageable memory, in turns"
    kinds = ('device', 'pageable') if ctx.dry else ('device', 'pinned', 'pageable')
    stashes = {k: ActivationStore(k, ctx.device, engine.transfer_stream) for k in kinds}
    taken = {k: [] for k in kinds}
    before = engine.activations
    for turn, k in itertools.product(range(3), kinds):
        if turn > 1 and ctx.left < 2*max(map(max, taken.values())) + 6: break
        engine.activations = stashes[k]
        s = seconds(ctx, engine, micro)
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
    train = replace(recipe(ctx)[1], **PLACES['streamed'], **small)
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

def plainly(ctx, taken, rate):
    "The ordinary step with block checkpoints and all gradients, no cap: four micro-batches stand for sixteen"
    model, train = recipe(ctx)
    train = replace(ordinary(train), grad_accum_steps=SHORT)
    from_nothing(ctx)
    engine = engine_for(ctx, model, train)
    micro = batches(ctx, model, train)
    s = [seconds(ctx, engine, micro) for _ in range(3)][1:]
    yield from peaks(ctx, 'ordinary, block checkpoints', model, train, taken)
    yield from speed(ctx, 'ordinary, block checkpoints', model, train, min(s), rate)

def guarded(ctx, name, f, least=8):
    "The rows of f; what broke, or that there was no time"
    if ctx.left < least:
        yield note(f'cut for time: {name}', cut=True)
        return
    try: yield from f()
    except Exception as e: yield failed(name, e)
    cap(ctx)
    free()

def run(ctx):
    taken = workspaces(ctx)
    rate = ctx.machine.get('flops') or measured_machine(ctx.device, *((2**20, 64) if ctx.dry else ())).matmul
    for name, f in (
        ('lion8', same_bits),
        ('lion8', lion8_speed),
        ('pinning', pinning),
        ('layer-major against ordinary', equal),
        ('flat', flat),
    ):
        yield from guarded(ctx, name, functools.partial(f, ctx))
    yield from guarded(ctx, 'ordinary', lambda: plainly(ctx, taken, rate), 20)
    yield from guarded(ctx, 'the recipe', lambda: the_recipe(ctx, taken, rate), 20)

def the_recipe(ctx, taken, rate):
    engines, kept, micro = {}, {}, None
    for name in PLACES:                                        # streamed first: it leaves nothing on the card
        if engines and ctx.left < 2*max(map(max, kept.values())) + 12:
            yield note(f'cut for time: {name}', cut=True)
            break
        rows, engine, given, s = capped(ctx, name, taken)
        yield from rows
        if engine: engines[name], kept[name], micro = engine, [s], given
    if 'resident' in engines:
        short = micro[:SHORT]
        if ctx.left > 8*kept['resident'][0]*len(short)/len(micro) + 8:
            yield from copies(ctx, engines['resident'], short)
        else: yield note('cut for time: copies', cut=True)
    for name, all_of_it in in_turns(ctx, engines, micro, kept).items():
        model, train = recipe(ctx, **PLACES[name])
        yield from speed(ctx, name, model, train, statistics.median(all_of_it), rate)
        yield note(f'{name}: seconds of {len(all_of_it)} steps', seconds=all_of_it)
    if len(kept) == 2:
        s = {k: statistics.median(v) for k, v in kept.items()}
        yield row(
            'streamed against resident',
            s['streamed'] / s['resident'],
            '×',
            None if ctx.dry else SLOWER,
            at_most=True,
        )
