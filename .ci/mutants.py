"""What the checks are worth: each plausible mistake of .ci/mutants.toml is planted in a copy, in the exported
cell of its notebook and in the module, and the checks that run its module are made until one of them fails.

    python .ci/mutants.py --reach                which lines each notebook runs (needs `coverage`), once
    python .ci/mutants.py                        all mutants; data/results/mutants-<commit>.json
    python .ci/mutants.py --resume               goes on where that was ended
    python .ci/mutants.py --only NAME …          some of them, and what was said
    python .ci/mutants.py --file MINE.toml       another list, and what was said

Two rounds: the cells that `make test` runs, and its pins; then, for what survives, the cells that only
`make test-long` runs.
"""
import argparse, atexit, datetime, json, os, re, shutil, subprocess, sys, tempfile, threading, tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from imports import exported
from notebook import PRELOADED, ROOT, cells_of, environment, is_left_out, ready, run_notebook

MUTANTS = ROOT/'.ci'/'mutants.toml'
REACH = ROOT/'.venv'/'reach.json'
ROWS = ROOT/'.venv'/'mutants.jsonl'
WORKERS = 2
QUICK = 12
ORDER = 'names', 'flags', 'closed_forms', 'accounts', 'plans', 'shards', 'seeded'

def notebooks(root=ROOT):
    return [p for p in sorted((root/'nbs').rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts]

def name_of(path, root=ROOT): return str(path.relative_to(root/'nbs'))

def read_mutants(file=MUTANTS): return tomllib.loads(file.read_text(encoding='utf-8'))['mutant']

def module_path(mutant, root=ROOT): return root/'elleci'/f"{mutant['module'].replace('.', '/')}.py"

def sources():
    "{module: [notebook whose cells are exported to it, …]}"
    found = {}
    for path in notebooks():
        for module in exported(json.loads(path.read_text(encoding='utf-8'))['cells']):
            found.setdefault(module.removeprefix('elleci.'), []).append(name_of(path))
    return found

def places(mutant, files, root=ROOT):
    "(notebook, number of the cell) where the mutant's line stands in an exported cell"
    for name in files.get(mutant['module'], []):
        for i, cell in enumerate(cells_of(root/'nbs'/name)):
            export = re.search(r'^#\|\s*export\w*[ \t]*([\w.]*)', cell['source'], re.M)
            if export and mutant['find'] in cell['source']: yield name, i

def problems(mutants):
    "Mutants that cannot be planted, each in a line"
    files = sources()
    for m in mutants:
        module, found = module_path(m), list(places(m, files))
        n = module.read_text(encoding='utf-8').count(m['find']) if module.exists() else 0
        if n == 1 and len(found) == 1: continue
        yield f"{m['name']}: its line stands {n} times in {m['module']}, in {len(found)} cells"

class Copy:
    "A copy of the tree, in which one mutant at a time is planted"
    def __init__(self):
        # below the tree, so that a notebook finds what lies beside it
        self.root = Path(tempfile.mkdtemp(dir=ROOT/'.venv', prefix='mutant-'))
        atexit.register(shutil.rmtree, self.root, ignore_errors=True)
        listed = ['git', 'ls-files', '-co', '--exclude-standard', '-z']
        names = subprocess.check_output(listed, cwd=ROOT, text=True).split('\0')
        for name in filter(None, names):
            if not (ROOT/name).is_file(): continue
            (self.root/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT/name, self.root/name)

    def plant(self, mutant, files):
        "Returns what takes it out again"
        module = module_path(mutant, self.root)
        [(name, i)] = places(mutant, files, self.root)
        path = self.root/'nbs'/name
        before = {p: p.read_bytes() for p in (module, path)}
        planted = before[module].decode().replace(mutant['find'], mutant['replace'])
        module.write_text(planted, encoding='utf-8')
        cells = json.loads(before[path])
        cell = cells['cells'][i]
        cell['source'] = ''.join(cell['source']).replace(mutant['find'], mutant['replace'])
        path.write_text(json.dumps(cells, indent=1, ensure_ascii=False), encoding='utf-8')
        return before

def measure_reach():
    "{notebook: {seconds, lines: {module: [line, …]}}}, kept in .venv/reach.json"
    ready([*PRELOADED, 'coverage'])
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        (folder/'site').mkdir()
        (folder/'site'/'sitecustomize.py').write_text('import coverage\ncoverage.process_startup()\n')
        lines = '[run]', f'source = {ROOT}/elleci', 'parallel = true', 'sigterm = true'
        (folder/'rc').write_text('\n'.join([*lines, 'concurrency = thread,multiprocessing']))
        found = {}
        def one(path):
            name = name_of(path)
            file = folder/name.replace('/', '+')
            ran = run_notebook(path, flags={'gpu'}, cover=str(file))
            found[name] = dict(seconds=ran.seconds, error=ran.error, lines=lines_of(folder, file.name))
            print(f'{ran.seconds:6.1f} s  {name} {ran.error}', flush=True)
        with ThreadPoolExecutor(WORKERS) as pool: list(pool.map(one, notebooks()[::-1]))
    REACH.write_text(json.dumps(found))

def lines_of(folder, prefix):
    import coverage
    lines = {}
    for file in folder.glob(f'{prefix}.*'):
        data = coverage.CoverageData(str(file))
        data.read()
        for source in data.measured_files():
            module = str(Path(source).relative_to(ROOT/'elleci'))[:-3].replace('/', '.')
            lines.setdefault(module, set()).update(data.lines(source))
    return {module: sorted(found) for module, found in lines.items() if found}

def order_of(mutant, reach, files):
    "The notebooks that run a mutant's module, those that are likely to notice it first"
    text = module_path(mutant).read_text(encoding='utf-8')
    first = text[:text.index(mutant['find'])].count('\n') + 1
    at = set(range(first, first + mutant['find'].count('\n') + 1))
    # A line within a statement of several lines counts where any line near it does.
    own = next(places(mutant, files))[0]
    number = Path(own).name.split('_')[0]
    lines = {n: set(r['lines'].get(mutant['module'], ())) for n, r in reach.items()}
    def how_likely(name):
        same = Path(name).name.split('_')[0] == number
        # What runs in a forked process isn't seen, so those that run the module at all come last.
        near = 0 if name == own else 1 if same else 2 if at & lines[name] else 3
        return near, not name.startswith('tests'), reach[name]['seconds']
    return sorted((n for n in lines if lines[n] or n == own), key=how_likely)

def try_pins(copy, names=ORDER):
    "The first pin that differs, and what was said"
    for name in names:
        command = [sys.executable, '-W', 'ignore', copy.root/'.ci'/'pins.py', '--sample', name]
        env = environment() | dict(PYTHONPATH=str(copy.root), TRITON_INTERPRET='0')
        try: p = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=copy.root)
        except subprocess.TimeoutExpired: return f'pins: {name}', 'no end'
        if p.returncode: return f'pins: {name}', (p.stdout + p.stderr)[-600:]
    return None, ''

