"""Attention within documents on this CPU, forward and backward in fp32, against the same with a mask:
data/results/attention-<commit>.json.

    python benchmarks/attention.py [--repeats N] [--dry]

The heads of elleci-1b5 and of elleci-tiny, one row of 2,048 tokens with 1, 2, 20, 204 and 2,048 documents
(target: at least twice as fast as the mask with 20). CPU seconds; ratios are medians over rounds in which
both run once, one after the other. --dry: short rows, nothing written.
"""
import argparse, datetime, json, statistics, time
import torch
import torch.nn.functional as F
from elleci.config import preset
from elleci.core import assert_close, atomic_write, seed_everything
from elleci.kernels.document_attention import document_attention
from elleci.layers.attention import document_mask
from tiny import ROOT, commit, hardware

def masked(q, k, v, seq_idx):
    "The old form: a (B, 1, T, T) mask, made anew in every layer"
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(seq_idx)).transpose(1, 2)

def rows(T, documents):
    "seq_idx (1, T) with so many documents of unequal length"
    cuts = torch.randperm(T - 1)[:documents - 1] + 1
    starts = torch.zeros(T, dtype=torch.long)
    starts[cuts] = 1
    return starts.cumsum(0)[None]

def both_ways(f, inputs, seq_idx, dout):
    "CPU seconds of a forward and a backward pass, and their results"
    began = time.process_time()
    out = f(*inputs, seq_idx)
    grads = torch.autograd.grad(out, inputs, dout)
    return time.process_time() - began, (out, *grads)

def measure(H, P, T, documents, repeats):
    "One line of the result"
    seed_everything(0)
    inputs = [torch.randn(1, T, H, P, requires_grad=True) for _ in range(3)]
    seq_idx, dout = rows(T, documents), torch.randn(1, T, H, P)
    seconds = {masked: [], document_attention: []}
    for _ in range(repeats + 1):
        results = {}
        for f, taken in seconds.items():
            # Read anew in every round, as for every micro-batch.
            took, results[f] = both_ways(f, inputs, seq_idx.clone(), dout)
            taken.append(took)
        for a, b in zip(*results.values()): assert_close(a, b, atol=2e-4)
    mask, ours = (taken[1:] for taken in seconds.values())          # the first round warms up
    ratios = [a/b for a, b in zip(mask, ours)]
    return dict(
        heads=H,
        width=P,
        T=T,
        documents=documents,
        masked_seconds=round(statistics.median(mask), 4),
        seconds=round(statistics.median(ours), 4),
        faster=round(statistics.median(ratios), 2),
        slowest_round=round(min(ratios), 2),
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=7)
    p.add_argument('--dry', action='store_true', help='short rows, nothing is written')
    a = p.parse_args()
    T = 128 if a.dry else 2048
    lines = []
    for name in ('elleci-1b5', 'elleci-tiny'):
        c = preset(name).model
        for documents in (1, 2, 20, T//10, T):
            lines.append(dict(preset=name) | measure(c.n_attn_heads, c.v_head_dim, T, documents, a.repeats))
            print(lines[-1])
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        repeats=a.repeats,
        rows=lines,
        twice_as_fast_with_20=all(line['faster'] >= 2 for line in lines if line['documents'] == 20),
    )
    if a.dry: return
    path = ROOT/'data'/'results'/f"attention-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
