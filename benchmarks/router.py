"""A router beside no router: the loss over 200 steps, the share that skips, the leak, the time of a step and
what skipping saves where nothing is trained: data/results/router-<commit>.json, which 43_router reads.

    python benchmarks/router.py [--seeds N] [--steps N]

All models of a seed are trained side by side, each step on the same rows. Seconds are of the CPU, one thread.
"""
import argparse, datetime, json, os, statistics, time
from dataclasses import replace
from pydoc_data import topics

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch
from elleci.config import ModelConfig, TrainConfig
from elleci.core import atomic_write, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.layers.ffn import BitLinear, SwiGLU
from elleci.layers.norm import RMSNorm
from elleci.layers.router import Router, collect_routes, route_share
from elleci.optim.optimizers import make_optimizer
from tiny import ROOT, commit, hardware

BASE = ModelConfig(
    vocab_size=256,
    d_model=64,
    n_layers=4,
    headdim=16,
    n_attn_heads=4,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    kv_lora_rank=16,
    d_ff=176,
    tie_embeddings=True,
)
MODELS = {
    'no router': BASE,
    'skip': replace(BASE, router='skip'),
    'think': replace(BASE, router='think'),
    'no router, d_ff / 2': replace(BASE, d_ff=BASE.d_ff//2),
}
WINDOW = 10 # steps whose mean loss is kept


def rows(text, generator, B=8, T=128):
    "Tokens, labels and document numbers of random places in the text"
    starts = torch.randint(len(text) - T - 1, (B,), generator=generator)
    found = torch.stack([text[start:start + T + 1] for start in starts])
    return found[:, :-1], found[:, 1:], torch.zeros(B, T, dtype=torch.long)


@torch.no_grad()
def moved_by_a_later_token(model, tokens, at=64):
    "The largest change of a logit before position `at` when the tokens from there on are others"
    others = tokens.clone()
    others[:, at:] = (others[:, at:] + 1) % BASE.vocab_size
    return (model(others) - model(tokens))[:, :at].abs().max().item()


def trained(seed, steps, text):
    "All models, side by side"
    train = TrainConfig(steps=steps, precision='fp32', optimizer='adamw', lr=3e-3)
    engines, losses, seconds = {}, {}, {}
    for name, config in MODELS.items():
        seed_everything(seed)
        model = make_model(config, train)
        engines[name] = make_engine(model, make_optimizer(model, train), train)
        losses[name], seconds[name] = [], []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = rows(text[:-len(text)//10], generator)
        for name, engine in engines.items():
            start = time.process_time()
            losses[name].append(engine.step([batch])['loss'])
            seconds[name].append(time.process_time() - start)
    return {name: result(engine, losses[name], seconds[name], text) for name, engine in engines.items()}


def result(engine, losses, seconds, text):
    "What is kept of one training: its course, and the model at its end on text that it has not seen"
    generator = torch.Generator().manual_seed(0)
    held_out = [rows(text[-len(text)//10:], generator) for _ in range(8)]
    with collect_routes() as routes:
        nats = sum(float(engine.evaluate(*batch)) for batch in held_out)
    config = engine.model.cfg
    windows = [losses[i:i + WINDOW] for i in range(0, len(losses), WINDOW)]
    return dict(
        losses=[round(statistics.mean(w), 4) for w in windows],
        val_loss=round(nats/sum(b[1].numel() for b in held_out), 4),
        step_seconds=round(statistics.median(seconds), 4),
        share=round(route_share(routes, config), 4) if routes else None,
        shares=[round(route_share(routes[i::config.n_layers], config), 4) for i in range(config.n_layers)]
        if routes else [],
        moved_in_training=moved_by_a_later_token(engine.model.train(), held_out[0][0]),
        moved=moved_by_a_later_token(engine.model.eval(), held_out[0][0]),
    )


@torch.no_grad()
def skipping(linear, D=512, d_ff=1408, n=1024, repeats=7):
    "Seconds of a routed feed-forward part, all tokens computed or those alone that go, for several shares"
    seed_everything(0)
    config = ModelConfig(d_model=D, d_ff=d_ff, router='skip')
    router, ffn, norm = Router(config), SwiGLU(config, linear), RMSNorm(D)
    x = torch.randn(1, n, D)
    scores = router.score(x).flatten().sort(descending=True).values - router.bias
    found = []
    for share in (0., .1, .25, .5, .75, 1.):
        at = round(share*n)
        router.bias.fill_(-(scores[0] + 1 if at == 0 else scores[at - 1] - 1e-4).item())
        row = dict(share=share)
        for name, way in {'masked': router.train(), 'gathered': router.eval()}.items():
            seconds = []
            for _ in range(repeats):
                way.train(name == 'masked')
                start = time.process_time()
                way(x, ffn, norm)
                seconds.append(time.process_time() - start)
            row[name] = round(min(seconds), 5)
        found.append(row)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--steps', type=int, default=200)
    a = p.parse_args()
    torch.set_num_threads(1)
    at_commit = commit()
    raw = bytearray('\n'.join(topics.topics.values()).encode())
    text = torch.frombuffer(raw, dtype=torch.uint8).long()
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        commit=at_commit,
        date=now,
        steps=a.steps,
        window=WINDOW,
        trainings=[trained(seed, a.steps, text) for seed in range(a.seeds)],
        skipping={'ordinary': skipping(torch.nn.Linear), 'ternary': skipping(BitLinear)},
    )
    path = ROOT/'data'/'results'/f'router-{at_commit}.json'
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path}')


if __name__ == '__main__': main()
