"""What you can fine-tune on the card you have: eleven decoders, cards of 6 to 24 GB, by the account. See
runner.py for the command line.

Ours is the fastest plan: all weights in bf16 with 8-bit momentum, by the layer-major step, with 32 GiB of
RAM, 48 from 16 GB on, of which an eighth stays free. Beside it what transformers' Trainer reserves, by the
same account: one row at a time, gradient checkpointing, weights and gradients in bf16, and AdamW of
bitsandbytes in 8 bits, or adapters alone. And adapters of rank 16 by our step, over 4 bits.
"""
import functools, tomllib
from dataclasses import replace
from unittest import mock
from elleci.config import FinetuneConfig, TrainConfig
from elleci.core import GiB
from elleci.files import installed_file
from elleci.planning import planner
from elleci.planning.decoders import n_parameters
from elleci.planning.foreign import hf_model_maker, model_settings, pretrained_of
from elleci.planning.predict import predict
from runner import main

# Card: RAM of the machine, in GiB
CARDS = {'6GiB': 32, 'rtx-4060': 32, 'rtx-3080': 32, 'rtx-4070': 32, 'rtx-5060-ti-16': 48, 'rtx-4090': 48}
# Ways of training that are searched
WAYS = dict(
    block_inputs_on=['device', 'pinned'], weights_on=['device', 'host'], states_on=['device', 'host'],
    loss_workspace_mib=[192],
)

def of_trainer(name, seq_len, lora, optimizer):
    "Bytes that a step of transformers' Trainer reserves"
    make, batch, _ = hf_model_maker(model_settings(name))
    p = predict(
        make, lambda: batch(1, seq_len), None, optimizer, 'bf16-weights', 'b200', 0, lora, True, name,
        changes=False, show=None,
    )
    return p.peak_reserved

def cell(config, card, ram):
    "The fastest plan for a card"
    try: p = planner.plan(config, card, ram*GiB, ram*GiB, None, WAYS)
    except planner.NothingFits as e: return dict(fits=False, least=e.least)
    t = p.config.train
    way = {name: getattr(t, name) for name in (*WAYS, 'batch_size')}
    return dict(fits=True, seconds=p.seconds, binds=p.time['binds'], **p.needs._asdict(), **way)

def adapters(train, name):
    "The same training of adapters over weights in 4 bits"
    model = pretrained_of(model_settings(name), lora=16, base='nf4')
    return FinetuneConfig(name, model, replace(train, optimizer='adamw', precision='bf16'))

def finetune(models=(), seq_len=2048, rows=8, dry=False):
    "All weights of each model on each card, rows of 2,048 tokens, 16k tokens a step"
    known = tomllib.loads(installed_file('models.toml').read_text(encoding='utf-8'))
    train = TrainConfig(
        engine='layer-major', clip_by='layer', optimizer='lion8', precision='bf16-weights', seq_len=seq_len,
        batch_size=1, grad_accum_steps=rows,
    )
    found = {}
    for name in models or list(known)[:1 if dry else None]:
        model = pretrained_of(model_settings(name))
        config, row = FinetuneConfig(name, model, train), dict(parameters=n_parameters(model))
        row['trainer'] = of_trainer(name, seq_len, 0, 'adamw8-bnb')
        row['trainer_lora'] = of_trainer(name, seq_len, 16, 'adamw')
        # Cards ask for the same rehearsals.
        with mock.patch.object(planner, 'account', functools.cache(planner.account)):
            row['cards'] = {card: cell(config, card, ram) for card, ram in CARDS.items()}
            small = adapters(train, name)
            row['adapters'] = {card: cell(small, card, ram) for card, ram in CARDS.items()}
        found[name] = row
        print(name, flush=True)
        yield dict(seq_len=seq_len, rows_per_step=rows, rows=found)
    for what in ('cards', 'adapters'): print(*table(found, what), sep='\n')

def table(found, what):
    "Lines, of all weights or of adapters: for each model and card what is reserved, RAM, seconds of a step"
    def shown(c):
        if not c['fits']: return '—'
        return f"{c['card']/GiB:.1f} + {c['ram']/GiB:.0f}, {c['seconds']:.1f} s"
    trainer = 'trainer' if what == 'cards' else 'trainer_lora'
    yield ' '.join([f'{"GiB + GiB of RAM":16} {"Trainer":>8}', *(f'{card:>18}' for card in CARDS)])
    for name, row in found.items():
        cells = [f'{shown(c):>18}' for c in row[what].values()]
        yield ' '.join([f'{name:16} {row[trainer]/GiB:8.1f}', *cells])
    for card in CARDS:
        fitting = [name for name, row in found.items() if row[what][card]['fits']]
        yield f"{card}: {max(fitting, key=lambda name: found[name]['parameters'], default='none of them')}"

if __name__ == '__main__': main(finetune)
