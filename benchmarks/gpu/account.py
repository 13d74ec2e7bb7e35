"""What the account predicts, against the card: thirty configurations of our own step, and its other
optimizers, each two steps from nothing; the allocator's own history replayed.
"""
import gc, gzip, itertools, json, tempfile
from dataclasses import replace
from pathlib import Path
import torch
from elleci.planning.account import account
from elleci.config import ModelConfig, TrainConfig
from elleci.core import optional, seed_everything
from elleci.engine.accumulate import grad_accum_step
from elleci.memory.allocator import check_trace
from elleci.model import Elleci
from elleci.optim.optimizers import make_optimizer
from gpu.bench import failed, note, row

BASE = ModelConfig(vocab_size=32_128, d_model=1024, n_layers=8, d_ff=2816, n_attn_heads=8)
TRAIN = TrainConfig(seq_len=1024, batch_size=2, grad_accum_steps=1, optimizer='adamw')
LIMITS = dict(allocated=.005, reserved=.01)
OPTIMIZERS = ('lion', 'adamw') if optional('lion_pytorch') else ('adamw',)
# Paged states are not torch's, so its allocator's history has none of them.
MORE_OPTIMIZERS = ('lion8', 'galore', 'muon') + ('lion8-bnb', 'adamw8-bnb')*bool(optional('bitsandbytes'))

def configurations():
    "Thirty of them: mixers, precision, policy, accumulation, optimizer, sizes; and the other optimizers"
    ways = itertools.product(('MMMA', 'M', 'A'), ('bf16', 'fp32'), ('none', 'block'), (1, 2))
    found = [
        (
            replace(BASE, pattern=p, ternary=i % 3 > 0, tie_embeddings=i % 2 == 0),
            replace(
                TRAIN,
                precision=precision,
                checkpointing=policy,
                grad_accum_steps=M,
                optimizer=OPTIMIZERS[i % len(OPTIMIZERS)],
            ),
        )
        for i, (p, precision, policy, M) in enumerate(ways)
    ]
    shapes = (
        dict(seq_len=257),
        dict(batch_size=5, seq_len=640),
        dict(seq_len=4096, batch_size=1),
        dict(batch_size=1, seq_len=128),
        dict(batch_size=8),
        dict(seq_len=2048, checkpointing='block'),
    )
    return found + [
        (replace(BASE, n_layers=4 + i), replace(TRAIN, optimizer=OPTIMIZERS[i % len(OPTIMIZERS)], **s))
        for i, s in enumerate(shapes)
    ] + [(BASE, replace(TRAIN, optimizer=name)) for name in MORE_OPTIMIZERS]

