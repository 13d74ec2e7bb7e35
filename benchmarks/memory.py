"""Bytes, predicted and measured: how long an account takes, which batch fits which card, packed weights,
the disk of the set-up. See runner.py for the command line.
"""
import contextlib, gc, io, itertools, os, subprocess, sys, tempfile, time
from dataclasses import replace
from pathlib import Path
import torch
from elleci.config import CHOICES, PRESETS, config_to_json, preset
from elleci.core import GiB, atomic_write, fmt_bytes, seed_everything
from elleci.data.tokenizer import save_tokenizer, train_tokenizer
from elleci.engine.layer_major import make_engine, make_model
from elleci.inference.generate import elleci_pack
from elleci.layers.ffn import BitLinear, PackedLinear
from elleci.memory.allocator import replay
from elleci.memory.compose import compose
from elleci.memory.ledger import CARDS
from elleci.memory.measure import measure
from elleci.memory.trace import dry_run, gc_disabled
from elleci.optim.optimizers import make_optimizer
from elleci.planning import account as predict
from elleci.planning.foreign import PlainLlama, shape_named
from elleci.training.checkpoint import MODEL_FILE, save_weights
from elleci.training.load import load_run
from runner import ROOT, begun, main

# ------------------------------------------------------------------ how long an account takes

@gc_disabled()
def transformer(size, layers=6):
    "Peak and reserved bytes of a bf16 step with AdamW of a Transformer of this size, six of its layers run"
    shape = shape_named(size)
    with torch.device('meta'):
        model = PlainLlama(replace(shape, layers=layers)).bfloat16()
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()
    trace = compose(dry_run(step, model, [tokens]), 1, shape.layers - layers, blocks='layers')
    return trace.peak, replay(trace.replay_events()).peak_reserved

def of_preset(name):
    config = preset(name)
    a = predict.account(config.model, config.train)
    return a.trace.peak, a.peak_reserved

SUBJECTS = {'elleci-1b5': (of_preset, 'elleci-1b5'), '8B-shaped Transformer': (transformer, '8B'),
            '70B-shaped Transformer': (transformer, '70B')}

def account(repeats=7):
    "How long an account takes, imports not counted: elleci-1b5 as it trains, Transformers of 8B and 70B"
    # imports that torch does at first use
    transformer('1B')
    of_preset('elleci-tiny')
    rows = {name: dict(seconds=[]) for name in SUBJECTS}
    for _, (name, (f, of)) in itertools.product(range(repeats), SUBJECTS.items()):
        began = time.perf_counter()
        peak, reserved = f(of)
        rows[name]['seconds'].append(round(time.perf_counter() - began, 3))
        rows[name] |= dict(peak=peak, reserved=reserved)
    for name, r in rows.items(): print(name, r, flush=True)
    yield dict(rows=rows)

# ------------------------------------------------------------------ which batch fits which card

PRECISIONS = dict(fp32={}, bf16={}, fp16={}) | {'bf16-weights': dict(optimizer='lion8')}
HEADROOM = GiB # left free on each card
# (preset, checkpointing, precision, batch): what a CPU runs in seconds
SPOT_CHECKS = (
    ('gpt-tiny', 'none', 'fp32', 4), ('gpt-tiny', 'selective', 'bf16', 2), ('gpt-tiny', 'block', 'fp32', 8),
    ('gpt-tiny', 'offload', 'bf16-weights', 2), ('gpt-small', 'none', 'fp32', 1),
    ('chatgot-char', 'none', 'fp32', 2), ('chatgot-char', 'block', 'fp32', 2),
    ('chatgot-char', 'selective', 'bf16', 1), ('elleci-tiny', 'none', 'fp32', 1),
    ('elleci-tiny', 'block', 'fp32', 2),
)
DESCRIBED = 'seq_len', 'grad_accum_steps', 'optimizer', 'batch_size', 'precision', 'checkpointing', 'engine'

def ways(config):
    "{name: training settings}; a preset of the layer-major engine has one"
    if config.train.engine == 'layer-major': return {f'layer-major/{config.train.precision}': config.train}
    # What has no bf16 takes fp16, in as many bytes: it is counted where a preset is meant for such cards.
    in_fp16 = config.preset.startswith(('gpt-', 'chatgot-'))
    return {
        f'{policy}/{name}': replace(config.train, checkpointing=policy, precision=name, **changes)
        for policy in CHOICES['checkpointing']
        for name, changes in PRECISIONS.items() if name != 'fp16' or in_fp16
    }

def reserved_by_batch(model, train, largest):
    "{batch: bytes reserved}, until the largest card is full"
    found = {}
    for batch in (2**k for k in range(10)):
        if batch*train.seq_len >= 2**31 or batch > largest: break
        found[batch] = predict.account(model, replace(train, batch_size=batch)).total
        if found[batch] > max(CARDS.values()) - HEADROOM: break
    return found

