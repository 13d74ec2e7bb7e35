"""Whole steps: the card and its rates, peaks against the account (our model, dense ones under caps, the
allocator's own history replayed), and seconds against those predicted from the rates.
"""
import functools, gzip, importlib.metadata, itertools, json, platform, statistics, tempfile, time
from dataclasses import asdict, replace
from pathlib import Path
import torch
from elleci.config import ModelConfig, TrainConfig, preset
from elleci.core import GiB, optional, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.memory.allocator import check_trace
from elleci.memory.measure import bandwidth
from elleci.optim.optimizers import make_optimizer
from elleci.planning import step_time as model_of_time
from elleci.planning.account import account as predict
from gpu.bench import Stopwatch, documents_of, free, guarded, most, note, row

MEDIUM = ModelConfig(vocab_size=32_128, d_model=1024, n_layers=12, d_ff=2816, n_attn_heads=8)
TOY = replace(MEDIUM, vocab_size=256, d_model=64, n_layers=4, d_ff=96, headdim=16, n_attn_heads=2,
              qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=32)
TRAIN = TrainConfig(seq_len=1024, batch_size=8, grad_accum_steps=4, optimizer='adamw')
MAJOR = dict(engine='layer-major', clip_by='layer', optimizer='lion8', precision='bf16-weights',
             block_inputs_on='device')
STREAMED = dict(weights_on='host', states_on='host')
LIMITS = dict(allocated=.005, reserved=.01)

# ------------------------------------------------------------------ what other parts use, too

def wait(ctx):
    if not ctx.dry: torch.cuda.synchronize()

def cap(ctx, nbytes=None):
    "No more than this for torch's allocator; None: the whole card"
    if ctx.dry: return
    share = nbytes/torch.cuda.mem_get_info()[1] if nbytes else 1.
    torch.cuda.set_per_process_memory_fraction(min(1., share))

def from_nothing(ctx):
    free()
    if not ctx.dry: torch.cuda.reset_peak_memory_stats()

def random_batches(ctx, model, train, length=99):
    "Tokens, labels, and documents of so many tokens, for each micro-batch"
    shape = train.batch_size, train.seq_len
    def draw(): return torch.randint(model.vocab_size, shape, device=ctx.device)
    def documents(): return documents_of(shape[1], length, shape[0], ctx.device)
    return [[draw(), draw(), documents()] for _ in range(train.grad_accum_steps)]

def engine_for(ctx, model, train):
    "From nothing; what is to live on the host is drawn on the card all the same, for speed"
    seed_everything(0)
    m = make_model(model, train, ctx.device)
    if train.weights_on == 'host': m = m.to('cpu')
    return make_engine(m, make_optimizer(m, train), train, device=ctx.device)

def seconds(ctx, engine, micro):
    "(seconds of a step, what it returns)"
    wait(ctx)
    began = time.perf_counter()
    result = engine.step(micro)
    wait(ctx)
    return time.perf_counter() - began, result

def run_steps(ctx, model, train, n, at_most=None, length=99):
    "Seconds of each of n steps from nothing, torch's allocator capped; none where memory runs out"
    if ctx.absent:
        predict(model, train)    # its rehearsal launches what the steps would
        return [1.]*n
    from_nothing(ctx)
    cap(ctx, at_most)
    try:
        engine, batches = engine_for(ctx, model, train), random_batches(ctx, model, train, length)
        return [seconds(ctx, engine, batches)[0] for _ in range(n)]
    except torch.OutOfMemoryError: return []
    finally: cap(ctx)

def peaks(ctx, name, predicted, limits, **more):
    "Measured since `from_nothing` against the account's"
    for kind, limit in limits.items():
        expected, measured = getattr(predicted, f'peak_{kind}'), not (ctx.dry or ctx.absent)
        got = getattr(torch.cuda, f'max_memory_{kind}')() if measured else expected
        label = f'{name}: {kind}, predicted {expected/GiB:.3f} GiB'
        yield row(label, got/GiB, 'GiB', predicted=expected, host=predicted.host, **more)
        yield most(f'{label}, off by', abs(expected/got - 1) if measured else None, 'of it', limit, **more)

