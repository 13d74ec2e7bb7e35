"""Every optimizer that a training can choose: elleci-tiny, the same data, 200 steps with the ordinary engine
and 50 with the layer-major one, where that takes it: data/results/optimizers-<commit>.json.

    python benchmarks/optimizers.py [--only NAME …] [--dry]

Of each: the loss on held-out text before and after, bytes of optimizer states as the ledger predicts them and
as they are, tokens per second, and the slope of the process's memory from step 10 to 60, in bytes per step.
Steps are tiny, of 64 tokens, so that all of it takes minutes: an optimizer's own time weighs far more than in
a real training, and the losses say that each of them learns, not which one learns best.
"""
import argparse, datetime, json, tempfile, time, warnings
import numpy as np
import torch
from elleci.config import CHOICES, preset
from elleci.core import atomic_write, memory_in_use, seed_everything
from elleci.data.loader import make_loader, open_data
from elleci.data.sources import train_tokenizer_on
from elleci.engine.layer_major import make_engine, make_model
from elleci.engine.mapped_file import MappedFile
from elleci.memory.ledger import state_sizes
from elleci.optim.optimizers import make_optimizer, state_bytes
from elleci.optim.schedules import lr_factor
from elleci.planning.cost import mapped_state_bytes
from elleci.training.loop import validate
from tiny import ROOT, commit, hardware

EVERY = 10   # steps in a point of the loss curve
CPU = torch.device('cpu')
# Of the same order for all that step like Lion, and for all that step like AdamW; GaLore's step is a quarter.
RATES = dict.fromkeys(CHOICES['optimizer'], 3e-3) | dict.fromkeys(('lion', 'lion8', 'lion8-bnb'), 1e-3)
RATES['galore'] = 1e-2


def ways(names):
    "(optimizer, engine, where the states wait, steps) of each run"
    for name in names: yield name, 'grad_accum', 'device', 200
    for name in names:
        if name.startswith('paged'): continue
        yield name, 'layer-major', 'device', 50
        if name in ('adamw', 'galore'): yield name, 'layer-major', 'disk', 50


def configure(name, engine, states_on, steps):
    "The preset with one row of 64 tokens in a step"
    settings = dict(engine=engine, clip_by='layer', states_on=states_on)
    if engine == 'layer-major': settings['block_inputs_on'] = 'device'
    settings |= dict(steps=steps, lr=RATES[name], batch_size=1, seq_len=64, galore_rank=32)
    return preset('elleci-tiny', optimizer=name, **settings)


def train(config, data, val):
    "One training"
    t = config.train
    seed_everything(t.seed)
    model = make_model(config.model, t)
    optimizer = make_optimizer(model, t)
    on_disk = t.states_on == 'disk'
    mapped = MappedFile(CPU, reserve=mapped_state_bytes(config.model, t)) if on_disk else None
    engine = make_engine(model, optimizer, t, states_file=mapped)
    before = validate(engine, val, 4, 4)['val_loss']
    losses, resident = [], []
    began, used = time.perf_counter(), time.process_time()
    for i, (micro_batches, *_) in enumerate(make_loader(data, t), 1):
        for group in optimizer.param_groups: group['lr'] = t.lr*lr_factor(t, i)
        losses.append(float(engine.step(micro_batches)['loss']))
        resident.append(memory_in_use(CPU))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
    means = [np.mean(losses[i:i + EVERY]) for i in range(0, len(losses), EVERY)]
    watched = resident[10:60]
    slope = round(float(np.polyfit(range(len(watched)), watched, 1)[0])) if watched else None
    return dict(
        optimizer=t.optimizer,
        engine=t.engine,
        states_on=t.states_on,
        steps=t.steps,
        lr=t.lr,
        loss_before=round(before, 4),
        loss_after=round(validate(engine, val, 4, 4)['val_loss'], 4),
        curve=[[min((k + 1)*EVERY, len(losses)), round(float(mean), 4)] for k, mean in enumerate(means)],
        state_bytes=state_bytes(optimizer),
        predicted_state_bytes=sum(state_sizes(config.model, t)),
        tokens_per_s=round(t.tokens_per_step*t.steps/seconds, 1),
        tokens_per_cpu_s=round(t.tokens_per_step*t.steps/cpu_seconds, 1),
        slope_bytes_per_step=slope,
    )


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', nargs='+', choices=CHOICES['optimizer'], default=CHOICES['optimizer'])
    p.add_argument('--dry', action='store_true', help='two steps of each, nothing is written')
    a = p.parse_args()
    # That there is nothing to page on a CPU.
    warnings.filterwarnings('ignore', message='Paged optimizers')
    tiny = preset('elleci-tiny')
    tokenizer = train_tokenizer_on(tiny.train.data, tiny.model.vocab_size)
    configs = [configure(*way[:3], 2 if a.dry else way[3]) for way in ways(a.only)]
    data, val = open_data(configs[0].train, tokenizer, tempfile.mkdtemp())
    result = dict(
        preset='elleci-tiny',
        tokens_per_step=configs[0].train.tokens_per_step,
        galore_rank=configs[0].train.galore_rank,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        runs=[],
    )
    path = ROOT/'data'/'results'/f"optimizers-{result['commit']}.json"
    for config in configs:
        result['runs'].append(run := train(config, data, val))
        print({k: v for k, v in run.items() if k != 'curve'}, flush=True)
        if not a.dry: atomic_write(path, json.dumps(result, indent=1) + '\n')
    if not a.dry: print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
