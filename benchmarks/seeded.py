"""Losses of seeded trainings and the account of every preset, to the last bit: a change that only moves or
renames code changes none of them.

    python benchmarks/seeded.py                   # writes data/results/seeded-<commit>.json
    python benchmarks/seeded.py --against FILE    # compares with an older file; exit code 1 where they differ
    python benchmarks/seeded.py --accounts …      # the accounts alone, which take seconds

Fifty steps of elleci-tiny with both engines, five of each pattern of mixers, all on the embedded corpus
with one thread; losses as hexadecimal floats and a checksum of the weights, so that no rounding hides a
difference. Accounts are compared as JSON text, byte for byte and in the order of their keys. An older file
is read through data/results/renamed-keys.json: `keys` holds, for an object's key, the new names of the keys
inside that object, `values` holds, for a key, the new names of its values.
"""
import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')   # sums in one order
import torch
from safetensors.torch import load_file
from elleci.planning.account import account, as_dict
from elleci.config import PRESETS, preset
from elleci.core import atomic_write
from elleci.training.telemetry import read_metrics
from elleci.training.run import elleci_train
from tiny import ROOT, commit, hardware

RENAMED = ROOT/'data'/'results'/'renamed-keys.json'
PATTERNS = ('M', 'A', 'E', 'MMMA', 'MEA')


def trained(config):
    "One training: every loss, every validation loss and a checksum of the weights at its end"
    silent = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        elleci_train(config=config, out=f'{folder}/run')
        rows = read_metrics(f'{folder}/run')
        last = max(Path(folder).glob('run/checkpoints/*/model.safetensors'))
        weights = load_file(last)
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].contiguous().view(torch.uint8).numpy().tobytes(), crc)
    def exact(key): return [float(r[key]).hex() for r in rows if key in r]
    return dict(loss=exact('loss'), val_loss=exact('val_loss'), weights=f'{crc:08x}')


def trainings():
    "What is trained: {name: configuration}"
    tiny = preset('elleci-tiny', steps=50, val_every=50, save_every=50)
    layer_major = dataclasses.replace(tiny.train, engine='layer-major', clip_by='layer')
    short = dataclasses.replace(tiny.train, steps=5, val_every=5, save_every=5)
    runs = {
        'grad accum, 50 steps': tiny,
        'layer-major, 50 steps': dataclasses.replace(tiny, train=layer_major),
    }
    for pattern in PATTERNS:
        model = dataclasses.replace(tiny.model, pattern=pattern)
        runs[f'{pattern}, 5 steps'] = dataclasses.replace(tiny, model=model, train=short)
    return runs


def accounts():
    "The account of every preset, as `elleci_memory --json` gives it"
    given = {name: preset(name) for name in PRESETS}
    return {name: as_dict(account(c.model, c.train, name=name), None) for name, c in given.items()}


def renamed(
    old,      # what an older file holds: an object, a list, or a value
    names,    # the map in data/results/renamed-keys.json
    parent='', # the key under which `old` stands
):
    "The same with the names that are in use now, keys in the same order"
    if isinstance(old, dict):
        new_keys = names['keys'].get(parent, {})
        return {new_keys.get(key, key): renamed(value, names, key) for key, value in old.items()}
    if isinstance(old, list):
        return [renamed(value, names, parent) for value in old]
    return names['values'].get(parent, {}).get(old, old) if isinstance(old, str) else old


def known_then(
    before, # the account of a preset, from an older file
    now,    # the same, now
):
    "The account without the settings that are newer than the file"
    return now | {
        part: {key: value for key, value in now.get(part, {}).items() if key in before[part]}
        for part in ('model', 'train')
    }


def differences(old, new, path=''):
    "Where two results differ: in a value, or in the order of their keys"
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new) and sorted(old) == sorted(new):
            yield f'{path}: keys in another order, {list(old)} before, {list(new)} now'
        for key in {**old, **new}: yield from differences(old.get(key), new.get(key), f'{path}/{key}')
    elif old != new:
        yield f'{path}: {str(old)[:120]} before, {str(new)[:120]} now'


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--against', help='a file that this script wrote')
    p.add_argument('--accounts', action='store_true', help='only the accounts, no training')
    p.add_argument('--out', help='where to write (default: data/results)')
    a = p.parse_args()
    torch.set_num_threads(1)
    seeded = {} if a.accounts else dict(trainings={name: trained(c) for name, c in trainings().items()})
    seeded['accounts'] = accounts()
    seeded = json.loads(json.dumps(seeded))
    if a.against:
        before = json.loads(Path(a.against).read_text())['seeded']
        before = {part: before[part] for part in seeded}
        names = json.loads(RENAMED.read_text())
        before['accounts'] = {name: renamed(row, names) for name, row in before['accounts'].items()}
        seeded['accounts'] = {name: known_then(row, seeded['accounts'].get(name, {}))
                              for name, row in before['accounts'].items()}
        found = list(differences(before, seeded))
        # The words above name the place; the text itself decides.
        if not found and json.dumps(before, indent=1) != json.dumps(seeded, indent=1):
            found = ['the JSON texts differ']
        print('\n'.join(found) or 'the same to the last bit')
        return bool(found)
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), date=now, seeded=seeded)
    path = Path(a.out) if a.out else ROOT/'data'/'results'/f"seeded-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(f'written to {path}')
    return 0


if __name__ == '__main__': sys.exit(main())