def workspaces(ctx):
    "Bytes of the blocks that remain when small trainings are over: what the libraries keep"
    if ctx.dry: return []
    model, train = replace(TOY, ternary=True), replace(TRAIN, batch_size=1, seq_len=128, grad_accum_steps=2)
    for way in (train, replace(train, **MAJOR)):
        engine_for(ctx, model, way).step(random_batches(ctx, model, way))
    free()
    blocks = (b for s in torch.cuda.memory_snapshot() for b in s['blocks'])
    return [b['size'] for b in blocks if b['state'] == 'active_allocated']

def write_history(run, path):
    "The allocator's own history of `run()`, in the schema that `check_trace` reads"
    torch.cuda.memory._record_memory_history(max_entries=10**6, stacks='python', context=None)
    try:
        run()
        snapshot = torch.cuda.memory._snapshot()
    finally: torch.cuda.memory._record_memory_history(enabled=None)
    letters = dict(alloc='a', free_completed='f', segment_alloc='S', segment_free='F', snapshot='x', oom='o')
    trace = [e for e in snapshot['device_traces'][0] if e['action'] in letters]
    events = [[letters[e['action']], e.get('addr', 0), e['size']] for e in trace]
    def segment(s):
        blocks = [[b['size'], b['state'], b['requested_size']] for b in s['blocks']]
        return {k: s[k] for k in ('address', 'total_size', 'segment_type', 'stream')} | dict(blocks=blocks)
    segments = list(map(segment, snapshot['segments']))
    found = dict(schema='cuda allocator trace', settings={}, events=events, segments=segments)
    with gzip.open(path, 'wt') as f: json.dump(found, f)

# ------------------------------------------------------------------ machine

RATES = dict(link_in='GB/s', link_out='GB/s', memory='GB/s', matmul='TFLOP/s', fp32='TFLOP/s', int8='TOP/s')

def version(package):
    try: return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError: return None

def card():
    p = torch.cuda.get_device_properties(0)
    free_now, total = torch.cuda.mem_get_info()
    return dict(device=p.name, capability=10*p.major + p.minor, memory=p.total_memory, L2=p.L2_cache_size,
                multiprocessors=p.multi_processor_count, context=total - free_now)

def machine(ctx):
    "The card; a copy within memory (bytes read and written), a bf16 product, the rates of `step_time`"
    found = dict(device=f'CPU ({platform.machine()})') if ctx.dry else card()
    found |= {n: version(n) for n in ('triton', 'numpy', 'transformers', 'mamba_ssm')}
    found |= dict(torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version())
    label = f'{found["device"]}, torch {found["torch"]}, Triton {found["triton"]}'
    yield note(label, machine=found, head=True)
    times = [bandwidth(ctx.device, 2**20 if ctx.dry else 2**31, 5) for _ in range(1 if ctx.dry else 5)]
    speed = 1e9*statistics.median(times)
    yield row('copy within memory', speed/1e9, 'GB/s', machine=dict(bandwidth=speed), head=True)
    n = 64 if ctx.dry else 8192
    a, b = torch.randn(2, n, n, device=ctx.device).bfloat16()
    c = torch.empty_like(a)
    t = Stopwatch(ctx)(dict(matmul=lambda: torch.mm(a, b, out=c)))['matmul']
    rate = 2*n**3/t.ms*1e3
    yield row('bf16 matrix product', rate/1e12, 'TFLOP/s', machine=dict(flops=rate), head=True, **t.fields())
    rates = model_of_time.measured_machine(ctx.device, *((2**20, 64) if ctx.dry else ()))
    for what, unit in RATES.items():
        yield row(f'rate: {what}', getattr(rates, what)/(1e9 if unit == 'GB/s' else 1e12), unit)
    yield row('rate: pageable', rates.pageable, 'of the link')
    yield row('rate: launch', rates.launch*1e6, 'µs', machine=dict(step_machine=asdict(rates)), head=True)

# ------------------------------------------------------------------ account

SMALLER = replace(MEDIUM, n_layers=8)
TWO_ROWS = replace(TRAIN, batch_size=2, grad_accum_steps=1)
SHAPES = (dict(seq_len=257), dict(batch_size=5, seq_len=640), dict(seq_len=4096, batch_size=1),
          dict(batch_size=1, seq_len=128), dict(batch_size=8), dict(seq_len=2048, checkpointing='block'))

