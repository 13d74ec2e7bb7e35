"""Dense Transformers on a small card: chatgot-85m at batch 8 under a cap of 4 GiB, and cells of the table
that `fits_which_card.py` predicts; peaks against the account, for three steps.
"""
from dataclasses import replace
import torch
from elleci.planning.account import account
from elleci.config import preset
from elleci.core import GiB, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.optim.optimizers import make_optimizer
from gpu.account import workspaces
from gpu.bench import failed, free, note, row

# (preset, training settings, GiB of the card whose place ours takes)
CASES = (
    ('chatgot-85m', dict(batch_size=8), 4),
    ('gpt-small', dict(batch_size=8, precision='bf16'), 8),
    ('gpt-small', dict(batch_size=8, precision='fp32', checkpointing='block'), 8),
    ('gpt-medium', dict(batch_size=8, precision='bf16', checkpointing='selective'), 12),
    ('gpt-medium', dict(batch_size=8, precision='fp16', checkpointing='block'), 8),
    ('gpt-medium', dict(batch_size=32, precision='bf16', checkpointing='block'), 24),
)
LIMITS = dict(allocated=.005, reserved=.01)
STEPS = 3


def configuration(ctx, name, changes):
    "Model and training of a case; the same in small on the CPU"
    config = preset(name)
    train = replace(config.train, **changes)
    if not ctx.dry: return config.model, train
    model = replace(config.model, d_model=48, n_layers=2, n_attn_heads=4, d_ff=96, vocab_size=256)
    return model, replace(train, batch_size=2, seq_len=32)


def draw_batches(ctx, model, train):
    "Tokens, labels and four documents a row, on the device"
    shape = train.batch_size, train.seq_len
    documents = (torch.arange(shape[1], device=ctx.device)//(shape[1]//4)).expand(shape)
    return [
        [
            torch.randint(model.vocab_size, shape, device=ctx.device),
            torch.randint(model.vocab_size, shape, device=ctx.device),
            documents.contiguous(),
        ]
        for _ in range(train.grad_accum_steps)
    ]


def cap(ctx, nbytes=None):
    "No more than this for torch's allocator; None: the whole card"
    if ctx.dry: return
    share = nbytes/torch.cuda.mem_get_info()[1] if nbytes else 1.
    torch.cuda.set_per_process_memory_fraction(min(1., share))


def trains(ctx, model, train):
    "Whether some steps from nothing run through under the cap that is set"
    if ctx.absent: return True    # the account has rehearsed them
    seed_everything(0)
    try:
        built = make_model(model, train, ctx.device)
        engine = make_engine(built, make_optimizer(built, train), train, device=ctx.device)
        batches = draw_batches(ctx, model, train)
        for _ in range(STEPS): engine.step(batches)
    except torch.OutOfMemoryError: return False
    return True


def measure_case(ctx, name, changes, card_gib, taken, context):
    "Rows of one case: does it train on so small a card, and what did it hold"
    model, train = configuration(ctx, name, changes)
    label = f'{name}, {train.batch_size} × {train.seq_len}, {train.precision}, {train.checkpointing}'
    predicted = account(model, train, workspaces=taken, context=context)
    free()
    if not ctx.dry: torch.cuda.reset_peak_memory_stats()
    # The context is beside what torch allocates, and the card must hold both.
    cap(ctx, card_gib*GiB - context)
    ran = trains(ctx, model, train)
    cap(ctx)
    yield row(f'{label}: trains within {card_gib} GiB, context included', int(ran), '', 1,
              predicted=int(predicted.fits(card_gib*GiB)), context=context)
    for kind, limit in LIMITS.items():
        said = getattr(predicted, f'peak_{kind}')
        got = said if ctx.dry or not ran else getattr(torch.cuda, f'max_memory_{kind}')()
        yield row(f'{label}: {kind}', got/GiB, 'GiB', predicted=said/GiB)
        if not ctx.dry and ran:
            yield row(f'{label}: {kind}, predicted off by', abs(said/got - 1), 'of it', limit, at_most=True)


def run(ctx):
    taken, context = [], 0
    if not ctx.dry:
        taken = workspaces()
        context = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    yield note('workspaces and context', workspaces=taken, context=context)
    for n, (name, changes, card_gib) in enumerate(CASES):
        if ctx.left < 10:
            yield note(f'cut for time: {len(CASES) - n} of {len(CASES)} cases', cut=True)
            return
        try: yield from measure_case(ctx, name, changes, card_gib, taken, context)
        except Exception as e: yield failed(f'{name}: {changes}', e)
