"""What context is worth: bits per byte of a run's validation text against the tokens a prediction may see,
in blocks laid end to end, in windows that overlap by half, and of whole documents through the caches:
data/results/context-<commit>.json, which 77_bits_per_byte draws.

    python benchmarks/context.py [--run runs/elleci-tiny] [--limit N] [--dry]

`make train` makes such a run.
"""
import argparse, datetime, json, time
from pathlib import Path
import numpy as np
import torch
from elleci.core import atomic_write
from elleci.inference.evaluate import validation_documents, validation_sources
from elleci.inference.likelihood import Row, score_documents, score_rows, sliding_windows
from elleci.training.load import load_run
from elleci.training.loop import ValidationTotals, token_byte_counts
from tiny import ROOT, commit, hardware

CONTEXTS = 16, 32, 64, 128, 256, 512

def in_blocks(model, documents, context):
    "Bits per byte where windows do not overlap"
    rows = [
        Row(d.ids[start:stop], np.arange(first, stop) - start)
        for d in documents
        for start, first, stop in sliding_windows(len(d.ids), context, context)
    ]
    nats = sum(score.nats for score in score_rows(model, rows))
    return ValidationTotals(nats, 0, sum(d.num_bytes for d in documents)).bits_per_byte

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--run', default='runs/elleci-tiny')
    p.add_argument('--limit', type=int, default=6, help='documents of each source')
    p.add_argument('--dry', action='store_true', help='two contexts, nothing is written')
    a = p.parse_args()
    config, tok, model = load_run(a.run)
    with validation_sources(Path(a.run), config, tok) as sources:
        of_source = [validation_documents(rows, token_byte_counts(tok), a.limit) for rows in sources.values()]
        documents = [document for found in of_source for document in found]
    contexts = CONTEXTS[:2] if a.dry else CONTEXTS
    began = time.process_time()
    overlapping = [score_documents(model, documents, context).bits_per_byte for context in contexts]
    blocks = [in_blocks(model, documents, context) for context in contexts]
    whole = score_documents(model, documents, 0)
    result = dict(
        preset=config.preset,
        trained_length=config.train.seq_len,
        documents=len(documents),
        tokens=whole.tokens,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        cpu_seconds=round(time.process_time() - began, 1),
        contexts=list(contexts),
        blocks=blocks,
        overlapping=overlapping,
        whole=whole.bits_per_byte,
    )
    print(result)
    if a.dry: return
    path = ROOT/'data'/'results'/f"context-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
