"""What all benchmarks share: a command line, subjects that take turns, and a record of what was found.

    python benchmarks/cpu.py cpu_scan --repeats 3    one benchmark of a file; without a name: which there are
    python benchmarks/cpu.py cpu_scan --dry          tiny sizes, and nothing is kept

A benchmark is a generator whose name is the kind of its record, and whose parameters are its flags. It yields
a dictionary; `main` adds hardware, commit, date and torch's version, and writes it to
data/results/KIND-<commit>.json, again after each `yield`, so that what a crash interrupts is kept.
"""
import argparse, datetime, inspect, json, platform, statistics, subprocess, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

def git(*args):
    try: return subprocess.run(['git', *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError: return ''

def commit():
    "Of the code that runs ('' where there is no git); a result changes nothing that is measured"
    dirty = git('status', '--porcelain', '--', '.', ':!data/results')
    return git('rev-parse', '--short=12', 'HEAD') + ('-dirty' if dirty else '')

def hardware():
    import torch
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    cpuinfo = Path('/proc/cpuinfo')
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(':')[1].strip() for line in lines if line.startswith('model name')]
    return f'{torch.get_num_threads()} CPU cores ({names[0] if names else platform.machine()})'

def record_path(kind): return ROOT/'data'/'results'/f'{kind}-{commit()}.json'

def begun(kind):
    "The record of this commit, where a run was interrupted; {} elsewhere"
    path = record_path(kind)
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}

def in_turn(subjects, rounds):
    "{name: seconds of each round} of functions that run in turn, so that all see the same machine"
    seconds = {name: [] for name in subjects}
    for i in range(rounds + 1):
        for name, f in subjects.items():
            began = time.perf_counter()
            f()
            if i: seconds[name].append(round(time.perf_counter() - began, 5))    # the first round warms up
    return seconds

def median_ratio(a, b, digits=3):
    "The median over rounds of how many times as long `a` took as `b`"
    return round(statistics.median(x/y for x, y in zip(a, b)), digits)

def parser_of(benchmarks):
    "A command for each benchmark, a flag for each of its parameters"
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest='kind', required=True)
    for f in benchmarks:
        help_text = ' '.join(inspect.getdoc(f).split()).replace('%', '%%')
        command = commands.add_parser(f.__name__, help=help_text, description=help_text)
        for name, p in inspect.signature(f).parameters.items():
            flag, default = f'--{name.replace("_", "-")}', p.default
            if isinstance(default, bool): command.add_argument(flag, action='store_true')
            elif isinstance(default, tuple): command.add_argument(flag, nargs='+', default=default)
            else: command.add_argument(flag, type=type(default), default=default)
        if 'dry' not in inspect.signature(f).parameters: command.add_argument('--dry', action='store_true')
    return parser

def main(*benchmarks):
    "Run the benchmark that the command line names, and keep what it finds"
    from elleci.core import atomic_write
    import torch
    settings = vars(parser_of(benchmarks).parse_args())
    kind = settings.pop('kind')
    f = next(f for f in benchmarks if f.__name__ == kind)
    dry = settings['dry'] if 'dry' in inspect.signature(f).parameters else settings.pop('dry')
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    stamp = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), date=now)
    path = record_path(kind)
    for found in f(**settings):
        if not dry: atomic_write(path, json.dumps(found | stamp, indent=1, ensure_ascii=False) + '\n')
    print(json.dumps(found)[:2000] if dry else f'written to {path.relative_to(ROOT)}')
