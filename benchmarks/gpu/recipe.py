"""elleci-1b5-12gib on text, 64 × 1,024 tokens a step: resident under a cap of 12 GiB, streamed under 3, by
the ordinary engine. Bytes and seconds against those predicted, no growth, a loss that falls.
"""
import contextlib, itertools, pydoc_data.topics, statistics
from dataclasses import replace
from unittest import mock
import torch
from elleci.config import preset
from elleci.core import GiB, memory_in_use
from elleci.engine import accumulate
from elleci.planning.account import account
from elleci.planning.step_time import Machine, step_flops, step_time
from gpu.bench import free, most, note, row
from gpu.training import (
    MAJOR, STREAMED, TOY, TRAIN, cap, engine_for, from_nothing, peaks, run_steps, seconds, workspaces,
    write_history
)

LIMITS = dict(allocated=.005, reserved=.015)
OFF_SECONDS = .15
HOST_BOUND = dict(batch_size=1, seq_len=64)

def recipe(ctx, **changes):
    "Model and training of the preset for 12 GiB, residuals in pinned memory; toys on the CPU"
    c = preset('elleci-1b5-12gib', block_inputs_on='pageable' if ctx.dry else 'pinned')
    small = dict(seq_len=48, batch_size=2, grad_accum_steps=4) if ctx.dry else {}
    return replace(TOY, ternary=True) if ctx.dry else c.model, replace(c.train, **small | changes)

def as_ordinary(train, checkpointing='block'):
    places = dict(block_inputs_on='auto', weights_on='device', states_on='device')
    return replace(train, engine='grad_accum', checkpointing=checkpointing, **places)

def text_batches(ctx, train, n=None):
    "The n micro-batches of a step, for ever: bytes of Python's own documentation, a document for each topic"
    topics = [t.encode() for t in pydoc_data.topics.topics.values()]
    text = torch.frombuffer(bytearray(b''.join(topics)), dtype=torch.uint8)
    owner = torch.repeat_interleave(torch.arange(len(topics)), torch.tensor([len(t) for t in topics]))
    size = train.batch_size*train.seq_len
    places = itertools.cycle(range(0, len(text) - size, size))
    def batch(at):
        parts = text[at:at + size], text[at + 1:at + size + 1], owner[at:at + size]
        return [t.long().view(train.batch_size, train.seq_len).to(ctx.device) for t in parts]
    while True: yield [batch(next(places)) for _ in range(n or train.grad_accum_steps)]

def steps_under(ctx, name, model, train, card_bytes, n):
    "Rows of n steps from nothing, torch's allocator capped"
    if not ctx.absent: return measured_steps(ctx, name, model, train, card_bytes, n)
    # At the sizes of a card that is not there, the account's rehearsal is the step.
    small, way = replace(TOY, ternary=True), replace(TRAIN, batch_size=1, seq_len=128)
    whole = (model, train), (model, replace(train, **HOST_BOUND))
    for m, t in ((small, way), (small, replace(way, **MAJOR)), *whole): account(m, t)
    return []

def measured_steps(ctx, name, model, train, card_bytes, n):
    predicted = account(model, train, workspaces=workspaces(ctx))
    should = dict(predicted=int(predicted.peak_reserved <= card_bytes), head=True)
    source = text_batches(ctx, train)
    took, losses, after = [], [], []
    fits = f'{name}: trains under {card_bytes/GiB:.1f} GiB'
    try:
        engine = engine_for(ctx, model, train)
        from_nothing(ctx)
        cap(ctx, card_bytes)
        for k in range(n):
            if k > 1 and ctx.left < 1.3*took[-1] + 3:
                yield note(f'{name}: {n - k} of {n} steps were cut for time', cut=True)
                break
            s, result = seconds(ctx, engine, next(source))
            took.append(s)
            losses.append(result['loss'])
            after.append(0 if ctx.dry else torch.cuda.memory_allocated())
            yield row(f'{name}: step {k + 1}', took[-1], 's', loss=losses[-1], allocated=after[-1])
    except torch.OutOfMemoryError as e:
        yield row(fits, 0, '', 1, **should, said=str(e)[:300])
        return
    finally: cap(ctx)
    yield row(fits, 1, '', 1, **should)
    yield from peaks(ctx, name, predicted, LIMITS, head=True)
    if not ctx.dry: yield from on_the_card(name)
    # The optimizer's states appear in the first step.
    grown = max(after[1:]) - min(after[1:]) if after[1:] else None
    yield most(f'{name}: grown from the second of {len(took)} steps to the last', grown, 'B', 0, head=True)
    fell, least = losses[0] - statistics.fmean(losses[-3:]), None if ctx.dry else .05
    yield row(f'{name}: loss, from {losses[0]:.3f}, fell by', fell, 'nats', least, head=True)
    yield from speed(ctx, name, model, train, statistics.median(took[1:] or took))
    if ctx.dry: return
    # Later, so that they slow none of the steps above, and where there is time.
    for look in (profiled, host_bound, traced):
        if ctx.left < 3*took[-1] + 5: return
        if look is traced: engine = None
        try: yield from look(ctx, name, engine, model, train, next(source))
        except Exception as e: yield note(f'{name}: {look.__name__}: {type(e).__name__}: {str(e)[:300]}')

