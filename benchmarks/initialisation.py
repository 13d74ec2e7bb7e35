"""Does it matter how MLA's down projection starts? Its own scale, 1/√fan-in, against that of a projection
which ends a branch (as it was until November 2026): data/results/initialisation-<commit>.json.

    python benchmarks/initialisation.py [--steps N] [--seeds N]

Standard deviations in three presets first. Then elleci-tiny with MLA in every layer, and a narrow hybrid of
24 layers, each trained with either start in turn, on the same text; what is held out is measured whole. At
last the model of tasks.py with both mixers, which learns to copy, with four seeds.
"""
import argparse, dataclasses, datetime, itertools, json, tempfile
from unittest import mock
import torch
import elleci.model
from elleci.config import preset
from elleci.core import atomic_write, seed_everything
from elleci.data.loader import open_data
from elleci.data.sources import train_tokenizer_on
from elleci.training.loop import token_byte_counts
import tasks
from d_state import train
from tiny import ROOT, commit, hardware

STARTS = {
    'before': (*elleci.model.RESIDUAL_PROJECTIONS, 'kv_down'),
    'after': elleci.model.RESIDUAL_PROJECTIONS,
}
NARROW = dict(
    d_model=64,
    n_layers=24,
    headdim=32,
    n_attn_heads=4,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    kv_lora_rank=32,
    d_ff=176,
)
MODELS = {'elleci-tiny, pattern A': dict(pattern='A'), '24 layers, 64 wide': NARROW}


def start(name):
    "Within it, models are initialised in this way"
    return mock.patch.object(elleci.model, 'RESIDUAL_PROJECTIONS', STARTS[name])


@torch.no_grad()
def deviations(name):
    "Of the weights, times √fan-in, which is 1 by the rule, and of queries and rotary keys of normal input"
    cfg = preset(name).model
    with torch.device('meta'): model = elleci.model.Elleci(cfg)
    mixer = model.blocks[cfg.mixers.index('A')].mixer.to_empty(device='cpu')
    seed_everything(0)
    model.reset_parameters()
    x, r = torch.randn(256, cfg.d_model), cfg.kv_lora_rank
    latent, key = mixer.kv_down.weight.split([r, cfg.qk_rope_head_dim])
    weights = dict(queries=mixer.q_proj.weight, latent=latent, rotary_key=key)
    found = {part: float(weight.std())*cfg.d_model**.5 for part, weight in weights.items()}
    found['query_values'] = float(mixer.q_proj(x).std())
    found['rotary_key_values'] = float(mixer.kv_down(x)[:, r:].std())
    return {part: round(value, 3) for part, value in found.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=200)
    p.add_argument('--seeds', type=int, default=3)
    a, c = p.parse_args(), preset('elleci-tiny')
    tok, folder = train_tokenizer_on(c.train.data, c.model.vocab_size), tempfile.mkdtemp()
    token_bytes = token_byte_counts(tok)
    result = dict(
        steps=a.steps,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        deviations={},
        runs=[],
        copying=[],
    )
    for name in ('elleci-tiny', 'elleci-30m', 'elleci-1b5'):
        result['deviations'][name] = {}
        for how in STARTS:
            with start(how): result['deviations'][name][how] = deviations(name)
        print(name, result['deviations'][name], flush=True)
    for seed in range(a.seeds):
        data, val = open_data(dataclasses.replace(c.train, steps=a.steps, seed=seed), tok, folder)
        for name, settings in MODELS.items():
            for how in STARTS:
                with start(how): run = train(settings, seed, a.steps, data, val, token_bytes)
                result['runs'].append(dict(model=name, start=how, **run))
                print(result['runs'][-1], flush=True)
    for seed, how in itertools.product(range(4), STARTS):
        with start(how): run = tasks.measure('copy', 'MA', 2, 400, 200, seed)
        result['copying'].append(dict(start=how, **run))
        print(how, seed, run['accuracy'], flush=True)
    path = ROOT/'data'/'results'/f"initialisation-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
