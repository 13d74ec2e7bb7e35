"""What 8 bits and stochastic rounding do to training: elleci-tiny with four optimizers, same data, same
steps: data/results/lion8-<commit>.json.

    python benchmarks/lion8.py [--steps N] [--seeds N] [--lr X] [--dry]
"""
import argparse, dataclasses, datetime, json, tempfile, time
import torch
from elleci.config import preset
from elleci.core import atomic_write, pick_device, seed_everything
from elleci.data.loader import make_loader, open_data
from elleci.data.sources import train_tokenizer_on
from elleci.engine.accumulate import GradAccumStep
from elleci.kernels.lion8 import lion8_step
from elleci.model import Elleci
from elleci.optim.optimizers import Lion8, make_optimizer
from elleci.optim.schedules import lr_factor
from elleci.training.loop import validate
from tiny import ROOT, commit, hardware

EVERY = 20   # steps in a point of the loss curve

class Nearest(Lion8):
    "Lion8 that rounds bf16 weights to the nearest; the momentum as ever"
    def update(self, p, state, group, seed):
        w = p.float()                                                     # a copy, unless p is fp32 itself
        lion8_step(
            w,
            p.grad,
            state['momentum'],
            state['scale'],
            group['lr'],
            group['betas'],
            group['weight_decay'],
            seed,
        )
        if w is not p: p.copy_(w)

VARIANTS = {
    'lion, fp32': ('lion', False),
    'lion8, fp32 weights': ('lion8', False),
    'lion8, bf16 weights': ('lion8', True),
    'lion8, bf16 weights, nearest': ('nearest', True),
}

def build(name, config, device):
    "The engine"
    kind, bf16 = VARIANTS[name]
    seed_everything(config.train.seed)
    model = Elleci(config.model).to(device)
    # rates and norms stay fp32; gradients accumulate in fp32
    if bf16: model.bfloat16()
    optimizer = make_optimizer(
        model, dataclasses.replace(config.train, optimizer='lion' if kind == 'lion' else 'lion8')
    )
    if kind == 'nearest': optimizer.__class__ = Nearest
    return GradAccumStep(
        model, optimizer, config.train.max_grad_norm, precision='bf16-weights' if bf16 else 'fp32'
    )

def train(name, config, data, val, device):
    "One training: the mean loss of each 20 steps, and the validation losses at the end"
    engine = build(name, config, device)
    t = config.train
    losses = []
    began = time.perf_counter()
    for i, (micro, *_) in enumerate(make_loader(data, t), 1):
        for group in engine.optimizer.param_groups: group['lr'] = t.lr*lr_factor(t, i)
        losses.append(engine.step([[x.to(device) for x in m] for m in micro])['loss'])
    curve = [
        [min(i + EVERY, len(losses)), sum(losses[i : i + EVERY]) / len(losses[i : i + EVERY])]
        for i in range(0, len(losses), EVERY)
    ]
    return dict(
        variant=name,
        seed=t.seed,
        seconds=round(time.perf_counter() - began, 1),
        curve=[[i, round(l, 5)] for i, l in curve],
        **validate(engine, val, t.batch_size, 1 if t.steps <= EVERY + 1 else 10**6),
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = preset('elleci-tiny')
    p.add_argument('--steps', type=int, default=tiny.train.steps)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--lr', type=float, default=tiny.train.lr)
    p.add_argument('--dry', action='store_true', help='two steps of each variant, nothing is written')
    a = p.parse_args()
    if a.dry: a.steps, a.seeds = 2, 1
    device = pick_device()
    tok, folder = train_tokenizer_on(tiny.train.data, tiny.model.vocab_size), tempfile.mkdtemp()
    result = dict(
        preset='elleci-tiny',
        steps=a.steps,
        lr=a.lr,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        runs=[],
    )
    for seed in range(a.seeds):
        config = preset('elleci-tiny', steps=a.steps, seed=seed, lr=a.lr)
        data, val = open_data(config.train, tok, folder)
        for name in VARIANTS:
            result['runs'].append(r := train(name, config, data, val, device))
            print(
                f"seed {seed}, {name}: loss {r['curve'][-1][1]:.4f}, val_loss {r['val_loss']:.4f}, "
                f"{r['seconds']} s",
                flush=True,
            )
    if a.dry: return
    path = ROOT/'data'/'results'/f"lion8-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
