"""Trainings compared: elleci-tiny as it is, with other states, optimizers and layers; what small models can
remember; what context is worth; three kinds of models of one size. See runner.py for the command line.
"""
import itertools, statistics, tempfile, time
from dataclasses import replace
from pathlib import Path
import numpy as np
import torch
from elleci.config import ModelConfig, preset
from elleci.core import seed_everything
from elleci.data.loader import make_loader, open_data
from elleci.data.sources import train_tokenizer_on
from elleci.documents import IGNORE_INDEX
from elleci.engine.layer_major import make_engine, make_model
from elleci.generation import generate
from elleci.inference.evaluate import validation_documents, validation_sources
from elleci.inference.likelihood import Row, score_documents, score_rows, sliding_windows
from elleci.inference.tasks import copy_row, recall_chance, recall_row, score_task
from elleci.kernels.lion8 import lion8_step
from elleci.kernels.ternary import ternary_codes, ternary_flips, ternary_shares
from elleci.layers.ffn import BitLinear
from elleci.model import Elleci, token_loss
from elleci.optim.optimizers import Lion8, make_optimizer
from elleci.optim.schedules import lr_factor
from elleci.training.load import load_run
from elleci.training.loop import ValidationTotals, token_byte_counts, validate
from elleci.training.run import PROMPTS, elleci_train
from elleci.training.telemetry import read_metrics
from runner import main

EVERY = 20   # steps in a point of a loss curve

def text_of(train, vocab_size):
    "A tokenizer, and the folder for its tokens"
    return train_tokenizer_on(train.data, vocab_size), tempfile.mkdtemp()

def training(config, text, prepare=None, look=None, every=EVERY):
    "One training from its seed: the mean loss of each 20 steps, and the validation losses at the end"
    t, losses, seconds = config.train, [], []
    data, val = open_data(t, *text)
    seed_everything(t.seed)
    model = make_model(config.model, t)
    engine = make_engine(model, make_optimizer(model, t), t)
    if prepare: prepare(engine)
    if look: look(engine, 0)
    for i, (micro, *_) in enumerate(make_loader(data, t), 1):
        for group in engine.optimizer.param_groups: group['lr'] = t.lr*lr_factor(t, i)
        began = time.perf_counter()
        losses.append(float(engine.step(micro)['loss']))
        seconds.append(time.perf_counter() - began)
        if look: look(engine, i)
    parts = [losses[i:i + every] for i in range(0, len(losses), every)]
    curve = [[min((k + 1)*every, len(losses)), round(statistics.mean(p), 5)] for k, p in enumerate(parts)]
    rows = 1 if t.steps <= EVERY + 1 else 10**6
    return dict(seed=t.seed, lr=t.lr, seconds=round(sum(seconds), 1),
                seconds_per_step=round(statistics.median(seconds), 4), curve=curve,
                **validate(engine, val, t.batch_size, rows, token_byte_counts(text[0])))

def show(run):
    print({k: v for k, v in run.items() if not isinstance(v, list)}, flush=True)
    return run

# ------------------------------------------------------------------ elleci-tiny

def tiny(seeds=1, steps=preset('elleci-tiny').train.steps):
    "Train elleci-tiny as the command does, each seed in a folder of its own; the README reads the newest"
    runs = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as out:
            began = time.perf_counter()
            elleci_train(preset='elleci-tiny', out=out, seed=seed, steps=steps)
            wall, rows, (config, tok, model) = time.perf_counter() - began, read_metrics(out), load_run(out)
        train, vals, t = [r for r in rows if 'loss' in r], [r for r in rows if 'val_loss' in r], config.train
        runs.append(dict(
            seed=seed, parameters=sum(p.numel() for p in model.parameters()), steps=t.steps,
            tokens_per_step=t.tokens_per_step, batch=f'{t.grad_accum_steps} × {t.batch_size} × {t.seq_len}',
            wall_seconds=round(wall, 1), training_seconds=round(sum(r['seconds'] for r in train), 1),
            tokens_per_second=round(statistics.median(r['tokens_per_s'] for r in train)),
            peak_memory_bytes=max(r['memory_bytes'] for r in train), first=vals[0], last=vals[-1],
            samples=[generate(model, tok, p, 60, seed=seed) for p in PROMPTS],
        ))
        print(f"seed {seed}: val_loss {vals[0]['val_loss']:.3f} -> {vals[-1]['val_loss']:.3f}", flush=True)
        yield dict(preset='elleci-tiny', runs=runs)