def try_notebooks(copy, names, flags, reach):
    "(the first notebook that fails and its cell, what it says, the seconds of all)"
    seconds = 0.
    for name in names:
        within = (max(30., 6*reach[name]['seconds']), 90, 900)
        ran = run_notebook(copy.root/'nbs'/name, copy.root, flags=flags, within=within)
        seconds += ran.seconds
        if ran.error:
            cell = re.search(r'cell (\d+)', ran.error)
            return f'{name}, cell {cell[1]}' if cell else name, ran.error, seconds
    return None, '', seconds

def is_slow(cell): return is_left_out(cell, {'slow'}) and not is_left_out(cell, ())

def judge(copy, mutant, reach, files, quick=False):
    "Which check notices a mutant: a row of the matrix"
    names = order_of(mutant, reach, files)[:QUICK if quick else None]
    before = copy.plant(mutant, files)
    try:
        killer, said, seconds = try_notebooks(copy, names, {'gpu', 'slow'}, reach)
        by = 'make test'
        if not killer and not quick: killer, said = try_pins(copy)
        if not killer and not quick:
            by = 'make test-long'
            slow = [n for n in names if any(map(is_slow, cells_of(ROOT/'nbs'/n)))]
            killer, said, more = try_notebooks(copy, slow, {'gpu'}, reach)
            seconds += more
    finally:
        for path, content in before.items(): path.write_bytes(content)
    row = {k: mutant[k] for k in ('name', 'module', 'why', 'survives') if k in mutant}
    return row | dict(killed_by=killer, by=by if killer else None, seconds=round(seconds, 1)), said

