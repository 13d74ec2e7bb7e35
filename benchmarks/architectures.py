"""Which is better? Elleci's hybrid, a dense Transformer and an eigenstate model with equal parameters, on
equal tokens, each with ternary and with ordinary linear layers and with a learning rate of its own:
data/results/architectures-<commit>.json, which 93_which_is_better reads.

    python benchmarks/architectures.py [--steps N] [--seeds N] [--models NAME …] [--dry]

For each model one seed tries rates, twice as far apart each, until the best has a worse one on either side;
the other seeds take the best. Every training is kept as soon as it ends, in runs/architectures.json, and one
that is there is not made again. The speed is measured at the end, model by model in turn, on one thread.
"""
import argparse, datetime, hashlib, json, os, statistics, tempfile, time
from dataclasses import asdict, fields, replace
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch
from elleci.config import Config, ModelConfig, TrainConfig
from elleci.core import atomic_write, seed_everything
from elleci.data.loader import make_loader, open_data
from elleci.data.sources import train_tokenizer_on
from elleci.engine.layer_major import make_engine
from elleci.memory.ledger import parameter_counts
from elleci.model import Elleci
from elleci.optim.optimizers import make_optimizer
from elleci.planning.account import account
from elleci.training.loop import Callbacks, TrainingRun, fit, token_byte_counts, validate
from elleci.training.run import measure_steps
from tiny import ROOT, commit, hardware

HYBRID = ModelConfig(
    vocab_size=1024,
    d_model=128,
    n_layers=4,
    pattern='MMMA',
    headdim=32,
    n_attn_heads=4,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    kv_lora_rank=32,
    n_eigenstates=128,
    d_ff=352,
    tie_embeddings=True,
)
PATTERNS = {'hybrid': 'MMMA', 'dense': 'T', 'eigenstate': 'E'}
TRAIN = TrainConfig(
    steps=300,
    seq_len=256,
    batch_size=4,
    grad_accum_steps=1,
    optimizer='adamw',
    schedule='cosine',
    warmup=.1,
    min_lr_ratio=.1,
    precision='bf16',
    val_every=10**6,
    val_rows=10**6,
    mix=((0., (('english', 68), ('italian', 18), ('instructions', 14))),),
)
FIRST_RATES = 4e-3, 8e-3, 16e-3
SHAPES = (256, 4), (2048, 1)    # tokens in a row, rows: where speed and bytes are measured


def count(model): return sum(parameter_counts(model).values())


def equal_in_size(pattern):
    "The model of this pattern whose feed-forward part brings it nearest to the hybrid's parameters"
    def with_width(d_ff): return replace(HYBRID, pattern=pattern, d_ff=d_ff)
    return min(map(with_width, range(64, 1024, 8)), key=lambda model: abs(count(model) - count(HYBRID)))


def models():
    return {
        f"{name}, {'ternary' if ternary else 'bf16'}": replace(equal_in_size(pattern), ternary=ternary)
        for name, pattern in PATTERNS.items()
        for ternary in (True, False)
    }


def trained(model, lr, seed, steps, data, val, token_bytes):
    "One training: its bits per byte on all text that is held out, and its course"
    config = Config('', model, replace(TRAIN, steps=steps, lr=lr, seed=seed))
    seed_everything(seed)
    network = Elleci(model)
    engine = make_engine(network, make_optimizer(network, config.train), config.train)
    losses = []
    def log(**event):
        if 'loss' in event: losses.append(event['loss'])
    started = time.process_time()
    fit(TrainingRun(config, {}, Callbacks(log=log)), engine, make_loader(data, config.train))
    seconds = time.process_time() - started
    found = validate(engine, val, 8, 10**6, token_bytes)
    return dict(
        lr=lr,
        seed=seed,
        cpu_seconds=round(seconds, 1),
        losses=[round(statistics.mean(losses[i:i + 10]), 4) for i in range(0, len(losses), 10)],
        **{name: round(value, 5) for name, value in found.items()},
    )


def chosen_settings(config):
    "The settings that are not the default ones: a version with more of them knows its trainings again"
    return {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}


class Trainings:
    "The trainings made so far; each is written down as it ends"
    def __init__(self, path, steps):
        self.path = path
        self.steps = steps
        self.done = json.loads(path.read_text()) if path.exists() else {}

    def __call__(self, model, lr, seed, *text):
        settings = json.dumps([chosen_settings(model), chosen_settings(TRAIN), self.steps, lr, seed])
        key = hashlib.sha256(settings.encode()).hexdigest()[:16]
        if key not in self.done:
            self.done[key] = trained(model, lr, seed, self.steps, *text)
            atomic_write(self.path, json.dumps(self.done, indent=1))
        return self.done[key]


