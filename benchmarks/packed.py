"""The 1.5B model in two bits a weight: file sizes, and the same logits before and after:
data/results/packed-<commit>.json.

    python benchmarks/packed.py [--preset elleci-1b5-12gib] [--tokens N] [--dry]

Weights are those of a fresh model; what they say does not matter here, only that both say the same. Takes
12 GiB of RAM and some minutes.
"""
import argparse, contextlib, datetime, io, json, tempfile, time
from pathlib import Path
import torch
from elleci.training.checkpoint import MODEL_FILE, save_weights
from elleci.config import config_to_json, preset
from elleci.core import atomic_write, fmt_bytes, seed_everything
from elleci.data.tokenizer import save_tokenizer, train_tokenizer
from elleci.engine.layer_major import make_model
from elleci.inference.generate import elleci_pack
from elleci.training.load import load_run
from elleci.layers.ffn import BitLinear, PackedLinear
from tiny import ROOT, commit, hardware

def logits(run, tokens):
    "What a saved model says of some tokens, seconds to load it, and the model"
    began = time.perf_counter()
    _, _, model = load_run(run, 'cpu')
    took = time.perf_counter() - began
    with torch.no_grad(): return model(tokens), took, model

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--preset', default='elleci-1b5-12gib')
    p.add_argument('--tokens', type=int, default=32)
    p.add_argument('--dry', action='store_true', help='elleci-tiny, nothing is written')
    a = p.parse_args()
    config = preset('elleci-tiny' if a.dry else a.preset)
    with tempfile.TemporaryDirectory() as folder:
        run, packed = Path(folder)/'run', Path(folder)/'packed'
        seed_everything(0)
        model = make_model(config.model, config.train)
        ternary = sum(m.weight.numel() for m in model.modules() if isinstance(m, BitLinear))
        save_weights(run, model, step='0')
        del model
        atomic_write(run/'config.json', config_to_json(config))
        save_tokenizer(train_tokenizer(['la memoria'], config.model.vocab_size), run/'tokenizer.json')
        with contextlib.redirect_stdout(io.StringIO()): size = elleci_pack(str(run), str(packed))
        tokens = torch.randint(
            config.model.vocab_size, (1, a.tokens), generator=torch.Generator().manual_seed(0)
        )
        before, load_before, _ = logits(run, tokens)
        del _
        after, load_after, small = logits(packed, tokens)
        own = sum(m.packed.nbytes for m in small.modules() if isinstance(m, PackedLinear))
        result = dict(
            preset=config.preset,
            hardware=hardware(),
            torch=torch.__version__,
            commit=commit(),
            date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
            ternary_weights=ternary,
            file_before=(run / MODEL_FILE).stat().st_size,
            file_packed=size,
            rest_bytes=size - own,
            bytes_per_ternary_weight=own / ternary,
            logits_equal=bool(torch.equal(before, after)),
            logits_compared=before.numel(),
            load_seconds=[round(load_before, 1), round(load_after, 1)],
        )
    print(
        {
            k: fmt_bytes(v) if k in ('file_before', 'file_packed', 'rest_bytes') else v
            for k, v in result.items()
        }
    )
    if a.dry: return
    path = ROOT/'data'/'results'/f"packed-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