class Nearest(Lion8):
    "Lion8 that rounds bf16 weights to the nearest; the momentum as ever"
    def update(self, p, state, group, seed):
        w = p.float()                                                     # a copy, unless p is fp32 itself
        how = group['lr'], group['betas'], group['weight_decay'], seed
        lion8_step(w, p.grad, state['momentum'], state['scale'], *how)
        if w is not p: p.copy_(w)

def round_to_nearest(engine): engine.optimizer.__class__ = Nearest

LION8 = {
    'lion, fp32': (dict(optimizer='lion', precision='fp32'), None),
    'lion8, fp32 weights': (dict(optimizer='lion8', precision='fp32'), None),
    'lion8, bf16 weights': (dict(optimizer='lion8', precision='bf16-weights'), None),
    'lion8, bf16 weights, nearest': (dict(optimizer='lion8', precision='bf16-weights'), round_to_nearest),
}

def lion8(steps=preset('elleci-tiny').train.steps, seeds=3, lr=preset('elleci-tiny').train.lr):
    "What 8 bits and stochastic rounding do to training: elleci-tiny with four optimizers"
    tiny, runs = preset('elleci-tiny'), []
    text = text_of(tiny.train, tiny.model.vocab_size)
    for seed, (name, (changes, prepare)) in itertools.product(range(seeds), LION8.items()):
        config = preset('elleci-tiny', steps=steps, seed=seed, lr=lr, **changes)
        runs.append(dict(variant=name) | show(training(config, text, prepare)))
        yield dict(preset='elleci-tiny', steps=steps, lr=lr, runs=runs)

class Health:
    "Every 20 steps: how ternary weights divide among −1, 0, +1, and how many have changed their value"
    def __init__(self): self.rows, self.codes = [], {}
    def __call__(self, engine, step):
        if step % EVERY not in (0, EVERY - 1): return
        weights = [m.weight.detach() for m in engine.model.modules() if isinstance(m, BitLinear)]
        now, before = list(map(ternary_codes, weights)), self.codes
        if step % EVERY == EVERY - 1:
            self.codes['step before'] = now
            return
        def flips(key):
            pairs = zip(before.get(key, now), now, weights)
            return [float(ternary_flips(old, new, w.shape[1])) for old, new, w in pairs]
        sizes = np.array([w.numel() for w in weights])
        def mean(values): return np.round(np.average(values, axis=0, weights=sizes), 6).tolist()
        shares, flipped = [ternary_shares(w).tolist() for w in weights], flips('step before')
        self.rows.append(dict(
            step=step, shares=mean(shares), flips=mean(flipped), flips_since=mean(flips('recorded')),
            layer_zeros=[round(s[1], 4) for s in shares], layer_flips=[round(f, 6) for f in flipped],
        ))
        self.codes = dict(recorded=now)

def ternary(steps=preset('elleci-tiny').train.steps, seeds=3, lr=preset('elleci-tiny').train.lr):
    """What three values cost: elleci-tiny with ternary and with ordinary layers in bf16, from one start. All
    seeds at the rate and at half of it, the first also at a quarter and at twice"""
    tiny, runs = preset('elleci-tiny'), []
    text = text_of(tiny.train, tiny.model.vocab_size)
    pairs = [(s, f) for f in (1., .5) for s in range(seeds)] + [(0, .25), (0, 2.)]
    for (seed, factor), is_ternary in itertools.product(pairs, (True, False)):
        base, health = preset('elleci-tiny', steps=steps, seed=seed, lr=lr*factor, precision='bf16'), Health()
        config = replace(base, model=replace(base.model, ternary=is_ternary))
        run = dict(variant='ternary' if is_ternary else 'bf16')
        run |= show(training(config, text, look=health if is_ternary else None))
        with torch.device('meta'): named = make_model(config.model, config.train).named_modules()
        layers = [name for name, m in named if isinstance(m, BitLinear)]
        runs.append(run | (dict(layers=layers, health=health.rows) if is_ternary else {}))
        yield dict(preset='elleci-tiny', precision='bf16', steps=steps, lr=lr, runs=runs,
                   tokens_per_step=tiny.train.tokens_per_step)

