"""Train on rows of 256 bytes, read rows of 1,024, with and without RoPE scaling:
data/results/longer_rows-<commit>.json, which `30_rope_scaling` draws.

    python benchmarks/longer_rows.py [--steps N]
"""
import argparse, dataclasses, datetime, json
import torch
from elleci.config import preset
from elleci.core import atomic_write, seed_everything
from elleci.data.sources import iter_documents
from elleci.documents import next_token_labels
from elleci.model import Elleci, token_loss
from tiny import ROOT, commit, hardware

TRAINED, READ, BUCKET = 256, 1024, 64

def texts():
    "Python's manual as bytes, a document an item; every eighth long one is held out"
    found = [torch.tensor(list(d.text.encode())) for d in iter_documents('english', 'embedded:english')]
    found = [t for t in found if len(t) > READ]
    return [t for i, t in enumerate(found) if i % 8], [t[:READ + 1] for t in found[::8]]

def crops(found, n, generator):
    "(n, TRAINED) pieces, long documents as likely as they are long"
    sizes = torch.tensor([len(t) - TRAINED for t in found], dtype=torch.double)
    rows = []
    for i in torch.multinomial(sizes, n, replacement=True, generator=generator).tolist():
        start = int(torch.randint(int(sizes[i]), (), generator=generator))
        rows.append(found[i][start:start + TRAINED])
    return torch.stack(rows)

def train(model, found, steps, lr=2e-3):
    "Rows of TRAINED bytes, AdamW, a linear decay"
    optimizer = torch.optim.AdamW(model.parameters(), lr, (.9, .95), weight_decay=.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups: group['lr'] = lr*min(1, (step + 1)/20)*(1 - step/steps)
        tokens = crops(found, 8, generator)
        labels = next_token_labels(tokens)
        loss = token_loss(model, model.hidden(tokens), labels)/labels.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        if step % 100 == 0: print(step, f'{loss.item():.3f}', flush=True)

@torch.no_grad()
def by_position(model, held_out):
    "Bits per byte in each bucket of positions"
    losses = []
    for row in torch.stack(held_out).split(8):
        logits = model(row[:, :-1])
        losses.append(torch.nn.functional.cross_entropy(logits.mT, row[:, 1:], reduction='none'))
    nats = torch.cat(losses).unflatten(1, (-1, BUCKET)).mean((0, 2))
    return [round(float(n), 4) for n in nats/torch.tensor(2.).log()]

def scaled(model, **rope):
    "The same weights with other angles"
    other = Elleci(dataclasses.replace(model.cfg, **rope))
    other.load_state_dict(model.state_dict())
    return other

def measure(pattern, steps, found, held_out):
    "One training, and its readings"
    seed_everything(0)
    widths = dict(vocab_size=256, d_model=128, n_layers=4, n_attn_heads=4, d_ff=352, headdim=32)
    heads = dict(qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=48, kv_lora_rank=48)
    cfg = dataclasses.replace(
        preset('elleci-tiny').model, **widths, **heads, pattern=pattern, ternary=False, rope_theta=10_000.
    )
    model = Elleci(cfg)
    train(model, found, steps)
    factor = READ/TRAINED
    ways = {
        'none': {},
        'linear': dict(rope_scaling='linear', rope_factor=factor),
        'yarn': dict(rope_scaling='yarn', rope_factor=factor, rope_original_len=TRAINED),
    }
    bits = {name: by_position(scaled(model, **rope), held_out) for name, rope in ways.items()}
    for name, values in bits.items(): print(pattern, name, values, flush=True)
    return dict(pattern=pattern, parameters=sum(p.numel() for p in model.parameters()), bits_per_byte=bits)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=600)
    steps = p.parse_args().steps
    found, held_out = texts()
    result = dict(
        steps=steps,
        trained_length=TRAINED,
        read_length=READ,
        bucket=BUCKET,
        documents_held_out=len(held_out),
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        runs=[measure(pattern, steps, found, held_out) for pattern in ('A', 'MMMA')],
    )
    path = ROOT/'data'/'results'/f"longer_rows-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
