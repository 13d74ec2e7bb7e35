"""Two trainings on one machine at once, against one alone, with idle threads that spin or sleep:
data/results/two_runs-<commit>.json.

    python benchmarks/two_runs.py [--seconds N] [--rounds N]

Every setting trains elleci-tiny alone and then twice at the same time, in turn and for several rounds, so
that all of them see the same machine. Counted are the steps that end in a window of time in which nothing
else of it starts or ends.
"""
import argparse, datetime, json, os, statistics, subprocess, sys, tempfile, time
from pathlib import Path
import torch
from elleci.config import preset
from elleci.core import atomic_write
from elleci.training.telemetry import read_metrics
from tiny import ROOT, commit, hardware

IMPORTED = 'import sys; from elleci.training.run import train_command; sys.exit(train_command())'
COMMAND = 'import sys; from elleci.commands import train; sys.exit(train())'
SETTINGS = {
    'as torch comes': (IMPORTED, {}),
    'OMP_WAIT_POLICY=passive': (IMPORTED, {'OMP_WAIT_POLICY': 'passive'}),
    'OMP_NUM_THREADS=1': (IMPORTED, {'OMP_NUM_THREADS': '1'}),
    'elleci_train': (COMMAND, {}),
}

TOKENS = preset('elleci-tiny').train.tokens_per_step

def start(code, variables, out):
    "A training that has far more steps than it will get to make"
    env = {k: v for k, v in os.environ.items() if not k.startswith(('OMP_', 'GOMP_', 'KMP_'))}
    args = ['--out', out, '--steps', '100000', '--save-every', '100000']
    return subprocess.Popen([sys.executable, '-c', code, *args], env=env | variables,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def made(out, after=0.):
    "How many steps have ended since `after`; the first ones are measured by a profiler and do not count"
    return sum(r['step'] > 3 and r['time'] > after for r in read_metrics(out) if 'loss' in r)

def wait(true, seconds):
    "Until `true()`, or so long: trainings that hold each other up may not make a step in a minute"
    began = time.time()
    while not true() and time.time() - began < seconds: time.sleep(.2)

def hurry(pids, nice):
    "Set the priority of all threads of some processes"
    for pid in pids:
        for thread in Path(f'/proc/{pid}/task').iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)

def tokens_per_second(n, setting, seconds, nice):
    "Of each of `n` trainings at once"
    with tempfile.TemporaryDirectory() as tmp:
        outs = [f'{tmp}/{i}' for i in range(n)]
        running = [start(*SETTINGS[setting], out) for out in outs]
        try:
            wait(lambda: all(made(out) for out in outs), 120)
            if nice:
                hurry([p.pid for p in running], nice)
                time.sleep(1)
            began = time.time()
            time.sleep(seconds)
            if not nice: wait(lambda: all(made(out, began) >= 2 for out in outs), 60)
            assert all(p.poll() is None for p in running), f'{setting}: a training ended'
            took = time.time() - began
            return [TOKENS*made(out, began)/took for out in outs]
        finally:
            for p in running:
                p.kill()
                p.wait()

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seconds', type=float, default=10)
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--settings', nargs='*', default=list(SETTINGS))
    p.add_argument(
        '--nice',
        type=int,
        default=0,
        help='priority of a training while it is counted, below 0 (for root) '
        'where others use the machine too',
    )
    a = p.parse_args()
    alone, pairs, load = {s: [] for s in a.settings}, {s: [] for s in a.settings}, []
    for _ in range(a.rounds):
        for setting in a.settings:
            load.append(os.getloadavg()[0])
            alone[setting] += tokens_per_second(1, setting, a.seconds, a.nice)
            pairs[setting] += tokens_per_second(2, setting, a.seconds, a.nice)
            print(
                f'{setting:26} alone {alone[setting][-1]:7,.0f}, two {pairs[setting][-2]:7,.0f} '
                f'{pairs[setting][-1]:7,.0f} tokens/s',
                flush=True,
            )
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    result = dict(
        preset='elleci-tiny',
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=now,
        rounds=a.rounds,
        seconds=a.seconds,
        nice=a.nice,
        load_before_each=load,
        settings={},
    )
    for setting in a.settings:
        one, two = statistics.median(alone[setting]), statistics.median(pairs[setting])
        result['settings'][setting] = dict(alone=one, each_of_two=two, slower=one/max(two, 1.),
                                           all_alone=alone[setting], all_of_two=pairs[setting])
    path = ROOT/'data'/'results'/f"two_runs-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
