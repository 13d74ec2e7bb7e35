"""What the set-up takes: the disk of `make train`'s environment and of `make test`'s, in a fresh clone of the
last commit, and with --test the minutes of `make test` itself: data/results/set_up-<commit>.json.

    python benchmarks/set_up.py [--test] [--folder EMPTY_FOLDER]
    python benchmarks/set_up.py --only-test     `make test` in this folder, and no disk

Everything is installed anew, so the first form needs the network, or pip's cache, and minutes. The test
wants a machine that does nothing else.
"""
import argparse, datetime, json, os, subprocess, sys, tempfile, time
from pathlib import Path
import torch
from elleci.core import atomic_write
from tiny import ROOT, commit, hardware


def make(folder, target):
    "Run `make` in a clone, with the Python that runs this script's environment"
    base = Path(sys.executable).resolve()
    subprocess.run(['make', f'PYTHON={base}', target], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def disk_bytes(folder):
    "Bytes of the files in a folder; what is linked twice counts once"
    seen = {}
    for path in Path(folder).rglob('*'):
        if path.is_file() and not path.is_symlink():
            stat = path.stat()
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())


def packages(venv):
    "The largest packages of an environment, in bytes"
    [site] = Path(venv).glob('lib/python3*/site-packages')
    sizes = {p.name: disk_bytes(p) for p in site.iterdir() if p.is_dir() and p.suffix != '.dist-info'}
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:8])


def timed_test(folder):
    "`make test`: minutes by the clock, its last line, and how busy the machine was before it"
    load = os.getloadavg()[0]
    start_time = time.time()
    done = subprocess.run(['.ci/run'], cwd=folder, stdout=subprocess.PIPE, text=True)
    minutes = (time.time() - start_time)/60
    return dict(minutes=round(minutes, 1), verdict=done.stdout.splitlines()[-1], load_before=round(load, 2))


def measure_disk(clone):
    "Each stage's bytes, in a clone that has no environment yet"
    stages = {}
    for stage, target in (('make train', '.venv/run'), ('make test', '.venv/dev')):
        make(clone, target)
        stages[stage] = dict(bytes=disk_bytes(clone/'.venv'), packages=packages(clone/'.venv'))
        print(stage, f"{stages[stage]['bytes']/1e9:.2f} GB", flush=True)
    return stages


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--test', action='store_true', help='run `make test` too')
    parser.add_argument('--only-test', action='store_true', help='run `make test` here, and nothing else')
    parser.add_argument('--folder', help='where to clone; a temporary folder by default')
    args = parser.parse_args()
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        python=sys.version.split()[0],
        commit=commit(),
        date=f'{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC',
    )
    if args.only_test:
        result['test'] = timed_test(ROOT)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            clone = Path(args.folder or tmp)/'elleci'
            subprocess.run(['git', 'clone', '-q', str(ROOT), str(clone)], check=True)
            result |= dict(clone_bytes=disk_bytes(clone), stages=measure_disk(clone))
            if args.test: result['test'] = timed_test(clone)
    path = ROOT/'data'/'results'/f"set_up-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(path)


if __name__ == '__main__': main()
