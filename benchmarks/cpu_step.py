"""A training step on this CPU beside a dense Transformer of as many parameters:
data/results/cpu_step-<commit>.json.

    python benchmarks/cpu_step.py [--repeats N] [--only CASE] [--label TEXT] [--dry]
    python benchmarks/cpu_step.py --forecast   # data/results/cpu_seconds-<commit>.json

The step is forward, backward, clipping and AdamW, in fp32: ours as the ordinary engine makes it, ternary and
not; the dense one in plain PyTorch (`nn.Linear`, `F.scaled_dot_product_attention`, SwiGLU) with the loss of
`F.cross_entropy`. Every subject of a case runs once in each round, under three clocks: `wall`, seconds that
went by, which count where nothing else runs; `cpu`, seconds that the process computed; `main`, seconds that
its first thread computed, which is near `wall` and can be read on a busy machine too. Threads wait for each
other as those of `elleci_train` do, awake for microseconds, then asleep. Ratios are medians over the rounds.
Growth is the time of as many tokens in longer rows. The parts are measured operator by operator, in seconds
of the first thread, and belong to the module that called them. --dry: tiny shapes, nothing written.

--forecast: short trainings by one thread, with validations, saves and samples, beside what was predicted
before each; of what was measured, `cpu_seconds` count where other programs take the cores.
"""
import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from unittest import mock

# As the commands set it: `elleci.commands.SLEEP_VARIABLES`.
os.environ['GOMP_SPINCOUNT'] = '1000'
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elleci.config import preset
from elleci.core import atomic_write, seed_everything
from elleci.engine.accumulate import GradAccumStep
from elleci.model import Elleci
from elleci.planning.cost import training_cost
from elleci.training import run
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
    d_ff = 8 + round((wanted - n_parameters(Dense(cfg, T, 8)))/per_channel/8)*8
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
        return float(loss.detach())
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


CLOCKS = dict(cpu=time.process_time, main=time.thread_time, wall=time.perf_counter)


def interleaved(steps, repeats, warmups=1):
    "{name: {clock: seconds of each round}} of functions that run in turn"
    seconds = {name: {clock: [] for clock in CLOCKS} for name in steps}
    for i in range(repeats + warmups):
        for name, step in steps.items():
            before = {clock: read() for clock, read in CLOCKS.items()}
            step()
            if i < warmups: continue
            for clock, read in CLOCKS.items(): seconds[name][clock].append(round(read() - before[clock], 5))
    return seconds


def ratios(seconds, base):
    "{name: {clock: median over the rounds of its time by that of `base`}}"
    def ratio(name, clock):
        return round(statistics.median(s/t for s, t in zip(seconds[name][clock], seconds[base][clock])), 3)
    return {name: {clock: ratio(name, clock) for clock in CLOCKS} for name in seconds if name != base}


# Files whose operators are a part of the step.
FILES = {
    'kernels/ssd.py': 'scan',
    'kernels/conv.py': 'convolution',
    'kernels/gated_norm.py': 'gated norm',
    'kernels/linear_cross_entropy.py': 'loss',
    'kernels/bitnet.py': 'rounding',
    'kernels/ternary.py': 'rounding',
    'optim/adamw.py': 'optimizer',
    'optim/optimizer.py': 'optimizer',
}
# Functions of `kernels/pointwise.py`.
POINTWISE = dict(rms_norm='norms', silu='gate of the FFN')
PRODUCTS = ('aten.mm.', 'aten.addmm.', 'aten._int_mm.')


def part_of(operator):
    "The part of the step that calls an operator, by its name and by the files on the stack"
    if operator.startswith(PRODUCTS): return 'matrix products'
    if 'attention' in operator: return 'attention'
    frame = sys._getframe(2)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith('kernels/pointwise.py'):
            for name, part in POINTWISE.items():
                if name in function: return part
        for ending, part in FILES.items():
            if file.endswith(ending): return part
        frame = frame.f_back
    return 'loss' if 'softmax' in operator or 'nll' in operator else 'everything else'


class ByPart(TorchDispatchMode):
    "Seconds of the first thread, and how many operators, by part of the step"
    def __init__(self):
        super().__init__()
        self.seconds, self.operators = defaultdict(float), defaultdict(int)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        part = part_of(str(operator))
        began = time.thread_time()
        out = operator(*args, **(kwargs or {}))
        self.seconds[part] += time.thread_time() - began
        self.operators[part] += 1
        return out


def breakdown(made, steps):
    "{name: {part: seconds of a step}}, {name: {part: operators of a step}}; subjects take turns"
    by_part = {name: ByPart() for name in made}
    whole = {name: [] for name in made}
    for i in range(steps + 1):
        for name, (step, _) in made.items():
            began = time.thread_time()
            step()
            whole[name].append(time.thread_time() - began)
            if not i: continue
            with by_part[name]: step()
    found = {}
    for name, parts in by_part.items():
        seconds = {part: round(s/steps, 5) for part, s in parts.seconds.items()}
        # What no operator computes: Python, autograd, and the way to an operator.
        between = statistics.median(whole[name]) - sum(seconds.values())
        seconds['between operators'] = round(max(0., between), 5)
        operators = {part: round(n/steps) for part, n in parts.operators.items()}
        found[name] = dict(seconds=seconds, operators=operators)
    return found


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
    seconds = interleaved(steps, repeats, warmups=0)
    by_pattern = {}
    for pattern in ('MMMA', 'M'):
        own = {name: s for name, s in seconds.items() if name.startswith(pattern + ',')}
        by_pattern |= ratios(own, f'{pattern}, T {lengths[0]}')
    return dict(d_model=cfg.d_model, tokens=tokens, threads=threads, seconds=seconds, ratios=by_pattern)


