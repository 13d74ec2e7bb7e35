"""A training step on this CPU, beside a dense Transformer of as many parameters: data/results/cpu_step-<commit>.json.

    python benchmarks/cpu_step.py [--repeats N] [--only CASE] [--label TEXT] [--dry]

The step is forward, backward, clipping and AdamW, in fp32: ours as the ordinary engine makes it, ternary and
not; the dense one in plain PyTorch (`nn.Linear`, `F.scaled_dot_product_attention`, SwiGLU) with the loss of
`F.cross_entropy`. Every subject of a case runs once in each round. For each we keep the seconds that the
process computed and those that went by: other work on the machine lengthens the latter more, and medians of
ratios within a round are disturbed by it least. Growth is the step's time with the same tokens in longer rows.
The breakdown comes from `torch.profiler`: each operator's own time, under the operation that called it.
--dry: tiny shapes, nothing written.
"""
import argparse
import dataclasses
import datetime
import json
import statistics
import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from elleci.config import preset
from elleci.core import atomic_write, seed_everything
from elleci.engine.accumulate import GradAccumStep
from elleci.model import Elleci
from tiny import ROOT, commit, hardware

TINY = preset('elleci-tiny').model
WIDE = dataclasses.replace(TINY, d_model=768, n_attn_heads=12, kv_lora_rank=192, d_ff=2112)


class DenseBlock(nn.Module):
    "x + attention(norm(x)), then x + swiglu(norm(x))"
    def __init__(self, D, H, d_ff):
        super().__init__()
        self.H = H
        self.attention_norm, self.ffn_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv = nn.Linear(D, 3*D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.gate_up = nn.Linear(D, 2*d_ff, bias=False)
        self.down = nn.Linear(d_ff, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.H, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate)*up)