def write_record(rows):
    "Keep the matrix in data/results"
    def git(*args): return subprocess.check_output(['git', *args], cwd=ROOT, text=True).strip()
    dirty = '-dirty' if git('status', '--porcelain', '--', '.', ':!data/results') else ''
    [cpu, *_] = re.findall(r'^model name\s*: (.*)', Path('/proc/cpuinfo').read_text(), re.M) or ['unknown']
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    hardware = f'{os.cpu_count()} CPU cores ({cpu})'
    commit = git('rev-parse', '--short=12', 'HEAD') + dirty
    record = dict(commit=commit, hardware=hardware, date=now, rows=rows)
    path = ROOT/'data'/'results'/f"mutants-{record['commit']}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')

def summary(rows):
    "How many each of the two commands notices, and what neither does"
    killed = [sum(r['by'] == by for r in rows) for by in ('make test', 'make test-long')]
    alive = [r for r in rows if not r['killed_by']]
    lines = [f"  {r['name']}: {r.get('survives') or r['why']}" for r in alive]
    first = f'{len(rows)} mutants: make test notices {killed[0]}, make test-long {killed[1]} more'
    return '\n'.join([first, *lines])

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--reach', action='store_true')
    p.add_argument('--resume', action='store_true')
    p.add_argument('--only', nargs='+')
    p.add_argument('--file', type=Path, default=MUTANTS)
    p.add_argument('--quick', action='store_true', help=f'the {QUICK} likeliest notebooks alone')
    a = p.parse_args()
    if a.reach: return measure_reach()
    mutants = [m for m in read_mutants(a.file) if not a.only or m['name'] in a.only]
    if lost := list(problems(mutants)): return '\n'.join(lost)
    whole = not a.only and a.file == MUTANTS
    rows = [json.loads(l) for l in ROWS.read_text().splitlines()] if a.resume and ROWS.exists() else []
    if whole and not a.resume: ROWS.unlink(missing_ok=True)
    known = {m['name'] for m in mutants}
    rows = [r for r in rows if r['name'] in known]
    left = [m for m in mutants if m['name'] not in {r['name'] for r in rows}]
    reach, files = json.loads(REACH.read_text()), sources()
    ready(PRELOADED)    # nothing of ours: each has a package of its own
    copies, lock = [Copy() for _ in range(WORKERS)], threading.Lock()
    def one(mutant):
        with lock: copy = copies.pop()
        row, said = judge(copy, mutant, reach, files, a.quick)
        with lock:
            copies.append(copy)
            rows.append(row)
            print(f"{row['name']:40} {row['seconds']:6.1f} s  {row['killed_by'] or 'SURVIVES'}", flush=True)
            if not whole: return print(said[-1500:])
            with open(ROWS, 'a') as f: f.write(json.dumps(row) + '\n')
    with ThreadPoolExecutor(WORKERS) as pool: list(pool.map(one, left))
    print(summary(rows))
    order = [m['name'] for m in mutants]
    if whole and not a.quick: write_record(sorted(rows, key=lambda r: order.index(r['name'])))

if __name__ == '__main__': sys.exit(main())
