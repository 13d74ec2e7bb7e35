"""What `plan` finds on small cards, in what time, and whether anything faster fits.

    python benchmarks/planner.py [--random N] [--only NAME …]

Writes data/results/planner-<commit>.json. Imports are not counted in the seconds; a machine that does other
things as well stretches them, so the price of one rehearsal stands beside them. Each plan is held against N
random candidates: those that are faster by the model are rehearsed, and none may fit.
"""
import argparse, datetime, json, os, time
from dataclasses import replace
import torch
from elleci.config import Config, preset
from elleci.core import UserError, atomic_write, fmt_bytes
from elleci.planning.account import account
from elleci.planning.planner import faster_and_fitting, plan
from tiny import ROOT, commit, hardware


def seven_billion():
    "A 7B shape of the same kind; its weights are not averaged, which would take 26 GiB of RAM"
    own = preset('elleci-1b5', averaging_start=1.)
    model = replace(own.model, d_model=4096, n_layers=32, n_attn_heads=32, d_ff=11264)
    return Config('7B', model, own.train)


CASES = {
    'elleci-1b5 on 12 GiB': (lambda: preset('elleci-1b5'), dict(vram='12GiB')),
    'elleci-1b5 on 8 GiB': (lambda: preset('elleci-1b5'), dict(vram='8GiB')),
    'elleci-1b5 on 6 GiB': (lambda: preset('elleci-1b5'), dict(vram='6GiB')),
    'elleci-1b5 on 4 GiB': (lambda: preset('elleci-1b5'), dict(vram='4GiB')),
    '7B on 12 GiB': (seven_billion, dict(vram='12GiB')),
    '7B on 12 GiB, 64 GiB of RAM': (seven_billion, dict(vram='12GiB', ram='64GiB')),
    'gpt-medium on 4 GiB': (lambda: preset('gpt-medium'), dict(vram='4GiB')),
}


def timed(f):
    "What a function gives or refuses, CPU seconds, seconds"
    cpu, wall = time.process_time(), time.perf_counter()
    try: result = f()
    except UserError as e: result = e
    return result, round(time.process_time() - cpu, 2), round(time.perf_counter() - wall, 2)


def measure(name, n_random):
    "A row of the results"
    make, budgets = CASES[name]
    config = make()
    _, price, _ = timed(lambda: account(preset('elleci-350m').model, preset('elleci-350m').train))
    p, cpu, wall = timed(lambda: plan(config, **budgets))
    row = dict(budgets=budgets, cpu_seconds=cpu, wall_seconds=wall, load=os.getloadavg()[0])
    row |= dict(rehearsal_of_350m=price)
    print(f'{name}: {cpu} s of CPU, {wall} s; one rehearsal of elleci-350m {price} s')
    print(p, '\n', flush=True)
    if isinstance(p, UserError): return row | dict(refused=str(p), least=p.least)
    found, n_rehearsed = faster_and_fitting(p, n_random)
    print(f'{len(found)} of {n_random} random ones are faster and fit, {n_rehearsed} rehearsed\n', flush=True)
    fields = p.as_dict()
    for unused in ('toml', 'runners_up', 'train'): del fields[unused]
    row |= dict(plan=fields, text=str(p), random=n_random, random_rehearsed=n_rehearsed)
    return row | dict(faster_and_fitting=[vars(train) for train in found])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--random', type=int, default=300)
    parser.add_argument('--only', nargs='+', choices=CASES, default=list(CASES))
    given = parser.parse_args()
    # what torch imports at first use
    plan(preset('elleci-tiny'), '2GiB')
    now = datetime.datetime.now(datetime.timezone.utc)
    rows = {}
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), rows=rows,
                  date=now.strftime('%Y-%m-%d %H:%M UTC'))
    path = ROOT/'data'/'results'/f"planner-{result['commit']}.json"
    for name in given.only:
        rows[name] = measure(name, given.random)
        atomic_write(path, json.dumps(result, indent=1) + '\n')
    slowest = max(rows, key=lambda name: rows[name]['cpu_seconds'])
    most = fmt_bytes(max(row['plan']['needs']['card'] for row in rows.values() if 'plan' in row))
    print(f"slowest: {slowest}, {rows[slowest]['cpu_seconds']} s of CPU; at most {most} of a card")
    print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
