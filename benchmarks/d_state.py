"""How large should the SSM state be? elleci-tiny with several N, same data, same steps:
data/results/d_state-<commit>.json.

    python benchmarks/d_state.py [--steps N] [--seeds N]
"""
import argparse, dataclasses, datetime, json, tempfile
import torch
from elleci.config import preset
from elleci.core import atomic_write, seed_everything
from elleci.engine.layer_major import make_engine
from elleci.data.loader import make_loader, open_data
from elleci.data.sources import train_tokenizer_on
from elleci.model import Elleci
from elleci.optim.optimizers import make_optimizer
from elleci.training.loop import Callbacks, TrainingRun, fit, validate
from tiny import ROOT, commit, hardware

def train(settings, seed, steps, data, val, token_bytes=None):
    "Validation losses and seconds per step of one training, with these settings of the model"
    config, rows = preset('elleci-tiny', steps=steps, val_every=steps, seed=seed), []
    seed_everything(seed)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **settings))
    model = Elleci(config.model)
    engine = make_engine(model, make_optimizer(model, config.train), config.train)
    run = TrainingRun(config, val, Callbacks(log=lambda **event: rows.append(event)))
    fit(run, engine, make_loader(data, config.train))
    seconds = sorted(r['seconds'] for r in rows if 'loss' in r)
    return dict(
        seed=seed,
        seconds_per_step=round(seconds[len(seconds) // 2], 4),
        **validate(engine, val, 4, 10**6, token_bytes),
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=200)
    p.add_argument('--seeds', type=int, default=2)
    a, c = p.parse_args(), preset('elleci-tiny')
    tok, folder = train_tokenizer_on(c.train.data, c.model.vocab_size), tempfile.mkdtemp()
    result = dict(
        preset='elleci-tiny',
        steps=a.steps,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        runs=[],
    )
    for seed in range(a.seeds):
        data, val = open_data(dataclasses.replace(c.train, steps=a.steps, seed=seed), tok, folder)
        for N in (4, 16, 64):
            result['runs'].append(dict(d_state=N, **train(dict(d_state=N), seed, a.steps, data, val)))
            print(result['runs'][-1], flush=True)
    path = ROOT/'data'/'results'/f"d_state-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
