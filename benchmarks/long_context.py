"""Rows of up to 32,768 tokens on a CPU: data/results/long_context-<commit>.json, which `91_long_context` draws.

    python benchmarks/long_context.py [--steps N] [--longest T] [--out FOLDER]

For small models of each kind and rows of 2K, 4K, 8K, 16K and 32K tokens: the peak bytes of two training
steps, predicted by the account and measured storage by storage, and the seconds that a step took of this
processor (what other programs take does not count). Attention, dense and with a density of 1/8, stops at 16K.
Then whole trainings at the longest row, with OneCycle and a warm-up of a tenth of the steps, and the same
row read in pieces whose states are carried from one to the next.
"""
import argparse, datetime, json, time
from dataclasses import replace
from pathlib import Path
import torch
from elleci.config import TrainConfig, preset
from elleci.core import atomic_write, seed_everything
from elleci.data.sources import iter_documents
from elleci.documents import next_token_labels
from elleci.engine.accumulate import grad_accum_step
from elleci.memory.measure import measure
from elleci.model import Elleci
from elleci.optim.optimizers import make_optimizer
from elleci.optim.schedules import lr_factor
from elleci.planning.account import account
from tiny import ROOT, commit, hardware

BASE = replace(
    preset('elleci-tiny').model,
    vocab_size=256,
    d_model=64,
    n_layers=2,
    d_ff=176,
    n_eigenstates=32,
    headdim=32,
    n_attn_heads=2,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    kv_lora_rank=32,
    ternary=False,
)
MODELS = {
    'eigenstates': replace(BASE, pattern='E'),
    'Mamba-2': replace(BASE, pattern='M'),
    'attention': replace(BASE, pattern='A'),
    'attention, density 1/8': replace(BASE, pattern='A', attention_density=1/8),
}
RECURRENT = 'eigenstates', 'Mamba-2'
LENGTHS = 2048, 4096, 8192, 16_384, 32_768
LONGEST_FOR_ATTENTION = 16_384
PIECE = 5000 # tokens; it divides neither a row nor a chunk

def train_config(T, steps):
    return TrainConfig(
        seq_len=T, batch_size=1, grad_accum_steps=1, steps=steps, optimizer='adamw', lr=4e-3,
        precision='fp32', schedule='onecycle', warmup=.1, checkpointing='none',
    )

def corpus():
    "Python's manual as bytes, and the number of each byte's document"
    texts = [torch.tensor(list(d.text.encode())) for d in iter_documents('english', 'embedded:english')]
    documents = [torch.full_like(t, i) for i, t in enumerate(texts)]
    return torch.cat(texts), torch.cat(documents)

def rows(text, documents, T, n, seed=0):
    "n micro-batches of one row each, cut at random places"
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        start = int(torch.randint(len(text) - T, (), generator=generator))
        tokens, seq_idx = (t[None, start:start + T].clone() for t in (text, documents))
        yield [(tokens, next_token_labels(tokens, seq_idx), seq_idx)]

def measure_length(name, T, text, documents):
    "Peak bytes of two steps, predicted and measured; seconds of the best of three more"
    train = train_config(T, 100)
    predicted = account(MODELS[name], train, 'cpu')
    seed_everything(0)
    model = Elleci(MODELS[name])
    optimizer = make_optimizer(model, train)
    batch = next(rows(text, documents, T, 1))
    def step(): return grad_accum_step(model, batch, optimizer, train.max_grad_norm, train.precision)
    with measure(torch.device('cpu'), [*model.parameters(), *batch[0]]) as measured:
        for _ in range(2): step()
    seconds = []
    for _ in range(3):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return dict(
        model=name,
        seq_len=T,
        batch_size=1,
        parameters=sum(p.numel() for p in model.parameters()),
        predicted_bytes=int(predicted.peak_allocated),
        measured_bytes=measured.peak_allocated,
        activation_bytes=int(predicted.categories['activations']),
        cpu_seconds_per_step=round(min(seconds), 3),
    )

def train_long(name, T, steps, text, documents):
    "Loss, rate and seconds of each step"
    train = train_config(T, steps)
    seed_everything(0)
    model = Elleci(MODELS[name])
    optimizer = make_optimizer(model, train)
    rates = [group['lr'] for group in optimizer.param_groups]
    history = []
    for i, batch in enumerate(rows(text, documents, T, steps, seed=1), 1):
        factor = lr_factor(train, i)
        for group, rate in zip(optimizer.param_groups, rates): group['lr'] = rate*factor
        began = time.process_time()
        result = grad_accum_step(model, batch, optimizer, train.max_grad_norm, train.precision)
        taken = time.process_time() - began
        history.append(dict(loss=round(float(result['loss']), 4), factor=factor, cpu_seconds=round(taken, 3)))
        print(name, i, history[-1], flush=True)
    return dict(model=name, seq_len=T, batch_size=1, steps=history, carried=carried(model, T, text))

@torch.no_grad()
def carried(model, T, text):
    "The largest difference between a row read at once and in pieces, relative to the largest logit"
    tokens = text[None, :T]
    whole = model(tokens)
    cache = model.new_cache(1)
    pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split(PIECE, 1)], 1)
    return dict(piece=PIECE, difference=float((pieces - whole).abs().max()/whole.abs().max()))

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=40)
    p.add_argument('--longest', type=int, default=max(LENGTHS))
    p.add_argument('--out', type=Path, default=ROOT/'data'/'results')
    args = p.parse_args()
    torch.set_num_threads(1)
    text, documents = corpus()
    measured = []
    for name in MODELS:
        longest = args.longest if name in RECURRENT else min(args.longest, LONGEST_FOR_ATTENTION)
        for T in (n for n in LENGTHS if n <= longest):
            measured.append(measure_length(name, T, text, documents))
            print(measured[-1], flush=True)
    trainings = [train_long(name, args.longest, args.steps, text, documents) for name in RECURRENT]
    result = dict(
        lengths=measured,
        trainings=trainings,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
    )
    path = args.out/f"long_context-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1))
    print(path)

if __name__ == '__main__': main()
