"""What each mixer can remember: small models trained on copying or on associative recall, and asked for more:
data/results/tasks-<commit>.json, which 77_copy_and_recall draws.

    python benchmarks/tasks.py [--steps N] [--seeds N] [--tasks copy recall] [--patterns M A]
                               [--out FILE] [--dry]

All models have the same width, and those of a seed see the same rows; MMMA has four layers and the others
two, but for a single layer of Mamba-2 as a control. Takes a quarter of an hour on a CPU. The lesson draws the
newest record in data/results; an experiment of your own goes to another file with --out.
"""
import argparse, datetime, itertools, json, time
from pathlib import Path
import numpy as np
import torch
from elleci.config import ModelConfig
from elleci.core import atomic_write, seed_everything
from elleci.documents import IGNORE_INDEX
from elleci.inference.tasks import copy_row, recall_chance, recall_row, score_task
from elleci.model import Elleci, token_loss
from tiny import ROOT, commit, hardware

# Patterns of mixers, and how many layers there are.
MODELS = [('M', 2), ('A', 2), ('E', 2), ('MA', 2), ('MMMA', 4), ('M', 1)]
PATTERNS = ['M', 'A', 'E', 'MA', 'MMMA']
WIDTHS = dict(
    vocab_size=128,
    d_model=64,
    headdim=32,
    d_state=16,
    chunk_size=32,
    n_attn_heads=2,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    kv_lora_rank=32,
    rope_theta=10.,
    n_eigenstates=64,
    d_ff=128,
    ternary=False,
)
# The pool of tokens, sizes that are trained on, sizes that are asked for, chance at a size.
TASKS = dict(
    copy=(copy_row, range(5, 21), (2, 16), (2, 4, 8, 16, 32, 64), lambda size: 1/16),
    recall=(recall_row, range(5, 21), (2, 8), (2, 4, 6, 8), recall_chance),
)

def learn(model, make_row, sizes, steps, lr, seed, batch_size=32):
    "Train a model on rows of random size, with AdamW; the loss of each step, nats per answer token"
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(.9, .95), weight_decay=.01)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]['lr'] = lr*min((step + 1)/(.1*steps), 2*(1 - step/steps), 1)
        size = int(rng.integers(sizes[0], sizes[1] + 1))
        rows = [make_row(rng, size) for _ in range(batch_size)]
        ids = torch.from_numpy(np.stack([row.ids for row in rows]))
        labels = torch.full_like(ids, IGNORE_INDEX)
        for line, row in zip(labels, rows): line[row.scored] = torch.from_numpy(row.ids[row.scored])
        labels = labels[:, 1:]
        loss = token_loss(model, model.hidden(ids[:, :-1]), labels)/(labels != IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses

def measure(task, pattern, layers, steps, items, seed):
    "Train a model on a task, and ask it for rows of several sizes"
    make, tokens, trained, sizes, chance = TASKS[task]
    pool = np.array(tokens)
    def make_row(rng, size): return make(rng, pool, size)
    seed_everything(seed)
    model = Elleci(ModelConfig(n_layers=layers, pattern=pattern, **WIDTHS))
    began = time.process_time()
    losses = learn(model, make_row, trained, steps, lr=1e-2, seed=seed)
    seconds = time.process_time() - began
    found = []
    for size in sizes:
        rng = np.random.default_rng((1, size))
        rows = [make_row(rng, size) for _ in range(items)]
        found.append(score_task(f'{task} {size}', model, rows, chance(size)))
    return dict(
        task=task,
        pattern=pattern,
        layers=layers,
        seed=seed,
        parameters=sum(p.numel() for p in model.parameters()),
        steps=steps,
        cpu_seconds=round(seconds, 1),
        trained_up_to=trained[1],
        items=items,
        sizes=list(sizes),
        accuracy=[round(a.accuracy, 4) for a in found],
        chance=[round(a.chance, 4) for a in found],
        losses=[round(float(np.mean(losses[i:i + 20])), 3) for i in range(0, steps, 20)],
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=400)
    p.add_argument('--seeds', type=int, default=4, help='of weights and rows')
    p.add_argument('--tasks', nargs='+', choices=list(TASKS), default=list(TASKS))
    p.add_argument('--patterns', nargs='+', choices=PATTERNS, default=PATTERNS)
    p.add_argument('--out', type=Path, help='instead of data/results/tasks-<commit>.json')
    p.add_argument('--dry', action='store_true', help='few steps, nothing is written')
    a = p.parse_args()
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        widths=WIDTHS,
        runs=[],
    )
    steps, items, seeds = (3, 4, 1) if a.dry else (a.steps, 200, a.seeds)
    for task in a.tasks:
        for (pattern, layers), seed in itertools.product(MODELS, range(seeds)):
            if pattern not in a.patterns: continue
            result['runs'].append(measure(task, pattern, layers, steps, items, seed))
            print({k: v for k, v in result['runs'][-1].items() if k != 'losses'}, flush=True)
    if a.dry: return
    path = a.out or ROOT/'data'/'results'/f"tasks-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path}')

if __name__ == '__main__': main()