def parts(cfg, rows, T, threads, steps):
    "Where the time of a step goes"
    torch.set_num_threads(threads)
    return breakdown(subjects(cfg, rows, T), steps)


def cases(dry, repeats):
    "{name: function that measures it}"
    rows, short, long = (1, 64, 128) if dry else (4, 256, 2048)
    lengths = (64, 128) if dry else (256, 2048, 4096, 8192)
    wide = TINY if dry else WIDE
    steps = 1 if dry else max(1, repeats//2)
    return {
        'd 256, T 256, 1 thread': lambda: beside_dense(TINY, rows, short, 1, repeats),
        'd 256, T 256, 2 threads': lambda: beside_dense(TINY, rows, short, 2, repeats),
        'd 768, T 256, 2 threads': lambda: beside_dense(wide, rows, short, 2, max(1, repeats//3)),
        'd 256, T 2048, 2 threads': lambda: beside_dense(TINY, 1, long, 2, max(1, repeats//2)),
        'growth': lambda: growth(TINY, lengths, lengths[-1], 1, max(1, repeats//6)),
        'parts, T 256, 1 thread': lambda: parts(TINY, rows, short, 1, steps),
        'parts, T 256, 2 threads': lambda: parts(TINY, rows, short, 2, steps),
    }


SHORT = dict(steps=20, val_every=10, save_every=10)
NARROW = dict(
    vocab_size=1024, d_model=128, n_attn_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    kv_lora_rank=32, d_ff=352,
)
STREAMED = dict(
    engine='layer-major', clip_by='layer', optimizer='lion8', precision='bf16-weights', seq_len=128,
    grad_accum_steps=2, block_inputs_on='pageable', weights_on='host', states_on='host',
)
FORECASTS = {
    'elleci-tiny': {},
    'bf16': dict(precision='bf16'),
    'layer-major': dict(engine='layer-major', clip_by='layer'),
    'checkpoints, 2 × 2 rows': dict(checkpointing='block', batch_size=2, grad_accum_steps=2),
    'streamed, narrow': STREAMED,
}


def forecast(name):
    "A short training: what was predicted of it, and what it took"
    config = preset('elleci-tiny', **SHORT, **FORECASTS[name])
    narrow = dataclasses.replace(config.model, **NARROW)
    if 'narrow' in name: config = dataclasses.replace(config, model=narrow)
    seconds, costs, fit = {}, [], run.fit
    def timed(*args):
        before = {clock: read() for clock, read in CLOCKS.items()}
        try: return fit(*args)
        finally: seconds.update({clock: read() - before[clock] for clock, read in CLOCKS.items()})
    def predicted(*args, **kwargs):
        costs.append(training_cost(*args, **kwargs))
        return costs[-1]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(run, 'fit', timed):
        with mock.patch.object(run, 'training_cost', predicted), contextlib.redirect_stdout(io.StringIO()):
            run.elleci_train(config=config, out=f'{folder}/run')
    least, most = costs[0].seconds, costs[0].most_seconds
    return dict(case=name, predicted=round(least, 3), most=round(most, 3), binds=costs[0].binds,
                wall_seconds=round(seconds['wall'], 3), cpu_seconds=round(seconds['cpu'], 3))


def show(name, case):
    "A case in a few lines"
    print(name)
    if 'ratios' in case:
        for subject, s in case['seconds'].items():
            medians = '  '.join(f'{clock} {1e3*statistics.median(s[clock]):8.1f} ms' for clock in s)
            print(f'  {subject:18} {medians}', case['ratios'].get(subject, ''))
        return
    for subject, found in case.items():
        in_ms = {part: round(1e3*s, 1) for part, s in sorted(found['seconds'].items(), key=lambda i: -i[1])}
        print(f'  {subject:18}', round(sum(in_ms.values()), 1), in_ms)


def write(kind, result):
    path = ROOT/'data'/'results'/f"{kind}-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=24)
    p.add_argument('--only', default='', help='cases whose name contains this')
    p.add_argument('--label', default='', help="a word about the code that was measured, e.g. 'before'")
    p.add_argument('--dry', action='store_true')
    p.add_argument('--forecast', action='store_true')
    a = p.parse_args()
    torch.set_num_threads(1 if a.forecast else 2)
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), label=a.label,
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'), cases={})
    if a.forecast:
        del result['cases'], result['label']
        result['rows'] = []
        for name in FORECASTS:
            result['rows'].append(forecast(name))
            print(result['rows'][-1], flush=True)
        return write('cpu_seconds', result)
    for name, measure in cases(a.dry, 1 if a.dry else a.repeats).items():
        if a.only not in name: continue
        result['cases'][name] = measure()
        show(name, result['cases'][name])
    if a.dry: return
    write('cpu_step', result)


if __name__ == '__main__': main()