def configurations():
    "Thirty: mixers, precision, policy, accumulation, optimizer, sizes; and the other optimizers"
    lion = ('lion', 'adamw') if optional('lion_pytorch') else ('adamw',)
    # Paged states are not torch's, so its allocator's history has none of them.
    others = ('lion8', 'galore', 'muon') + ('lion8-bnb', 'adamw8-bnb')*bool(optional('bitsandbytes'))
    ways = itertools.product(('MMMA', 'M', 'A'), ('bf16', 'fp32'), ('none', 'block'), (1, 2))
    for i, (pattern, precision, policy, M) in enumerate(ways):
        how = dict(precision=precision, checkpointing=policy, grad_accum_steps=M)
        how['optimizer'] = lion[i % len(lion)]
        model = replace(SMALLER, pattern=pattern, ternary=i % 3 > 0, tie_embeddings=i % 2 == 0)
        yield model, replace(TWO_ROWS, **how)
    for i, shape in enumerate(SHAPES):
        yield replace(SMALLER, n_layers=4 + i), replace(TWO_ROWS, optimizer=lion[i % len(lion)], **shape)
    for name in others: yield SMALLER, replace(TWO_ROWS, optimizer=name)

def describe(m, t):
    return dict(pattern=m.pattern, layers=m.n_layers, ternary=m.ternary, tied=m.tie_embeddings,
                precision=t.precision, checkpointing=t.checkpointing, optimizer=t.optimizer,
                batch=f'{t.grad_accum_steps} × {t.batch_size} × {t.seq_len}')

def compared(ctx, model, train, taken):
    "Predicted against measured, for one configuration"
    a = predict(model, train, workspaces=taken)
    if not run_steps(ctx, model, train, 2):
        return dict(predicted_allocated=a.peak_allocated, out_of_memory=True)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(
        predicted_allocated=a.peak_allocated, allocated=allocated,
        predicted_reserved=a.peak_reserved, reserved=reserved,
        off_allocated=a.peak_allocated/allocated - 1, off_reserved=a.peak_reserved/reserved - 1,
        peak=a.trace.peak_operator().op,
    )

def configuration_rows(ctx, n, model, train, taken, worst, folder):
    "Rows of one configuration; each tenth also has its history replayed"
    found = describe(model, train) | compared(ctx, model, train, taken)
    if 'out_of_memory' in found:
        yield note(f'{n}: out of memory', **found)
        return
    worst.append(found)
    for kind, limit in LIMITS.items():
        off = found[f'off_{kind}']
        yield most(f'{n}: {kind}, predicted off by {off:+.3%}', abs(off), 'of it', limit, **found)
    if n % 10: return
    free()
    path = Path(folder)/'trace.json.gz'
    write_history(lambda: run_steps(ctx, model, train, 2), path)
    seen = {k: v for k, v in check_trace(path).items() if isinstance(v, int)}
    label = f'{n}: replay of {seen["events"]} events, disagreements'
    yield most(label, seen['disagreements'], '', 0, **seen)

def account(ctx):
    "What the account predicts, against the card: configurations of our step, two steps each from nothing"
    chosen = list(configurations())
    if ctx.dry or ctx.absent:                                       # the predictions, without a card
        for n, (m, t) in list(enumerate(chosen))[::1 if ctx.absent else 4]:
            a = predict(m, t)
            label = f'{n}: {" ".join(map(str, describe(m, t).values()))}: allocated, predicted'
            yield row(label, a.peak_allocated/2**20, 'MiB', reserved=a.peak_reserved)
        return
    free_now, total = torch.cuda.mem_get_info()
    taken, worst = workspaces(ctx), []
    beside = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    yield note('workspaces and context', total=total, workspaces=taken, context_and_kernels=beside,
               context_at_start=total - free_now)
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            f'{n}: {describe(*c)}': functools.partial(configuration_rows, ctx, n, *c, taken, worst, folder)
            for n, c in enumerate(chosen)
        }
        yield from guarded(ctx, cases, 6)
    for kind, limit in LIMITS.items() if worst else ():
        off = max(abs(r[f'off_{kind}']) for r in worst)
        yield most(f'{kind}: worst of {len(worst)}', off, 'of it', limit)

# ------------------------------------------------------------------ baselines