# ------------------------------------------------------------------ what small models can remember

# Patterns of mixers, and how many layers there are.
MODELS = [('M', 2), ('A', 2), ('E', 2), ('MA', 2), ('MMMA', 4), ('M', 1)]
WIDTHS = dict(vocab_size=128, d_model=64, headdim=32, d_state=16, chunk_size=32, n_attn_heads=2,
              qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=32, rope_theta=10.,
              n_eigenstates=64, d_ff=128, ternary=False)
# What makes a row, sizes that are trained on, sizes that are asked for, chance at a size.
TASKS = dict(copy=(copy_row, (2, 16), (2, 4, 8, 16, 32, 64), lambda size: 1/16),
             recall=(recall_row, (2, 8), (2, 4, 6, 8), recall_chance))

def learn(model, make_row, sizes, steps, lr, seed, batch_size=32):
    "Train a model on rows of random size, with AdamW; the loss of each step, nats per answer token"
    rng, losses = np.random.default_rng(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(.9, .95), weight_decay=.01)
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

def tasks(steps=400, seeds=4, items=200, tasks=('copy', 'recall'), patterns=('M', 'A', 'E', 'MA', 'MMMA')):
    "Small models of one width trained on copying or on associative recall, and asked for more"
    runs, pool = [], np.arange(5, 21)
    for task, (pattern, layers), seed in itertools.product(tasks, MODELS, range(seeds)):
        if pattern not in patterns: continue
        make, trained, sizes, chance = TASKS[task]
        def make_row(rng, size): return make(rng, pool, size)
        seed_everything(seed)
        model, began = Elleci(ModelConfig(n_layers=layers, pattern=pattern, **WIDTHS)), time.process_time()
        losses = learn(model, make_row, trained, steps, lr=1e-2, seed=seed)
        seconds, found = time.process_time() - began, []
        for size in sizes:
            rng = np.random.default_rng((1, size))
            rows = [make_row(rng, size) for _ in range(items)]
            found.append(score_task(f'{task} {size}', model, rows, chance(size)))
        runs.append(show(dict(
            task=task, pattern=pattern, layers=layers, seed=seed, steps=steps, cpu_seconds=round(seconds, 1),
            parameters=sum(p.numel() for p in model.parameters()), trained_up_to=trained[1], items=items,
            sizes=list(sizes), accuracy=[round(a.accuracy, 4) for a in found],
            chance=[round(a.chance, 4) for a in found],
            losses=[round(float(np.mean(losses[i:i + 20])), 3) for i in range(0, steps, 20)],
        )))
        yield dict(widths=WIDTHS, runs=runs)

# ------------------------------------------------------------------ what context is worth

def in_blocks(model, documents, context):
    "Bits per byte where windows do not overlap"
    windows = ((d, w) for d in documents for w in sliding_windows(len(d.ids), context, context))
    rows = [Row(d.ids[start:stop], np.arange(first, stop) - start) for d, (start, first, stop) in windows]
    nats = sum(score.nats for score in score_rows(model, rows))
    return ValidationTotals(nats, 0, sum(d.num_bytes for d in documents)).bits_per_byte

def context(run='runs/elleci-tiny', limit=6, dry=False):
    """Bits per byte of a run's validation text against the tokens that a prediction may see: in blocks, in
    windows that overlap by half, and of whole documents through the caches. `make train` makes such a run"""
    config, tok, model = load_run(run)
    with validation_sources(Path(run), config, tok) as sources:
        counts = token_byte_counts(tok)
        documents = [d for rows in sources.values() for d in validation_documents(rows, counts, limit)]
    contexts, began = [16, 32] if dry else [16, 32, 64, 128, 256, 512], time.process_time()
    overlapping = [score_documents(model, documents, n).bits_per_byte for n in contexts]
    blocks, whole = [in_blocks(model, documents, n) for n in contexts], score_documents(model, documents, 0)
    yield dict(preset=config.preset, trained_length=config.train.seq_len, documents=len(documents),
               tokens=whole.tokens, cpu_seconds=round(time.process_time() - began, 1), contexts=contexts,
               blocks=blocks, overlapping=overlapping, whole=whole.bits_per_byte)

if __name__ == '__main__': main(tiny, lion8, ternary, tasks, context)