def two_steps(model, train):
    "The peak of two steps on the CPU, from nothing, in bytes of tensors; and seconds"
    seed_everything(0)
    built = make_model(model, train)
    engine = make_engine(built, make_optimizer(built, train), train)
    shape = train.batch_size, train.seq_len
    def tokens(): return torch.randint(model.vocab_size, shape)
    def documents(): return (torch.arange(shape[1])//max(1, shape[1]//4)).expand(shape).contiguous()
    batches = [[tokens(), tokens(), documents()] for _ in range(train.grad_accum_steps)]
    began = time.perf_counter()
    with measure(torch.device('cpu'), [*built.parameters(), *(t for b in batches for t in b)]) as m:
        for _ in range(2): engine.step(batches)
    return m.peak_allocated, time.perf_counter() - began

def spot_check(name, checkpointing, precision, batch):
    "One configuration, predicted and run"
    config, way = preset(name), f'{checkpointing}/{precision}'
    train = replace(ways(config)[way], batch_size=batch, grad_accum_steps=1)
    predicted = predict.account(config.model, train, 'cpu').peak_allocated
    measured, seconds = two_steps(config.model, train)
    gc.collect()
    print(name, way, batch, fmt_bytes(measured), f'off by {predicted/measured - 1:+.3%}', flush=True)
    return dict(preset=name, way=way, batch=batch, seq_len=train.seq_len, predicted=predicted,
                measured=measured, seconds=round(seconds, 1))

def fits_which_card(presets=tuple(PRESETS), dry=False):
    """For every preset, checkpointing and precision: the bytes that a step reserves, by the account, with
    batches of 1, 2, 4, … until the largest card is full; ten of these also run on the CPU. What a record of
    this commit has is not computed again"""
    found = dict(headroom=HEADROOM, presets={}, reserved={}, spot_checks=[])
    if not dry: found |= begun('fits_which_card')
    for name in presets:
        if name in found['reserved']: continue
        config = preset(name)
        # Of elleci-1b5, which fits no card that it was meant for, as much as shows that.
        largest = 1 if dry else 4 if name == 'elleci-1b5' else 512
        found['presets'][name] = {key: getattr(config.train, key) for key in DESCRIBED}
        found['reserved'][name] = {way: reserved_by_batch(config.model, train, largest)
                                   for way, train in ways(config).items()}
        print(name, flush=True)
        yield found
    done = {(row['preset'], row['way'], row['batch']) for row in found['spot_checks']}
    for check in SPOT_CHECKS[:1] if dry else SPOT_CHECKS:
        if (check[0], f'{check[1]}/{check[2]}', check[3]) in done: continue
        found['spot_checks'].append(spot_check(*check))
        yield found

# ------------------------------------------------------------------ packed weights

def logits(folder, tokens):
    "What a saved model gives for some tokens, seconds to load it, and the bytes of its packed weights"
    began = time.perf_counter()
    _, _, model = load_run(folder, 'cpu')
    took = time.perf_counter() - began
    packed = sum(m.packed.nbytes for m in model.modules() if isinstance(m, PackedLinear))
    with torch.no_grad(): return model(tokens), took, packed

def packed(name='elleci-1b5-12gib', tokens=32, dry=False):
    """The 1.5B model in two bits a weight: file sizes, and the same logits before and after. The weights are
    those of a fresh model; takes 12 GiB of RAM and some minutes"""
    config = preset('elleci-tiny' if dry else name)
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder)/'run', Path(folder)/'packed'
        seed_everything(0)
        model = make_model(config.model, config.train)
        ternary = sum(m.weight.numel() for m in model.modules() if isinstance(m, BitLinear))
        save_weights(before, model, step='0')
        del model
        atomic_write(before/'config.json', config_to_json(config))
        save_tokenizer(train_tokenizer(['la memoria'], config.model.vocab_size), before/'tokenizer.json')
        with contextlib.redirect_stdout(io.StringIO()): size = elleci_pack(str(before), str(after))
        ids = torch.randint(config.model.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        whole, load_before, _ = logits(before, ids)
        small, load_after, own = logits(after, ids)
        yield dict(
            preset=config.preset, ternary_weights=ternary, file_before=(before/MODEL_FILE).stat().st_size,
            file_packed=size, rest_bytes=size - own, bytes_per_ternary_weight=own/ternary,
            logits_equal=bool(torch.equal(whole, small)), logits_compared=whole.numel(),
            load_seconds=[round(load_before, 1), round(load_after, 1)],
        )

# ------------------------------------------------------------------ the disk of the set-up

def disk_bytes(folder):
    "Bytes of the files in a folder; what is linked twice counts once"
    stats = [path.stat() for path in Path(folder).rglob('*') if path.is_file() and not path.is_symlink()]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in stats}.values())

def stage(clone, target):
    "Make a target in a clone, with the Python of this environment: bytes, and those of the largest packages"
    command = ['make', f'PYTHON={Path(sys.executable).resolve()}', target]
    subprocess.run(command, cwd=clone, check=True, stdout=subprocess.DEVNULL)
    [site] = (clone/'.venv').glob('lib/python3*/site-packages')
    sizes = {p.name: disk_bytes(p) for p in site.iterdir() if p.is_dir() and p.suffix != '.dist-info'}
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:8])
    return dict(bytes=disk_bytes(clone/'.venv'), packages=largest)

def timed_test(folder):
    "`make test`: minutes by the clock, its last line, and how busy the machine was before it"
    load, began = os.getloadavg()[0], time.time()
    done = subprocess.run(['.ci/run'], cwd=folder, stdout=subprocess.PIPE, text=True)
    minutes = round((time.time() - began)/60, 1)
    return dict(minutes=minutes, verdict=done.stdout.splitlines()[-1], load_before=round(load, 2))

def set_up(test=False, only_test=False):
    """The disk of `make train`'s environment and of `make test`'s, in a fresh clone of the last commit; with
    --test the minutes of `make test` in it, with --only-test those in this folder alone"""
    found = dict(python=sys.version.split()[0])
    if only_test:
        yield found | dict(test=timed_test(ROOT))
        return
    with tempfile.TemporaryDirectory() as tmp:
        clone = Path(tmp)/'elleci'
        subprocess.run(['git', 'clone', '-q', str(ROOT), str(clone)], check=True)
        found |= dict(clone_bytes=disk_bytes(clone), stages={})
        for name, target in (('make train', '.venv/run'), ('make test', '.venv/dev')):
            found['stages'][name] = stage(clone, target)
        if test: found['test'] = timed_test(clone)
        yield found

if __name__ == '__main__':
    main(account, fits_which_card, packed, set_up)
