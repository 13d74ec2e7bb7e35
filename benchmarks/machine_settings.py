"""Settings of the machine that act on a CPU, each against the same steps without it:
data/results/machine_settings-<commit>.json.

    python benchmarks/machine_settings.py [--rounds N] [--steps N] [--dry]

Threads, cores and gc.collect every ten steps, on elleci-tiny in fp32. Subjects take turns,
some steps each, for several rounds, so that all of them see the same machine. Reported are medians over the
rounds of a subject's seconds relative to the plain steps of the same round: wall clock, and processor time.
--dry: one round, nothing written.
"""
import argparse, datetime, gc, json, statistics, time
import torch
from elleci.config import preset
from elleci.core import atomic_write, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.engine.machine_settings import MACHINE_SETTINGS
from elleci.optim.optimizers import make_optimizer
from tiny import ROOT, commit, hardware

def make():
    "An engine, and its micro-batches"
    config = preset('elleci-tiny', precision='fp32', batch_size=1, grad_accum_steps=1, seq_len=64)
    train = config.train
    seed_everything(0)
    model = make_model(config.model, train)
    engine = make_engine(model, make_optimizer(model, train), train)
    tokens = torch.randint(0, config.model.vocab_size, (train.batch_size, train.seq_len))
    return engine, [(tokens, tokens, torch.zeros_like(tokens))]*train.grad_accum_steps

def seconds(engine, batches, steps, setting=None):
    "(wall clock, processor) of a step"
    wall, cpu = time.perf_counter(), time.process_time()
    if setting is None:
        for _ in range(steps): engine.step(batches)
    else:
        with setting.active() as after_step:
            for n in range(1, steps + 1):
                engine.step(batches)
                after_step(n)
    return (time.perf_counter() - wall)/steps, (time.process_time() - cpu)/steps

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--steps', type=int, default=10)
    p.add_argument('--dry', action='store_true')
    a = p.parse_args()
    if a.dry: a.rounds, a.steps = 1, 1
    engine, batches = make()
    names = ['plain', 'plain again', 'pinned', 'gc_collect_10']
    if torch.get_num_threads() > 1: names.append('one_core_left')
    found = {name: [] for name in names}
    seconds(engine, batches, 1)
    for _ in range(a.rounds):
        for name in found:
            found[name].append(seconds(engine, batches, a.steps, MACHINE_SETTINGS.get(name)))
    plain = found['plain']
    ratios = {
        name: {
            kind: [round(one[i]/without[i], 4) for one, without in zip(rounds, plain)]
            for i, kind in enumerate(('wall clock', 'processor'))
        }
        for name, rounds in found.items()
    }
    began = time.process_time()
    gc.collect()
    result = dict(
        preset='elleci-tiny',
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        threads=torch.get_num_threads(),
        rounds=a.rounds,
        steps=a.steps,
        step_seconds=statistics.median(wall for wall, _ in plain),
        step_cpu_seconds=statistics.median(cpu for _, cpu in plain),
        gc_collect_cpu_seconds=time.process_time() - began,
        objects=len(gc.get_objects()),
        relative_to_plain=ratios,
        median={name: {kind: statistics.median(v) for kind, v in r.items()} for name, r in ratios.items()},
    )
    for name, r in result['median'].items(): print(f'{name:18}', r)
    if a.dry: return
    path = ROOT/'data'/'results'/f"machine_settings-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
