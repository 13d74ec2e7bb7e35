"""Which batch fits which card: data/results/fits_which_card-<commit>.json, which `92_gpt2_baselines` shows.

    python benchmarks/fits_which_card.py [--presets NAME ...]

For every preset, every checkpointing and every precision: the bytes that torch's allocator reserves in a
step, by the account, at each number of rows that a micro-batch may have (BATCHES), until the largest card
is full. A cell of the table is then a look-up, for any card. bf16-weights come with 8-bit Lion, the only
optimizer that trains them; presets of the layer-major engine are counted as they are.

Ten of these configurations (SPOT_CHECKS) are also run for real: two steps on the CPU, from nothing, whose
peak is held against the account for a CPU. The file is written after each preset and each check; what it
holds of the same commit is not computed again.
"""
import argparse, datetime, gc, json, time
from dataclasses import replace
import torch
from elleci.config import CHECKPOINTING, PRESETS, preset
from elleci.core import GiB, atomic_write, fmt_bytes, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.memory.ledger import CARDS
from elleci.memory.measure import measure
from elleci.optim.optimizers import make_optimizer
from elleci.planning.account import account
from tiny import ROOT, commit, hardware

PRECISIONS = {
    'fp32': dict(precision='fp32'),
    'bf16': dict(precision='bf16'),
    'fp16': dict(precision='fp16'),
    'bf16-weights': dict(precision='bf16-weights', optimizer='lion8'),
}
BATCHES = [2**k for k in range(10)]
HEADROOM = GiB # left free on each card
# Of elleci-1b5, which fits no card that it was meant for, as much as shows that.
MOST_ROWS = {'elleci-1b5': 4}
# What has no bf16 takes fp16, in as many bytes: it is counted where a preset is meant for such cards.
PRESETS_IN_FP16 = 'gpt-', 'chatgot-'
# (preset, checkpointing, precision, batch): what a CPU runs in seconds
SPOT_CHECKS = (
    ('gpt-tiny', 'none', 'fp32', 4),
    ('gpt-tiny', 'selective', 'bf16', 2),
    ('gpt-tiny', 'block', 'fp32', 8),
    ('gpt-tiny', 'offload', 'bf16-weights', 2),
    ('gpt-small', 'none', 'fp32', 1),
    ('chatgot-char', 'none', 'fp32', 2),
    ('chatgot-char', 'block', 'fp32', 2),
    ('chatgot-char', 'selective', 'bf16', 1),
    ('elleci-tiny', 'none', 'fp32', 1),
    ('elleci-tiny', 'block', 'fp32', 2),
)


def ways(config):
    "name: training settings; a preset of the layer-major engine has one"
    in_fp16 = config.preset.startswith(PRESETS_IN_FP16)
    if config.train.engine == 'layer-major': return {f'layer-major/{config.train.precision}': config.train}
    return {
        f'{checkpointing}/{name}': replace(config.train, checkpointing=checkpointing, **changes)
        for checkpointing in CHECKPOINTING
        for name, changes in PRECISIONS.items()
        if name != 'fp16' or in_fp16
    }


def reserved_by_batch(model, train, most):
    "{batch: bytes reserved}, until the largest card is full"
    found = {}
    for batch in BATCHES:
        if batch*train.seq_len >= 2**31 or batch > most: break
        found[batch] = account(model, replace(train, batch_size=batch)).total
        if found[batch] > max(CARDS.values()) - HEADROOM: break
    return found


def measured_peak(model, train):
    "The peak of two steps on the CPU, from nothing, in bytes of tensors; and seconds"
    seed_everything(0)
    built = make_model(model, train)
    engine = make_engine(built, make_optimizer(built, train), train)
    shape = train.batch_size, train.seq_len
    documents = (torch.arange(shape[1])//max(1, shape[1]//4)).expand(shape).contiguous()
    batches = [
        [torch.randint(model.vocab_size, shape), torch.randint(model.vocab_size, shape), documents.clone()]
        for _ in range(train.grad_accum_steps)
    ]
    began = time.perf_counter()
    with measure(torch.device('cpu'), [*built.parameters(), *(t for b in batches for t in b)]) as m:
        for _ in range(2): engine.step(batches)
    return m.peak_allocated, time.perf_counter() - began


def spot_check(name, checkpointing, precision, batch):
    "One configuration, predicted and run"
    config = preset(name)
    train = replace(ways(config)[f'{checkpointing}/{precision}'], batch_size=batch, grad_accum_steps=1)
    predicted = account(config.model, train, 'cpu').peak_allocated
    measured, seconds = measured_peak(config.model, train)
    gc.collect()
    return dict(
        preset=name,
        way=f'{checkpointing}/{precision}',
        batch=batch,
        seq_len=train.seq_len,
        predicted=predicted,
        measured=measured,
        seconds=round(seconds, 1),
    )


def describe(train):
    "What of a preset's training the table depends on"
    names = 'seq_len', 'grad_accum_steps', 'optimizer', 'batch_size', 'precision', 'checkpointing', 'engine'
    return {name: getattr(train, name) for name in names}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--presets', nargs='+', choices=PRESETS, default=list(PRESETS))
    a = p.parse_args()
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), headroom=HEADROOM,
                  presets={}, reserved={}, spot_checks=[])
    path = ROOT/'data'/'results'/f"fits_which_card-{result['commit']}.json"
    if path.exists(): result |= json.loads(path.read_text())

    def save():
        now = datetime.datetime.now(datetime.timezone.utc)
        atomic_write(path, json.dumps(result | dict(date=now.strftime('%Y-%m-%d %H:%M UTC'))) + '\n')

    for name in a.presets:
        if name in result['reserved']: continue
        began, config = time.process_time(), preset(name)
        most = MOST_ROWS.get(name, BATCHES[-1])
        result['presets'][name] = describe(config.train)
        result['reserved'][name] = {
            way: reserved_by_batch(config.model, train, most) for way, train in ways(config).items()
        }
        save()
        seconds = time.process_time() - began
        print(f"{name}: {len(result['reserved'][name])} ways, {seconds:.0f} s", flush=True)
    done = {(row['preset'], row['way'], row['batch']) for row in result['spot_checks']}
    for check in SPOT_CHECKS:
        name, checkpointing, precision, batch = check
        if (name, f'{checkpointing}/{precision}', batch) in done: continue
        row = spot_check(*check)
        result['spot_checks'].append(row)
        save()
        off = row['predicted']/row['measured'] - 1
        print(*check, f"measured {fmt_bytes(row['measured'])}, predicted {off:+.3%}", flush=True)
    print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