# preset, training settings, GiB of the card whose place ours takes
DENSE = (
    ('chatgot-85m', dict(batch_size=8), 4),
    ('gpt-small', dict(batch_size=8, precision='bf16'), 8),
    ('gpt-small', dict(batch_size=8, precision='fp32', checkpointing='block'), 8),
    ('gpt-medium', dict(batch_size=8, precision='bf16', checkpointing='selective'), 12),
    ('gpt-medium', dict(batch_size=8, precision='fp16', checkpointing='block'), 8),
    ('gpt-medium', dict(batch_size=32, precision='bf16', checkpointing='block'), 24),
)

def dense_case(ctx, name, changes, card_gib, taken, context):
    "Does it train on so small a card, context included, and what did it hold?"
    config = preset(name)
    model, train = config.model, replace(config.train, **changes)
    if ctx.dry:
        model = replace(model, d_model=48, n_layers=2, n_attn_heads=4, d_ff=96, vocab_size=256)
        train = replace(train, batch_size=2, seq_len=32)
    label = f'{name}, {train.batch_size} × {train.seq_len}, {train.precision}, {train.checkpointing}'
    predicted = predict(model, train, workspaces=taken, context=context)
    ran = run_steps(ctx, model, train, 3, card_gib*GiB - context, train.seq_len//4)
    yield row(f'{label}: trains within {card_gib} GiB, context included', int(bool(ran)), '', 1,
              predicted=int(predicted.fits(card_gib*GiB)), context=context)
    if ran: yield from peaks(ctx, label, predicted, LIMITS)

def baselines(ctx):
    "Dense Transformers on small cards: cells of the table that `memory.py fits_which_card` predicts"
    taken, context = workspaces(ctx), 0
    if not ctx.dry:
        context = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    yield note('workspaces and context', workspaces=taken, context=context)
    cases = {f'{name}: {changes}': functools.partial(dense_case, ctx, name, changes, gib, taken, context)
             for name, changes, gib in DENSE}
    yield from guarded(ctx, cases, 10)

# ------------------------------------------------------------------ step_time

OFF = .25   # what a model of six rates may be off by

def kinds_of_steps():
    streamed = MAJOR | STREAMED | dict(block_inputs_on='pinned')
    return {
        'ordinary': (False, {}),
        'ordinary, ternary': (True, {}),
        'ordinary, ternary, checkpoints': (True, dict(checkpointing='block')),
        'ordinary, fp32': (False, dict(precision='fp32')),
        'layer-major': (False, MAJOR),
        'layer-major, ternary': (True, MAJOR),
        'layer-major, streamed': (False, streamed),
        'layer-major, streamed, few tokens': (False, streamed | dict(grad_accum_steps=1, batch_size=1)),
    }

def kind_of_step(ctx, name, ternary, change, worst):
    "Rows of one kind: seconds, and those predicted"
    pinned = change.get('block_inputs_on') == 'pinned'
    if ctx.dry and pinned: change = change | dict(block_inputs_on='pageable')
    model = replace(TOY if ctx.dry else MEDIUM, ternary=ternary)
    small = dict(seq_len=48, batch_size=2, grad_accum_steps=2) if ctx.dry else {}
    train = replace(TRAIN, **small | change)
    predicted = model_of_time.step_time(model, train, model_of_time.Machine(**ctx.machine['step_machine']))
    taken, total = run_steps(ctx, model, train, 3 if ctx.dry else 7), predicted['total']
    if not taken: return (yield note(f'{name}: out of memory', gave_up=True))
    measured = statistics.median(taken[2:])
    worst.append(abs(total/measured - 1))
    terms = {k: predicted[k] for k in model_of_time.TERMS}
    yield row(name, measured, 's', predicted=total, binds=predicted['binds'], terms=terms, seconds=taken,
              tokens_per_s=train.tokens_per_step/measured,
              shape=f'{train.grad_accum_steps} × {train.batch_size} × {train.seq_len}')
    label = f'{name}: predicted {total:.3g} s, off by {total/measured - 1:+.0%}'
    yield most(label, worst[-1], 'of it', None if ctx.dry else OFF)

def step_time(ctx):
    "The seconds of real steps against those that `elleci.planning.step_time` predicts from the rates"
    worst = []
    cases = {name: functools.partial(kind_of_step, ctx, name, *kind, worst)
             for name, kind in kinds_of_steps().items()}
    yield from guarded(ctx, cases, 8)
    if worst and not ctx.dry: yield most(f'worst of {len(worst)}', max(worst), 'of it', OFF)