def train_steps(model_cfg, train, steps=2):
    "Our step on the GPU, from nothing"
    seed_everything(0)
    device = torch.device('cuda')
    model = Elleci(model_cfg, train.checkpointing).to(device)
    optimizer = make_optimizer(model, train)
    shape = train.batch_size, train.seq_len
    batches = [
        [
            torch.randint(model_cfg.vocab_size, shape).to(device),
            torch.randint(model_cfg.vocab_size, shape).to(device),
            (torch.arange(shape[1]) // 99).expand(shape).contiguous().to(device),
        ]
        for _ in range(train.grad_accum_steps)
    ]
    for _ in range(steps): grad_accum_step(model, batches, optimizer, train.max_grad_norm, train.precision)

SMALL = (replace(BASE, n_layers=4, d_model=256, n_attn_heads=2, d_ff=512, vocab_size=512),
         replace(TRAIN, batch_size=1, seq_len=128))

def workspaces():
    "Bytes of the blocks that remain when a small training is over: what the libraries keep"
    train_steps(*SMALL)
    gc.collect()
    torch.cuda.empty_cache()
    blocks = (b for s in torch.cuda.memory_snapshot() for b in s['blocks'])
    return [b['size'] for b in blocks if b['state'] == 'active_allocated']

def history(run):
    "The allocator's own history of `run()`, in the schema that `check_trace` reads"
    torch.cuda.memory._record_memory_history(max_entries=10**6, stacks='python', context=None)
    try:
        run()
        snapshot = torch.cuda.memory._snapshot()
    finally: torch.cuda.memory._record_memory_history(enabled=None)
    letters = {
        'alloc': 'a',
        'free_completed': 'f',
        'segment_alloc': 'S',
        'segment_free': 'F',
        'snapshot': 'x',
        'oom': 'o',
    }
    events = [
        [letters[e['action']], e.get('addr', 0), e['size']]
        for e in snapshot['device_traces'][0]
        if e['action'] in letters
    ]
    segments = [
        dict(
            address=s['address'],
            total_size=s['total_size'],
            segment_type=s['segment_type'],
            stream=s['stream'],
            blocks=[[b['size'], b['state'], b['requested_size']] for b in s['blocks']],
        )
        for s in snapshot['segments']
    ]
    return dict(schema='cuda allocator trace', settings={}, events=events, segments=segments)

def write_history(run, path):
    with gzip.open(path, 'wt') as f: json.dump(history(run), f)

def recorded(model_cfg, train, folder):
    "The allocator's own history of two steps, replayed by ours"
    path = Path(folder)/'trace.json.gz'
    write_history(lambda: train_steps(model_cfg, train), path)
    return {k: v for k, v in check_trace(path).items() if isinstance(v, int)}

def compare(model_cfg, train, taken):
    "Predicted against measured, for one configuration"
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    a = account(model_cfg, train, workspaces=taken)
    try: train_steps(model_cfg, train)
    except torch.OutOfMemoryError: return dict(predicted_allocated=a.peak_allocated, out_of_memory=True)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(
        predicted_allocated=a.peak_allocated,
        allocated=allocated,
        predicted_reserved=a.peak_reserved,
        reserved=reserved,
        off_allocated=a.peak_allocated / allocated - 1,
        off_reserved=a.peak_reserved / reserved - 1,
        peak=a.trace.peak_operator().op,
    )

def describe(m, t):
    return dict(
        pattern=m.pattern,
        layers=m.n_layers,
        ternary=m.ternary,
        tied=m.tie_embeddings,
        precision=t.precision,
        checkpointing=t.checkpointing,
        optimizer=t.optimizer,
        batch=f'{t.grad_accum_steps} × {t.batch_size} × {t.seq_len}',
    )

def run(ctx):
    chosen = configurations()
    if ctx.dry or ctx.absent:                                       # the predictions, without a card
        for n, (m, t) in list(enumerate([*chosen, SMALL]))[::1 if ctx.absent else 4]:
            a = account(m, t)
            yield row(
                f'{n}: {" ".join(map(str, describe(m, t).values()))}: allocated, predicted',
                a.peak_allocated / 2**20,
                'MiB',
                reserved=a.peak_reserved,
            )
        return
    free, total = torch.cuda.mem_get_info()
    taken = workspaces()
    after = torch.cuda.mem_get_info()[0]
    yield note(
        'workspaces and context',
        total=total,
        workspaces=taken,
        context_and_kernels=total - after - torch.cuda.memory_reserved(),
        context_at_start=total - free,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n, (m, t) in enumerate(chosen):
            if ctx.left < 6:
                yield note(f'cut for time: {len(chosen) - n} of {len(chosen)} configurations', cut=True)
                break
            try: found = describe(m, t) | compare(m, t, taken)
            except Exception as e:
                yield failed(f'{n}: {describe(m, t)}', e)
                continue
            if 'out_of_memory' in found:
                yield note(f'{n}: out of memory', **found)
                continue
            rows.append(found)
            for kind, limit in LIMITS.items():
                yield row(
                    f'{n}: {kind}, predicted off by {found[f"off_{kind}"]:+.3%}',
                    abs(found[f'off_{kind}']),
                    'of it',
                    limit,
                    at_most=True,
                    **found,
                )
            if n % 10 == 0:
                gc.collect()
                torch.cuda.empty_cache()
                seen = recorded(m, t, folder)
                yield row(
                    f'{n}: replay of {seen["events"]} events, disagreements',
                    seen['disagreements'],
                    '',
                    0,
                    at_most=True,
                    **seen,
                )
    for kind, limit in LIMITS.items():
        if rows:
            yield row(
                f'{kind}: worst of {len(rows)}',
                max(abs(r[f'off_{kind}']) for r in rows),
                'of it',
                limit,
                at_most=True,
            )
