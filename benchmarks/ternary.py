"""What three values cost: elleci-tiny with ternary and with ordinary linear layers, same start, same data:
data/results/ternary-<commit>.json.

    python benchmarks/ternary.py [--steps N] [--seeds N] [--lr X] [--commit NAME] [--int8] [--dry]

Both in precision 'bf16'. The rate that suits one need not suit the other: all seeds run at the rate and at
half of it, the first also at a quarter and at twice. The ternary runs also record every 20 steps how the
weights divide among −1, 0, +1, and how many changed their value in that step and since the last record.
With --int8 the other question: ternary layers with gradients in bf16 and in int8, at the rate alone:
data/results/int8_backward-<commit>.json.
"""
import argparse, dataclasses, datetime, json, re, tempfile, time
import torch
from elleci.config import preset
from elleci.core import atomic_write, pick_device, seed_everything
from elleci.data.loader import make_loader, open_data
from elleci.data.sources import train_tokenizer_on
from elleci.engine.accumulate import GradAccumStep
from elleci.kernels.ternary import ternary_codes, ternary_flips, ternary_shares
from elleci.layers.ffn import BitLinear
from elleci.model import Elleci
from elleci.optim.optimizers import make_optimizer
from elleci.optim.schedules import lr_factor
from elleci.training.loop import validate
from tiny import ROOT, commit, hardware

EVERY = 20   # steps in a point of the loss curve, and between two records of the weights
# ternary? gradients in int8?
VARIANTS = {'ternary': (True, False), 'bf16': (False, False), 'ternary, int8 backward': (True, True)}

class Health:
    "What the weights of the ternary layers do"
    def __init__(self, model):
        self.weights = {n: m.weight for n, m in model.named_modules() if isinstance(m, BitLinear)}
        self.recorded, self.before, self.rows = self.codes(), None, []
    def codes(self): return {n: ternary_codes(w.detach()) for n, w in self.weights.items()}
    def flips(self, a, b):
        return [float(ternary_flips(a[n], b[n], w.shape[1])) for n, w in self.weights.items()]
    def look(self, step):
        "Called after every step, and before the first with 0"
        if step % EVERY == EVERY - 1: self.before = self.codes()
        if step % EVERY: return
        now = self.codes()
        shares = torch.stack([ternary_shares(w.detach()) for w in self.weights.values()]).tolist()
        flips = self.flips(self.before, now) if self.before else [0.]*len(shares)
        since = self.flips(self.recorded, now)
        sizes = torch.tensor([w.numel() for w in self.weights.values()], dtype=torch.float64)
        def mean(values):
            return [
                round(v, 6)
                for v in (sizes / sizes.sum() @ torch.tensor(values, dtype=torch.float64))
                .reshape(-1)
                .tolist()
            ]
        self.rows.append(
            dict(
                step=step,
                shares=mean(shares),
                flips=mean(flips)[0],
                flips_since=mean(since)[0],
                layer_zeros=[round(s[1], 4) for s in shares],
                layer_flips=[round(f, 6) for f in flips],
            )
        )
        self.recorded = now

def build(ternary, int8, config, device):
    "The engine; either kind starts from the same weights"
    seed_everything(config.train.seed)
    model = Elleci(dataclasses.replace(config.model, ternary=True))
    if not ternary:
        start, model = model.state_dict(), Elleci(dataclasses.replace(config.model, ternary=False))
        model.load_state_dict(start)
    for m in model.modules():
        if isinstance(m, BitLinear): m.int8_backward = int8
    model.to(device)
    return GradAccumStep(
        model,
        make_optimizer(model, config.train),
        config.train.max_grad_norm,
        precision='bf16',
        seed=config.train.seed,
    )

def train(name, config, data, val, device):
    "One training: the mean loss of each 20 steps, the weights' health, and the validation losses at the end"
    engine, t, losses = build(*VARIANTS[name], config, device), config.train, []
    health = Health(engine.model) if VARIANTS[name][0] else None
    if health: health.look(0)
    began = time.perf_counter()
    for i, (micro, *_) in enumerate(make_loader(data, t), 1):
        for group in engine.optimizer.param_groups: group['lr'] = t.lr*lr_factor(t, i)
        losses.append(engine.step([[x.to(device) for x in m] for m in micro])['loss'])
        if health: health.look(i)
    seconds = time.perf_counter() - began
    curve = [
        [min(i + EVERY, len(losses)), sum(losses[i : i + EVERY]) / len(losses[i : i + EVERY])]
        for i in range(0, len(losses), EVERY)
    ]
    return dict(
        variant=name,
        seed=t.seed,
        lr=t.lr,
        seconds=round(seconds, 1),
        curve=[[i, round(l, 5)] for i, l in curve],
        **validate(engine, val, t.batch_size, 1 if t.steps <= EVERY + 1 else 10**6),
        **(dict(layers=list(health.weights), health=health.rows) if health else {}),
    )

def write(result, path):
    "One line to a list of numbers or names"
    def flat(m): return re.sub(r'\s+', ' ', m[0]).replace('[ ', '[').replace(' ]', ']')
    atomic_write(path, re.sub(r'\[[^][{}]*\]', flat, json.dumps(result, indent=1)) + '\n')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = preset('elleci-tiny')
    p.add_argument('--steps', type=int, default=tiny.train.steps)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--lr', type=float, default=tiny.train.lr)
    p.add_argument('--commit', default=None, help='of this code, where it is not a checkout')
    p.add_argument(
        '--int8',
        action='store_true',
        help='gradients in int8 against bf16, instead of ternary against ordinary layers',
    )
    p.add_argument('--dry', action='store_true', help='21 steps of each variant, nothing is written')
    a = p.parse_args()
    if a.dry: a.steps, a.seeds = EVERY + 1, 1
    device = pick_device()
    tok, folder = train_tokenizer_on(tiny.train.data, tiny.model.vocab_size), tempfile.mkdtemp()
    result = dict(
        preset='elleci-tiny',
        precision='bf16',
        steps=a.steps,
        tokens_per_step=tiny.train.tokens_per_step,
        lr=a.lr,
        hardware=hardware(),
        torch=torch.__version__,
        commit=a.commit or commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        runs=[],
    )
    path = ROOT/'data'/'results'/f"{'int8_backward' if a.int8 else 'ternary'}-{result['commit']}.json"
    pairs = [(seed, 1.0) for seed in range(a.seeds)] + (
        [] if a.dry or a.int8 else [(seed, 0.5) for seed in range(a.seeds)] + [(0, 0.25), (0, 2.0)]
    )
    for seed, factor, name in [
        (*pair, name)
        for pair in pairs
        for name in VARIANTS
        if name != ('bf16' if a.int8 else 'ternary, int8 backward')
    ]:
        config = preset('elleci-tiny', steps=a.steps, seed=seed, lr=a.lr*factor, precision='bf16')
        r = train(name, config, *open_data(config.train, tok, folder), device)
        result['runs'].append(r)
        print(
            f"seed {seed}, {name}, lr {r['lr']:g}: loss {r['curve'][-1][1]:.4f}, "
            f"val_loss {r['val_loss']:.4f}, {r['seconds']} s"
            + (f", flips {r['health'][-1]['flips']:.2%} a step" if 'health' in r else ''),
            flush=True,
        )
        if not a.dry: write(result, path)
    if not a.dry: print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