def tuned(train):
    "Trainings at seed 0 whose best rate has a worse one on either side; `train` is called with a rate"
    runs = {lr: train(lr) for lr in FIRST_RATES}
    while True:
        best = min(runs, key=lambda lr: runs[lr]['val_bpb'])
        if best == min(runs): lr = best/2
        elif best == max(runs): lr = best*2
        else: return best, runs
        runs[lr] = train(lr)


def engines_of(models, seq_len, batch_size):
    train = replace(TRAIN, seq_len=seq_len, batch_size=batch_size)
    seed_everything(0)
    networks = {name: Elleci(model) for name, model in models.items()}
    return {name: make_engine(n, make_optimizer(n, train), train) for name, n in networks.items()}


def random_batch(seq_len, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(HYBRID.vocab_size, (batch_size, seq_len + 1), generator=generator)
    return text[:, :-1], text[:, 1:], torch.zeros(batch_size, seq_len, dtype=torch.long)


def speeds(models, seq_len, batch_size, rounds):
    "Seconds of a step (forward, backward, update), one model after the other in each round"
    engines = engines_of(models, seq_len, batch_size)
    seconds = {name: [] for name in models}
    for i in range(rounds + 1):
        batch = random_batch(seq_len, batch_size, i)
        for name, engine in engines.items():
            started = time.process_time()
            engine.step([batch])
            if i: seconds[name].append(time.process_time() - started)
    return {name: statistics.median(s) for name, s in seconds.items()}


def peaks(model, seq_len, batch_size):
    "The bytes of a step at its peak: here, by the account and measured, and on a GPU, by the account"
    train = replace(TRAIN, seq_len=seq_len, batch_size=batch_size)
    seed_everything(0)
    engine = engines_of({'': model}, seq_len, batch_size)['']
    with measure_steps(engine) as memory:
        for i in range(2): engine.step([random_batch(seq_len, batch_size, i)])
    return dict(
        predicted=account(model, train, 'cpu').peak_allocated,
        measured=memory.measurement().peak_allocated,
        predicted_on_gpu=account(model, train).peak_allocated,
    )


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=TRAIN.steps)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--models', nargs='+', choices=list(models()), default=list(models()))
    p.add_argument('--dry', action='store_true', help='few steps, nothing is written')
    a = p.parse_args()
    torch.set_num_threads(1)
    chosen = {name: model for name, model in models().items() if name in a.models}
    steps = 4 if a.dry else a.steps
    folder = tempfile.mkdtemp()
    kept = Path(folder if a.dry else ROOT/'runs')/'architectures.json'
    kept.parent.mkdir(exist_ok=True)
    trainings = Trainings(kept, steps)
    tok = train_tokenizer_on(TRAIN.data, HYBRID.vocab_size)
    token_bytes = token_byte_counts(tok)
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        steps=steps,
        train=asdict(replace(TRAIN, steps=steps)),
        models={},
    )
    for name, model in chosen.items():
        def train(lr, seed=0):
            data, val = open_data(replace(TRAIN, steps=steps, seed=seed), tok, folder)
            run = trainings(model, lr, seed, data, val, token_bytes)
            print(name, {k: v for k, v in run.items() if k != 'losses'}, flush=True)
            return run
        best, tried = tuned(train)
        result['models'][name] = dict(
            config=asdict(model),
            parameters=count(model),
            best_lr=best,
            rates=sorted(tried.values(), key=lambda run: run['lr']),
            seeds=[tried[best], *(train(best, seed) for seed in range(1, a.seeds))],
            shapes=[dict(batch=f'{B} × {T}', tokens=B*T, **peaks(model, T, B)) for T, B in SHAPES],
        )
    for i, (T, B) in enumerate(SHAPES):
        for name, seconds in speeds(chosen, T, B, 2 if a.dry else 15).items():
            result['models'][name]['shapes'][i]['step_cpu_seconds'] = round(seconds, 5)
    print({name: [s['val_bpb'] for s in m['seeds']] for name, m in result['models'].items()})
    if a.dry: return
    path = ROOT/'data'/'results'/f"architectures-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