def profiled(ctx, name, engine, model, train, micro, n_most=60):
    "Another step under torch's profiler: the card's seconds by kernel, and how long it had nothing to do"
    with torch.autograd.profiler.profile(use_device='cuda', use_cpu=False, use_kineto=True) as p:
        engine.step(micro)
        torch.cuda.synchronize()
    spent, spans = {}, []
    for e in p.kineto_results.events():
        if 'CUDA' not in str(e.device_type()): continue
        kernel, start, ns = e.name(), e.start_ns(), e.duration_ns()
        n, sum_ns = spent.get(kernel, (0, 0))
        spent[kernel] = n + 1, sum_ns + ns
        # Copies over the link run beside the kernels.
        if not kernel.startswith('Mem'): spans.append((start, start + ns))
    busy, until = 0, 0
    for start, end in sorted(spans):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    kernels = [[k[:120], n, ns/1e9] for k, (n, ns) in sorted(spent.items(), key=lambda x: -x[1][1])]
    whole = (max(e for _, e in spans) - min(s for s, _ in spans))/1e9
    more = dict(whole=whole, launches=len(spans), kernels=kernels[:n_most], head=True)
    more['rest'] = sum(s for _, _, s in kernels[n_most:])
    yield row(f'{name}: kernels run, in a step of {whole:.3f} s under the profiler', busy/1e9, 's', **more)

def host_bound(ctx, name, engine, model, train, micro):
    "A step of as many operators and hardly any data: the seconds that Python and the launches take"
    source = text_batches(ctx, replace(train, **HOST_BOUND))
    took = [seconds(ctx, engine, next(source))[0] for _ in range(3)]
    yield row(f'{name}: a step of as many operators on 64 tokens each', min(took), 's', took=took, head=True)

def traced(ctx, name, _, model, train, micro):
    "What torch's allocator does from nothing through two steps, in a file of its own"
    path = ctx.folder/f'gpu-{name.replace(",", "").replace(" ", "-")}-trace.json.gz'
    free()
    write_history(lambda: run_steps(ctx, model, train, 2), path)
    yield note(f'{name}: allocations of two steps in {path.name}')

def on_the_card(name):
    "All that the card holds, and the process beside it"
    free_now, total = torch.cuda.mem_get_info()
    label, used = f'{name}: of the card, its context and all other processes included', total - free_now
    beside = dict(context=used - torch.cuda.memory_reserved(), host=memory_in_use(torch.device('cpu')))
    yield row(label, used/GiB, 'GiB', **beside)

def speed(ctx, name, model, train, s):
    "Seconds against those predicted from the rates; tokens a second; the model's share of the products"
    predicted = step_time(model, train, Machine(**ctx.machine['step_machine']))
    total, limit = predicted['total'], None if ctx.dry else OFF_SECONDS
    more = dict(predicted=total, binds=predicted['binds'], head=True)
    yield row(f'{name}: a step, predicted {total:.3g} s', s, 's', **more)
    yield most(f'{name}: its seconds, predicted off by', abs(total/s - 1), 'of it', limit, head=True)
    yield row(f'{name}: tokens', train.tokens_per_step/s, '/s', head=True)
    ops, rate = step_flops(model, train), s*ctx.machine['flops']
    asked, computed = (sum(sum(ops[k].values()) for k in kinds) for kinds in (('forward', 'backward'), ops))
    label = f'{name}: model FLOP utilisation'    # recompute not counted
    yield row(label, asked/rate, 'of the products', with_recompute=computed/rate, head=True)

# ------------------------------------------------------------------ the parts

def resident(ctx):
    yield from steps_under(ctx, 'resident', *recipe(ctx), 12*GiB, 5 if ctx.dry else 20)

def rows(ctx):
    "As many tokens in a few large micro-batches: the host has time, and the card decides"
    model, train = recipe(ctx, **({} if ctx.dry else dict(batch_size=32, grad_accum_steps=2)))
    yield from steps_under(ctx, '32 rows at a time', model, train, 60*GiB, 3 if ctx.dry else 8)

def streamed(ctx):
    yield from steps_under(ctx, 'streamed', *recipe(ctx, **STREAMED), 3*GiB, 3 if ctx.dry else 8)

def ordinary(ctx):
    "With the ternary weights made anew wherever they are used, then kept for the step, as the engine does"
    model, train = recipe(ctx)
    train = as_ordinary(train)
    with mock.patch.object(accumulate, 'cache_ternary_weights', lambda model: contextlib.nullcontext()):
        yield from steps_under(ctx, 'ordinary, no ternary copies', model, train, 12*GiB, 3)
    free()
    if ctx.left > 12 or ctx.dry or ctx.absent:
        yield from steps_under(ctx, 'ordinary', model, train, 14*GiB, 3)
