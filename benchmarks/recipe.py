"""Recipe A's training tricks against plain AdamW with a cosine, on elleci-tiny at equal tokens:
data/results/recipe-<commit>.json.

    python benchmarks/recipe.py [--seeds N] [--steps N] [--jobs N] [--dry]

Each variant tries its learning rates with the first seed, and trains the other seeds at the best of them.
Several trainings run side by side, one thread each, so the times are not to be compared with those of a
training alone.
"""
import argparse, contextlib, datetime, io, json, os, tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
import torch
from elleci.config import config_to_json, preset
from elleci.core import atomic_write
from elleci.training.telemetry import read_metrics
from elleci.training.run import elleci_train
from tiny import ROOT, commit, hardware

EVERY = 20   # steps that a point of the curve averages over
# of a run that averages, both losses are kept: of its last weights, and of their mean
LION = dict(averaging_start=.8)
VARIANTS = {
    'AdamW, cosine': (dict(optimizer='adamw', schedule='cosine', min_lr_ratio=0.1), (1e-3, 2e-3, 4e-3)),
    'Lion, WSD': (LION, (1e-3, 2e-3)),
    'Lion, WSD, LeRaC': (LION | dict(lerac_ratio=0.1), (1e-3, 2e-3)),
    'Lion, WSD, LeRaC, growing rows': (
        LION | dict(lerac_ratio=0.1, seq_len_schedule=((0.0, 4), (0.1, 2), (0.3, 1))),
        (1e-3, 2e-3),
    ),
}

def train(variant, lr, seed, steps):
    "One training, as the command does it"
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as out,
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        config = preset('elleci-tiny', steps=steps, seed=seed, lr=lr, val_rows=10**6, **VARIANTS[variant][0])
        atomic_write(Path(out)/'config.json', config_to_json(config))
        elleci_train(out=out, resume=True)
        rows = read_metrics(out)
    losses = [r['loss'] for r in rows if 'loss' in r]
    curve = [
        [min(i + EVERY, len(losses)), round(sum(losses[i : i + EVERY]) / len(losses[i : i + EVERY]), 5)]
        for i in range(0, len(losses), EVERY)
    ]
    last = [r for r in rows if 'val_loss' in r][-1] | next((r for r in rows if 'average_loss' in r), {})
    return dict(
        variant=variant,
        lr=lr,
        seed=seed,
        **{k: round(v, 5) for k, v in last.items() if '_loss' in k},
        curve=curve,
        waited=round(
            sum(r['data_wait_seconds'] for r in rows if 'data_wait_seconds' in r)
            / sum(r['seconds'] for r in rows if 'seconds' in r),
            6,
        ),
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = preset('elleci-tiny').train
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--steps', type=int, default=tiny.steps)
    p.add_argument('--jobs', type=int, default=os.cpu_count())
    p.add_argument('--dry', action='store_true', help='a few steps, nothing is written')
    a = p.parse_args()
    if a.dry: a.seeds, a.steps = 2, 12
    result = dict(
        preset='elleci-tiny',
        steps=a.steps,
        tokens_per_step=tiny.tokens_per_step,
        jobs=a.jobs,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        runs=[],
    )
    def note(r):
        result['runs'].append(r)
        print(
            f"{r['variant']}, lr {r['lr']:g}, seed {r['seed']}: val_loss {r['val_loss']:.4f}"
            + (f", averaged {r['average_loss']:.4f}" if 'average_loss' in r else ''),
            flush=True,
        )
    with ProcessPoolExecutor(a.jobs, mp_context=get_context('spawn')) as pool:
        for f in [
            pool.submit(train, v, lr, 0, a.steps) for v, (_, rates) in VARIANTS.items() for lr in rates
        ]:
            note(f.result())
        def loss(r): return min(r['val_loss'], r.get('average_loss', r['val_loss']))
        best = {v: min((r for r in result['runs'] if r['variant'] == v), key=loss)['lr'] for v in VARIANTS}
        for f in [
            pool.submit(train, v, best[v], seed, a.steps) for seed in range(1, a.seeds) for v in VARIANTS
        ]:
            note(f.result())
    if a.dry: return
    path = ROOT/'data'/'results'/f"recipe-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