class Dense(nn.Module):
    "A decoder-only Transformer with learned positions and a tied head"
    def __init__(self, cfg, T, d_ff):
        super().__init__()
        D = cfg.d_model
        self.embedding, self.positions = nn.Embedding(cfg.vocab_size, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(DenseBlock(D, cfg.n_attn_heads, d_ff) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(D)
        for p in self.parameters():
            if p.ndim > 1: nn.init.normal_(p, 0, .02)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks: x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def n_parameters(model): return sum(p.numel() for p in model.parameters())


def dense_like(cfg, T):
    "The dense model whose FFN is as wide as makes it hold as many parameters as ours, a multiple of 8"
    wanted = n_parameters(Elleci(cfg))
    per_channel = 3*cfg.d_model*cfg.n_layers
    d_ff = round((wanted - n_parameters(Dense(cfg, T, 0)))/per_channel/8)*8
    return Dense(cfg, T, d_ff)


def adamw(model): return torch.optim.AdamW(model.parameters(), 1e-4)


def our_step(cfg, tokens, labels, documents):
    "One step of ours, as a function, and its parameters"
    model = Elleci(cfg)
    engine = GradAccumStep(model, adamw(model))
    return lambda: engine.step([(tokens, labels, documents)])['loss'], n_parameters(model)


def dense_step(cfg, tokens, labels):
    "One step of the dense model, as a function, and its parameters"
    model = dense_like(cfg, tokens.shape[1])
    optimizer = adamw(model)
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        return float(loss)
    return step, n_parameters(model)


def subjects(cfg, rows, T):
    "{name: (step, parameters)} on the same tokens; each row is one document"
    seed_everything(0)
    tokens = torch.randint(0, cfg.vocab_size, (rows, T))
    labels = torch.randint(0, cfg.vocab_size, (rows, T))
    documents = torch.zeros_like(tokens)
    plain = dataclasses.replace(cfg, ternary=False)
    return {
        'elleci': our_step(plain, tokens, labels, documents),
        'elleci, ternary': our_step(cfg, tokens, labels, documents),
        'dense': dense_step(cfg, tokens, labels),
    }


def interleaved(steps, repeats, warmups=2):
    "{name: {'cpu': seconds of each round, 'wall': the same}} of functions that run in turn"
    seconds = {name: dict(cpu=[], wall=[]) for name in steps}
    for i in range(repeats + warmups):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if i < warmups: continue
            seconds[name]['cpu'].append(round(cpu, 5))
            seconds[name]['wall'].append(round(wall, 5))
    return seconds


def ratios(seconds, base):
    "{name: {'cpu': median over the rounds of its time by that of `base`, 'wall': the same}}"
    def ratio(name, kind):
        return round(statistics.median(s/t for s, t in zip(seconds[name][kind], seconds[base][kind])), 3)
    return {name: {kind: ratio(name, kind) for kind in ('cpu', 'wall')} for name in seconds if name != base}


# Operations of ours and of PyTorch, and the part of the step that they are.
PARTS = {
    '_SSD': 'scan',
    '_ConvSilu': 'convolution',
    '_GatedNorm': 'gated norm',
    '_RMSNorm': 'norms',
    'aten::rms_norm': 'norms',
    'FusedRmsNorm': 'norms',
    '_SiluMul': 'gate of the FFN',
    'aten::silu': 'gate of the FFN',
    'Silu': 'gate of the FFN',
    '_BitLinear': 'rounding',
    '_LinearCrossEntropy': 'loss',
    'aten::cross_entropy_loss': 'loss',
    'NllLoss': 'loss',
    'LogSoftmax': 'loss',
    'elleci::document_attention': 'attention',
    'aten::scaled_dot_product_attention': 'attention',
    'ScaledDotProduct': 'attention',
    'Optimizer.step': 'optimizer',
    'Optimizer.zero_grad': 'optimizer',
    'aten::linear': 'matmuls',
}
PRODUCTS = ('aten::mm', 'aten::addmm', 'aten::_int_mm', 'aten::linear')


def part_of(event):
    "The part of the step to which an operator's own time belongs"
    if event.name in PRODUCTS and not under(event, 'Optimizer.step'):
        return 'loss' if under(event, '_LinearCrossEntropy') else 'matmuls'
    while event is not None:
        for name, part in PARTS.items():
            if event.name.startswith(name): return part
        event = event.cpu_parent
    return 'everything else'


def under(event, name):
    "Whether an operator was called by another whose name begins so"
    while event is not None:
        if event.name.startswith(name): return True
        event = event.cpu_parent
    return False


def breakdown(step, steps):
    "{part: seconds of a step}, {part: operators of a step}, {operator: seconds}, of one thread"
    step()
    with profile(activities=[ProfilerActivity.CPU]) as p:
        began = time.perf_counter()
        for _ in range(steps): step()
        wall = time.perf_counter() - began
    seconds, calls, by_name = defaultdict(float), defaultdict(float), defaultdict(float)
    for event in p.events():
        part = part_of(event)
        seconds[part] += event.self_cpu_time_total/1e6/steps
        calls[part] += event.name.startswith('aten::')/steps
        by_name[f'{part}: {event.name}'] += event.self_cpu_time_total/1e6/steps
    # Between operators there is Python, and the profiler.
    seconds['between operators'] = max(0., wall/steps - sum(seconds.values()))
    top = sorted(by_name, key=by_name.get, reverse=True)[:40]
    return dict(
        seconds={k: round(v, 5) for k, v in seconds.items()},
        operators={k: round(v) for k, v in calls.items()},
        slowest={k: round(by_name[k], 5) for k in top},
    )


def beside_dense(cfg, rows, T, threads, repeats):
    "Our step beside the dense one"
    torch.set_num_threads(threads)
    made = subjects(cfg, rows, T)
    seconds = interleaved({name: step for name, (step, _) in made.items()}, repeats)
    return dict(
        d_model=cfg.d_model, rows=rows, T=T, threads=threads,
        parameters={name: n for name, (_, n) in made.items()},
        seconds=seconds, ratios=ratios(seconds, 'dense'),
    )


def growth(cfg, lengths, tokens, threads, repeats):
    "Our step with as many tokens in rows of different lengths, by the shortest"
    torch.set_num_threads(threads)
    steps = {}
    for pattern in ('MMMA', 'M'):
        for T in lengths:
            seed_everything(0)
            batch = torch.randint(0, cfg.vocab_size, (tokens//T, T))
            of_pattern = dataclasses.replace(cfg, pattern=pattern, ternary=False)
            step, _ = our_step(of_pattern, batch, batch, torch.zeros_like(batch))
            steps[f'{pattern}, T {T}'] = step
    seconds = interleaved(steps, repeats, warmups=1)
    by_pattern = {}
    for pattern in ('MMMA', 'M'):
        own = {name: s for name, s in seconds.items() if name.startswith(pattern + ',')}
        by_pattern |= ratios(own, f'{pattern}, T {lengths[0]}')
    return dict(d_model=cfg.d_model, tokens=tokens, threads=threads, seconds=seconds, ratios=by_pattern)


def parts(cfg, rows, T, steps):
    "Where the time of a step goes, on one thread"
    torch.set_num_threads(1)
    return {name: breakdown(step, steps) for name, (step, _) in subjects(cfg, rows, T).items()}


def cases(dry, repeats):
    "{name: function that measures it}"
    rows, short, long = (1, 64, 128) if dry else (4, 256, 2048)
    lengths = (64, 128) if dry else (256, 1024, 2048, 4096, 8192)
    wide = TINY if dry else WIDE
    steps = 1 if dry else 5
    return {
        'd 256, T 256, 1 thread': lambda: beside_dense(TINY, rows, short, 1, repeats),
        'd 256, T 256, 2 threads': lambda: beside_dense(TINY, rows, short, 2, repeats),
        'd 768, T 256, 1 thread': lambda: beside_dense(wide, rows, short, 1, max(1, repeats//3)),
        'd 768, T 256, 2 threads': lambda: beside_dense(wide, rows, short, 2, max(1, repeats//3)),
        'd 256, T 2048, 1 thread': lambda: beside_dense(TINY, 1, long, 1, max(1, repeats//2)),
        'd 256, T 2048, 2 threads': lambda: beside_dense(TINY, 1, long, 2, max(1, repeats//2)),
        'growth': lambda: growth(TINY, lengths, lengths[-1], 1, max(1, repeats//6)),
        'parts, T 256': lambda: parts(TINY, rows, short, steps),
        'parts, T 2048': lambda: parts(TINY, 1, long, steps),
    }


def show(name, case):
    "A case in a few lines"
    print(name)
    if 'ratios' in case:
        for subject, s in case['seconds'].items():
            median = {kind: 1e3*statistics.median(s[kind]) for kind in s}
            print(f"  {subject:18} {median['cpu']:9.1f} ms of CPU {median['wall']:9.1f} ms",
                  case['ratios'].get(subject, ''))
        return
    for subject, found in case.items():
        in_ms = {part: round(1e3*s, 1) for part, s in sorted(found['seconds'].items(), key=lambda i: -i[1])}
        print(f'  {subject:18}', round(sum(in_ms.values()), 1), in_ms)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=24)
    p.add_argument('--only', default='', help='cases whose name contains this')
    p.add_argument('--label', default='', help="a word about the code that was measured, e.g. 'before'")
    p.add_argument('--dry', action='store_true')
    a = p.parse_args()
    torch.set_num_threads(2)
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), label=a.label,
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'), cases={})
    for name, measure in cases(a.dry, 1 if a.dry else a.repeats).items():
        if a.only not in name: continue
        result['cases'][name] = measure()
        show(name, result['cases'][name])
    if a.dry: return
    path = ROOT/'data'/'results'/f"cpu_step-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
