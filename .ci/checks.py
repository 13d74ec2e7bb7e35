"Every check of this repository, on the working tree; the last line is `N passed, N failed`."
import atexit, functools, hashlib, importlib.metadata, json, os, re
import shutil, signal, subprocess, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from packaging.requirements import Requirement
from packaging.version import Version
import clocks
from budgets import check_budgets  # noqa: F401
from course import check_course  # noqa: F401
from imports import all_imports, check_imports, lessons, targets  # noqa: F401
from lines import check_lines  # noqa: F401
from mutants import problems, read_mutants
from notebook import LONG, ROOT, Patience, environment, ready, run_notebook

BIN = Path(sys.executable).parent
# Each has one thread (two OpenMP teams on two cores spin against each other), and waits an eighth of its
# time, for disks and for processes that it has started: one more than there are cores keeps them busy.
WORKERS = min(3, (os.cpu_count() or 1) + 1)

def run(*cmd, cwd=ROOT, timeout=3600, env=None):
    "Output of a command; raises with its last lines if it fails. The timeout is for hangs, not for slowness"
    full = {**environment(), **(env or {})}
    p = subprocess.Popen(
        [str(c) for c in cmd],
        cwd=cwd,
        env=full,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try: out, _ = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired: raise AssertionError(f'no end after {timeout} s')
    finally:
        if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)      # with all that it has started
    assert p.returncode == 0, '\n'.join(out.splitlines()[-40:])
    return out

def notebooks():
    return sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
def cells(path):
    return [
        (c['cell_type'], ''.join(c['source']), c.get('outputs', []))
        for c in json.loads(path.read_text(encoding='utf-8'))['cells']
    ]
def python_of(source): return '\n'.join('' if re.match(r'\s*[%!]', l) else l for l in source.split('\n'))

# what is compiled once is compiled: a minute for the first time, seconds later
CACHE = {'TRITON_CACHE_DIR': str(ROOT/'.venv'/'triton')}
# For 8.6, 8.9 and 9.0 every kernel is compiled, as the recipe launches it. Other dtypes and a wide state are
# left to `make test-long`; and for 8.6 and 9.0 what a kernel is launched for a second time, with a flag or a
# size of another kind, which is compiled for the recipe's card, 8.9.
RARE = r'N 128|one document|^(?!.*bfloat16).*(float32|float16|fp32)'
AGAIN = (
    r'd_ff|again|8 rows|in place|loss alone|smoothing|lion8 .*gradient bfloat16|conv_silu bfloat16'
)
# The newest cards, 10.0 and 12.0, get a sample, and everything in `make test-long`. So does 8.0, which has
# the instructions of 8.6 and more shared memory: what compiles there compiles here.
SAMPLE = (
    r'^(rms_norm bfloat16|conv_silu bfloat16|gated_rms_norm bfloat16|lion8 bfloat16, gradient float32'
    r'|cross_entropy gradient bfloat16|product bfloat16, 8 rows|decode, N 16, bf16|eigenstate bfloat16)$'
)
# Bytes of local memory per thread that the scan's backward pass may need there: it has 255 registers in use.
MAX_STACK_ON_NEW = 64
# What Triton does not compile for 7.5, which is why `elleci.core.capability_problem` refuses such cards.
REFUSED = r'^product bfloat16, 8 rows$'
COMPILE = '''import importlib, json, re, sys
from unittest import mock
from elleci.kernels.triton_compat import CompileReport, MAX_SHARED_MEMORY, NEW_CAPABILITIES
from elleci.kernels.triton_compat import _compile_all, triton
rare, again, sample, refused, *names = sys.argv[1:]
def wanted(launch, capability):
    if capability == 75: return re.search(refused, launch)
    if capability in (80, *NEW_CAPABILITIES): return re.search(sample, launch)
    left_out = rare if capability == 89 else f'{rare}|{again}'
    return not rare or not re.search(left_out, launch)
def compiled(name, capability):
    module = importlib.import_module(name)
    launches = [l for l in module.launches() if wanted(l[0], capability)]
    with mock.patch.object(module, 'launches', lambda: launches): return _compile_all([name], [capability])
for name in names:
    if triton is None: print('no Triton'); continue
    report = CompileReport(row for capability in MAX_SHARED_MEMORY for row in compiled(name, capability))
    print(json.dumps([name, repr(report), report]))'''
def check_kernels():
    "Every kernel compiles for sm_80 to sm_120, and for sm_75 not; at the recipe's shapes none is slow"
    found = [
        p
        for p in sorted((ROOT / 'elleci' / 'kernels').glob('*.py'))
        if re.search(r'^def launches\(', p.read_text(encoding='utf-8'), re.M)
    ]
    assert len(found) >= 2, found
    env = {**CACHE, 'OMP_NUM_THREADS': '1', 'TRITON_INTERPRET': '0'}
    which = ('', '', '') if LONG else (RARE, AGAIN, SAMPLE)
    names = [f'elleci.kernels.{p.stem}' for p in found]
    said = run(
        sys.executable, '-W', 'ignore', '-c', COMPILE, *which, REFUSED, *names, env=env
    ).splitlines()
    if said[-1] == 'no Triton': return print('     skipped: without Triton no kernel is compiled', flush=True)
    # The compiler says at length what it cannot compile for 7.5.
    tables = [json.loads(line) for line in said if line.startswith('["elleci.kernels.')]
    assert len(tables) == len(found), said[-20:]
    # a row: launch, kernel, capability, registers, shared, stack, problem
    for path, (module, table, rows) in zip(found, tables):
        print(f'{module}\n{table}', flush=True)
        refused = {r[1] for r in rows if r[2] == 75}
        assert refused <= {''}, f'{refused} is compiled for 7.5 now: does it still have to be refused?'
        rows = [r for r in rows if r[2] != 75]
        # the scan is compiled for wide states and fp32 too
        recipe = [r for r in rows if not module.endswith('.ssd') or 'N 16, bf16' in r[0]]
        launched = set(re.findall(r'(\w+_kernel)\[', path.read_text(encoding='utf-8')))
        assert launched, f'{module} launches nothing'
        for kernel in launched | {r[1] for r in rows if r[1]}:
            cards = {r[2] for r in rows if r[1] == kernel}
            assert cards >= {86, 89, 90}, f'{module}: {kernel} is compiled for {cards} alone'
        assert {r[2] for r in rows} == {80, 86, 89, 90, 100, 120}, f'{module}: not compiled for every card'
        assert {r[2] for r in recipe} >= {80, 86, 89, 90}, f'{module}: nothing at the shapes of the recipe'
        bad = [
            f'{r[0]}, sm {r[2]}, {r[1] or "not compiled"}: {r[6]}'
            for r in rows
            if not r[1] or r in recipe and r[5] > (MAX_STACK_ON_NEW if r[2] >= 100 else 0)
        ]
        assert not bad, '\n'.join(bad)

@functools.cache
def make_snapshot():
    "What `snapshot` copies, made once"
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in run('git', 'ls-files', '-co', '--exclude-standard', '-z').split('\0'):
        if name and (ROOT/name).is_file():
            (folder/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT/name, folder/name)
    git = ('git', '-c', 'user.name=check', '-c', 'user.email=check@localhost')
    run('git', 'init', '-q', cwd=folder)
    run('git', 'add', '-A', cwd=folder)
    run(*git, 'commit', '-qm', 'snapshot', cwd=folder)
    return folder

SNAPSHOT = threading.Lock()
def snapshot(folder):
    "A git repository of its own with every file that is tracked or would be"
    with SNAPSHOT: made = make_snapshot()
    shutil.copytree(made, folder, dirs_exist_ok=True)

def unchanged(folder, what):
    status = run('git', 'status', '--porcelain', '--untracked-files=all', cwd=folder)
    assert not status, f'{what} changes:\n{status}'

def check_clean_and_export():
    "nbdev_clean leaves no change; elleci/ deleted and exported again is the same, untracked files included"
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        snapshot(folder)
        run('nbdev_clean', cwd=folder)
        unchanged(folder, 'nbdev_clean')
        shutil.rmtree(folder/'elleci')
        run('nbdev_export', cwd=folder)
        unchanged(folder, 'nbdev_export')

def check_pins():
    "Seeded losses, accounts, plans, shards, flags and names are those of data/pins"
    sample = [] if LONG else ['--sample']
    print(run(sys.executable, '-W', 'ignore', '.ci/pins.py', *sample).strip(), flush=True)

def check_mutants():
    "Each mutant of .ci/mutants.toml can still be planted"
    lost = list(problems(read_mutants()))
    assert not lost, '\n'.join(lost)

def check_readme():
    "README.md is what nbs/index.ipynb says"
    run(sys.executable, '.ci/readme.py', '--check')

def relative_links(prose):
    "What the links of a text in Markdown lead to, where they stay in the repository"
    prose = re.sub(r'`[^`]*`', '', re.sub(r'^(~~~|```).*?^\1', '', prose, flags=re.M | re.S))
    found = re.findall(r'\]\(([^)\s]+)\)', prose)
    return [link.split('#')[0] for link in found if not re.match(r'[a-z]+:|#', link)]

def check_links():
    "Every relative link in a notebook, in the README and in CONTRIBUTING.md leads to a file"
    assert relative_links('[a](b.ipynb), [c](https://d), `x[i](y)`, ![e](f.png)') == ['b.ipynb', 'f.png']
    prose = [(p, s) for p in notebooks() for kind, s, _ in cells(p) if kind == 'markdown']
    prose += [(p, p.read_text(encoding='utf-8')) for p in (ROOT/'README.md', ROOT/'CONTRIBUTING.md')]
    lost = [f'{p.relative_to(ROOT)}: {link}' for p, s in prose for link in relative_links(s)
            if not (p.parent/link).exists()]
    assert not lost, '\n'.join(['these lead nowhere:', *lost])

def check_names():
    "No undefined or unused name in package, scripts and notebooks (where versions of a function may follow)"
    places = 'elleci', 'benchmarks', 'scripts', '.ci', 'setup.py'
    run('ruff', 'check', '-q', '--no-cache', '--select', 'F,E9', *places)
    run('ruff', 'check', '-q', '--no-cache', '--select', 'F,E9', '--ignore', 'F811', 'nbs')

def check_advice():
    "A message that says how to install something comes from `pip_install`, with environment and version"
    found = [
        f'{p.relative_to(ROOT)}:{i}'
        for p in sorted((ROOT / 'elleci').rglob('*.py'))
        for i, l in enumerate(p.read_text(encoding='utf-8').splitlines(), 1)
        if re.search(r'\bpip install ', l)
    ]
    assert len(found) == 1 and found[0].startswith('elleci/basics.py:'), found

ALONE = '''
import importlib.metadata as md, re, sys
def needs(name, seen):
    if name in seen: return seen
    seen.add(name)
    for r in md.requires(name) or ():
        if 'extra ==' in r or re.match(r'triton|nvidia|cuda', r) or not installed(r): continue
        needs(re.match(r'[\\w.-]+', r)[0].lower().replace('_', '-'), seen)
    return seen
def installed(r):
    try: md.distribution(re.match(r'[\\w.-]+', r)[0]); return True
    except md.PackageNotFoundError: return False
have = needs('torch', set()) | needs('numpy', set())
norm = lambda d: d.lower().replace('_', '-')
allowed = {m for m, dists in md.packages_distributions().items() if any(norm(d) in have for d in dists)}
allowed |= {*sys.stdlib_module_names, 'elleci'}
# Nothing else is found, by `import` or by a library that asks whether it is there.
class Allowed:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        ours = name.startswith(('__editable__', '_sysconfigdata'))
        if not ours and name.split('.')[0] not in allowed: return None
        return self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Allowed, sys.meta_path)
import importlib
for gone in ('tqdm', 'tokenizers', 'matplotlib', 'lion_pytorch', 'triton', 'mamba_ssm', 'einops', 'IPython'):
    try: importlib.import_module(gone)
    except ImportError: pass
    else: sys.exit(f'the check is broken: {gone} can be imported')
# Imported once: with `each` every module then has a process that knows nothing else, else all share one.
import os, torch, traceback
failed, each = [], sys.argv[1] == 'each'
for name in sys.argv[2:]:
    if each and (child := os.fork()):
        if os.waitpid(child, 0)[1]: failed.append(name)
        continue
    try: importlib.import_module(name)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if each: os._exit(1)
        failed.append(name)
    if each: os._exit(0)
if failed: sys.exit(f'not importable with torch and numpy alone: {failed}')
'''
def modules():
    return sorted(
        '.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
        for p in (ROOT / 'elleci').rglob('*.py')
        if p.name != '_modidx.py'
    )
def check_alone():
    "Every module imports in a process that can import nothing but torch, numpy and what they need"
    # `check_imports` knows that no module needs one above it. In a process of its own each comes with
    # `make test-long`, which also finds what only works because another module was imported before.
    how = 'each' if LONG else 'together'
    run(sys.executable, '-c', ALONE, how, *modules(), cwd=tempfile.gettempdir())

PLANTED = [
    "began = time.perf_counter(); f(); took = time.perf_counter() - began; assert took < 5",
    "def ms(f):\n    t = time.monotonic(); f()\n    return time.monotonic() - t\nassert slow < 3*ms(f)",
    "times = []\nfor f in fs: t = perf_counter(); f(); times.append(perf_counter() - t)\nassert max(times) "
    "< 1",
    "process.communicate(timeout=90)",
    "thread.join(10)",
    "limit = time.time() + 60",
]
HARMLESS = [
    "began = time.time(); print(time.time() - began); assert x < 5",
    "', '.join(names); process.communicate(timeout=900)",
    "took = time.time() - began; assert took > 0",
    "t = time.monotonic(); f()\nwhile not done(): assert time.monotonic() - t < 600",
]
def check_clocks():
    "No assertion depends on how long something took, and no wait gives up early: planted ones are found"
    for planted in PLANTED: assert list(clocks.found([planted])), planted
    for harmless in HARMLESS: assert not list(clocks.found([harmless])), harmless
    bad = []
    for p in notebooks():
        own = [
            python_of(s)
            for kind, s, _ in cells(p)
            if kind == 'code' and not re.search(r'^#\| export', s, re.M)
        ]
        bad += [f'{p.relative_to(ROOT)}: {what}' for what in clocks.found(own)]
    assert not bad, '\n'.join(['a busy machine would fail these:', *bad])

class Loop:
    "A process group that computes, sleeps or ends"
    def __init__(self, code): self.code = code
    def __enter__(self):
        self.p = subprocess.Popen([sys.executable, '-c', self.code], start_new_session=True)
        return self.p
    def __exit__(self, *_):
        os.killpg(self.p.pid, signal.SIGKILL)
        self.p.wait()

def ended(patience):
    "What ends a wait"
    while True:
        try: patience()
        except AssertionError as e: return str(e)
        time.sleep(.05)

def check_patience():
    "What computes for ever is ended by its CPU time, its children's included, and what sleeps by its silence"
    busy = 'import os\nos.fork()\nwhile True: pass'
    with Loop(busy) as p: assert 'of CPU time' in ended(Patience(p.pid, 2, 3600, 3600))
    with Loop('import time; time.sleep(3600)') as p:
        assert 'nothing was computed' in ended(Patience(p.pid, 3600, 1, 3600))
    cells = [dict(cell_type='code', source=s, metadata={}, outputs=[]) for s in ('1', 'while True: pass')]
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp)/'hangs.ipynb'
        path.write_text(json.dumps(dict(cells=cells)))
        assert 'in cell 1: no end' in (why := run_notebook(path, within=(2, 3600, 3600)).error), why

def check_lock():
    "constraints.txt holds the version of every package that is installed, and nothing of the machine"
    lines = [
        l
        for l in (ROOT / 'constraints.txt').read_text(encoding='utf-8').splitlines()
        if l and not l.startswith('#')
    ]
    assert lines[0].startswith('torch=='), f'{lines[0]} is first, and not torch'
    for l in lines:
        assert re.fullmatch(r"[a-z0-9._-]+==[\w.!-]+( ; python_full_version (<|>=) '[\d.]+')?", l), (
            f'constraints.txt: {l}'
        )
    pinned = {re.match(r'[a-z0-9._-]+', l)[0] for l in lines}
    free = sorted(
        n
        for n in installed_by('elleci', {'dev', 'notebook', 'data', 'gpu'}) - pinned
        if not re.match(r'elleci$|pip$|nvidia-|cuda-', n)
    )
    assert not free, f'{free} are not in constraints.txt: run `make lock`'

def installed_by(name, extras, seen=None):
    "Names of the installed distributions that a distribution requires, directly or not"
    seen = set() if seen is None else seen
    if (name, *extras) in seen: return set()
    seen.add((name, *extras))
    try: wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError: return set()
    found = {name}
    for r in map(Requirement, wanted):
        if r.marker is None or any(r.marker.evaluate({'extra': e}) for e in {'', *extras}):
            found |= installed_by(r.name.lower().replace('_', '-').replace('.', '-'), r.extras, seen)
    return found

def check_outputs():
    "Committed outputs are light and speak of no particular machine"
    for p in notebooks():
        size = p.stat().st_size
        shown = sum(len(json.dumps(outputs)) for _, _, outputs in cells(p))
        assert shown <= 100*1024 and size <= 150*1024, f'{p.name}: {shown} bytes of outputs, {size} in all'
        kept = json.loads(p.read_text(encoding='utf-8'))['metadata']
        assert 'widgets' not in kept, f'{p.name} keeps the state of its widgets: delete it from its metadata'
        for _, _, outputs in cells(p):
            text = json.dumps([o for o in outputs if 'image/png' not in o.get('data', {})])
            found = re.search(r'/(root|home|tmp|work|Users|usr)/|widget-view|it/s\]|Traceback', text)
            assert not found, f'{p.name} shows {found[0]!r} in an output'

def check_readme_commands():
    "In a new terminal, each of README's blocks of shell commands finds its commands"
    readme = (ROOT/'README.md').read_text(encoding='utf-8')
    blocks = re.findall(r'^~~~bash\n(.*?)^~~~', readme, re.M | re.S)
    assert sum('elleci_' in b for b in blocks) >= 3, blocks
    # The block whose output README shows, and that output.
    pair = r'^~~~bash\n((?:(?!~~~).)*?)^~~~(?:(?!~~~).)*?^```text\n(elleci-1b5-12gib: .*?)^```'
    [(first, shown)] = re.findall(pair, readme, re.M | re.S)
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp)/'.venv').symlink_to(BIN.parent)
        for block in blocks:
            lines = [l for l in block.splitlines() if l.strip() and not l.startswith('#')]
            said = run(
                'bash',
                '-c',
                '\n'.join(l if l.startswith('source ') else f'command -v {l.split()[0]}' for l in lines),
                cwd=tmp,
                env={'PATH': PLAIN_PATH},
            )
            assert len(said.splitlines()) == sum(not l.startswith('source ') for l in lines), (
                f'not found after:\n{block}\n{said}'
            )
            if LONG and 'elleci_' in block:
                said = readme_block(block, tmp)
                assert block != first or shown.strip() in said, f'README shows another output of\n{block}'

PLAIN_PATH = os.pathsep.join(
    p for p in os.environ['PATH'].split(os.pathsep) if Path(p).resolve() != BIN.resolve()
)
def readme_block(block, folder):
    "What a block prints, run as it stands in a folder with the corpus and, if it's used, a trained model"
    shutil.copytree(ROOT/'data'/'corpus', Path(folder)/'data'/'corpus', dirs_exist_ok=True)
    env = {'PATH': PLAIN_PATH}
    if 'runs/elleci-tiny' in block and not (Path(folder)/'runs'/'elleci-tiny').exists():
        train = 'elleci_train --preset elleci-tiny --out runs/elleci-tiny --steps 20'
        run('bash', '-ec', f'source .venv/bin/activate\n{train}', cwd=folder, env=env)
    return run('bash', '-ec', block, cwd=folder, env=env)

# of the preset, what takes long and has nothing to do with where it is installed
SMALL = 'model.n_layers=2', 'model.pattern=MA', 'model.vocab_size=512', 'train.val_rows=2'
# without the English part, which is Python's own documentation: it is long, and not installed with us
INSTALLED_TEXTS = '[sources]\nitalian = "embedded:italian"\ninstructions = "embedded:instructions"\n'
def check_installed():
    "Installed, not editable, the package trains outside the repository"
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)/'source'
        folder.mkdir()
        snapshot(folder)
        run(
            sys.executable,
            '-m',
            'pip',
            'install',
            '-q',
            '--no-deps',
            '--no-build-isolation',
            '--target',
            Path(tmp) / 'site',
            folder,
        )
        code = (
            'import elleci, sys; assert elleci.__file__.startswith(sys.argv[1]), elleci.__file__; '
            "elleci.train(data='list.toml', steps=2, batch=1, seq=64, set=sys.argv[2:], out='run')"
        )
        (Path(tmp)/'list.toml').write_text(INSTALLED_TEXTS, encoding='utf-8')
        run(
            sys.executable,
            '-c',
            code,
            Path(tmp) / 'site',
            *SMALL,
            cwd=tmp,
            env={'PYTHONPATH': str(Path(tmp) / 'site'), 'OMP_NUM_THREADS': '1'},
        )
        assert list((Path(tmp)/'run'/'checkpoints').glob('*/model.safetensors'))
        for name in ('LICENSE', 'NOTICE'):
            assert list((Path(tmp)/'site').glob(f'elleci-*/**/{name}')), f'{name} is not installed'

# A script of the folder above, run where `site` is one of Python's folders for packages and this working tree
# is not installed
FROM_ABOVE = '''
import runpy, site, sys
packages, above, root = sys.argv[1:]
sys.path[:] = [above] + [p for p in sys.path[1:] if p != root]
site.addsitedir(packages)
runpy.run_path(above + '/script.py')
'''
def check_editable():
    "After `pip install -e .` of a clone named elleci, a script in the folder above it finds the package"
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)/'elleci'
        folder.mkdir()
        snapshot(folder)
        site = Path(tmp)/'site'
        run(
            sys.executable,
            '-m',
            'pip',
            'install',
            '-q',
            '--no-deps',
            '--no-build-isolation',
            '--use-pep517',
            '--target',
            site,
            '-e',
            folder,
        )
        (Path(tmp) / 'script.py').write_text(
            'import elleci.data.tokenizer, elleci.data.sources as s, elleci.files as f; print(s.__file__); '
            'print(f.installed_file("corpus"))'
        )
        said = run(sys.executable, '-c', FROM_ABOVE, site, tmp, ROOT, cwd=tmp, env={'PYTHONPATH': ''}).split(
            '\n'
        )
        assert said[:2] == [str(folder/'elleci'/'data'/'sources.py'), str(folder/'data'/'corpus')], said

# What JupyterLab's server does when somebody has opened, run and saved the notebooks of a folder
SAVE = '''
import asyncio, subprocess, sys
from pathlib import Path
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from traitlets.config import PyFileConfigLoader
root, edits = Path(sys.argv[1]), sys.argv[2]
config = PyFileConfigLoader('jupyter_server_config.py', str(root/'.ci')).load_config()
index = root/config.LabApp.default_url.removeprefix('/lab/tree/')
assert index.is_file(), f'JupyterLab would open {index}, which is not there'
async def main(edited):
    manager = AsyncLargeFileManager(config=config, root_dir=str(root/'nbs'))
    for path in sorted((root/'nbs').rglob(edited or '[!.]*.ipynb')):
        if '.ipynb_checkpoints' in path.parts: continue
        name = str(path.relative_to(root/'nbs'))
        notebook = (await manager.get(name))['content']
        notebook['metadata'] |= {'language_info': {'name': 'python', 'version': '3.99'}, 'widgets': {}}
        for cell in notebook['cells']:
            cell['metadata'] |= {'scrolled': True}
            if cell['cell_type'] != 'code': continue
            cell['execution_count'] = 7
            cell['outputs'] = [dict(output_type='stream', name='stdout', text='took 7.77 s' + chr(10))]
        if name == edited:
            code = [c for c in notebook['cells'] if c['cell_type'] == 'code']
            code[-1]['source'] += chr(10) + '# an edit'
        await manager.save(dict(type='notebook', format='json', content=notebook), name)
asyncio.run(main(''))
print(subprocess.check_output(['git', 'status', '--porcelain', '--untracked-files=all'], cwd=root, text=True))
asyncio.run(main(edits))
'''
def check_lab():
    "JupyterLab opens on the index; what it runs and saves is as committed, but for edited cells"
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)/'source'
        folder.mkdir()
        snapshot(folder)
        env = {
            k: str(Path(tmp) / k) for k in ('JUPYTER_DATA_DIR', 'JUPYTER_CONFIG_DIR', 'JUPYTER_RUNTIME_DIR')
        } | {'ELLECI_NEW_OUTPUTS': ''}
        status = run(sys.executable, '-W', 'ignore', '-c', SAVE, folder, '00_core.ipynb', env=env).strip()
        assert not status, f'opening, running and saving in JupyterLab changes:\n{status}'
        lines = run('git', 'diff', '-U0', cwd=folder).splitlines()
        new = [l[1:].strip() for l in lines if re.match(r'\+[^+]', l)]
        assert run('git', 'diff', '--name-only', cwd=folder) == 'nbs/00_core.ipynb\n' and len(new) < 20, lines
        assert any('# an edit' in l for l in new) and any('took 7.77 s' in l for l in new), lines

# Stand-ins for the checks: their code, and the last line and the exit code that `.ci/run` must end with
ENDINGS = [
    ("print('\\n3 passed, 0 failed')", '3 passed, 0 failed', 0),
    ("print('\\n2 passed, 1 failed'); sys.exit(1)", '2 passed, 1 failed', 1),
    (
        "atexit.register(print, 'goodbye'); print('\\n2 passed, 1 failed'); sys.exit(1)",
        '2 passed, 1 failed',
        1,
    ),
    ("atexit.register(os.write, 2, b'half a line'); print('\\n3 passed, 0 failed')", '3 passed, 0 failed', 0),
    ("print('half a line', end=''); print('\\n3 passed, 0 failed')", '3 passed, 0 failed', 0),
    ("print('FAIL a check\\n    7 passed, 0 failed'); sys.exit('it broke')", '0 passed, 1 failed', 1),
    ("print('\\n3 passed, 0 failed', flush=True); os.abort()", '3 passed, 1 failed', 1),
    ("print('nothing was counted')", '0 passed, 1 failed', 1),
]
def check_last_line():
    "`.ci/run` ends with the true count and agrees with its exit code, wherever it breaks"
    for code, last, failed in ENDINGS:
        with tempfile.TemporaryDirectory() as tmp:
            (Path(tmp)/'.ci').mkdir()
            shutil.copy2(ROOT/'.ci'/'run', Path(tmp)/'.ci')
            (Path(tmp)/'Makefile').write_text(f'test:\n\t@{sys.executable} checks.py\n')
            (Path(tmp)/'checks.py').write_text(f'import atexit, os, sys\n{code}\n')
            ended = subprocess.run([Path(tmp)/'.ci'/'run'], capture_output=True, text=True)
            said = ended.stdout.splitlines()[-1]
            agrees = (said, ended.returncode != 0) == (last, bool(failed))
            assert agrees, f'{code} ended with {said!r} and {ended.returncode}'

def check_notebook(path, first=()):
    # CPU seconds of a notebook and of the processes that it has waited for; `first`: where it looks for
    # packages first. Without a docstring, since a function that has one is a check of its own.
    ran = run_notebook(path, first=first)
    assert not ran.error, ran.error
    return ran.seconds

def install_newest(library, folder):
    "Install a library's newest release into a folder, and what it lacks; its version, None where we have it"
    pip = (sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', folder)
    run(*pip, library)
    [found] = importlib.metadata.distributions(path=[folder])
    if Version(found.version) <= Version(importlib.metadata.version(library)): return
    def is_met(r):
        if r.marker and not r.marker.evaluate({'extra': ''}): return True
        try: return r.specifier.contains(importlib.metadata.version(r.name))
        except importlib.metadata.PackageNotFoundError: return False
    if lacking := [str(r) for r in map(Requirement, found.requires) if not is_met(r)]: run(*pip, *lacking)
    return found.version

def newest_transformers():
    "What is exported works with the newest Transformers on PyPI, too (only in `make test-long`)"
    with tempfile.TemporaryDirectory() as folder:
        try: version = install_newest('transformers', folder)
        except AssertionError as e: version, why = None, str(e).splitlines()[-1]
        else: why = 'none is newer than the pinned one'
        if version is None: return print(f'     skipped: no Transformers from PyPI ({why})', flush=True)
        print(f'     Transformers {version}', flush=True)
        tests = [ROOT/'nbs'/'tests'/f'77_{name}.ipynb' for name in ('export', 'transformers')]
        return sum(check_notebook(p, [folder]) for p in tests)

PASSED = ROOT/'.venv'/'passed.json'      # {check: what it reached when it last passed}

@functools.cache
def digest(path): return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ''

def tree_of(*patterns):
    found = sorted({p for pattern in patterns for p in ROOT.glob(pattern)})
    return [f'{p.relative_to(ROOT)} {digest(p)}' for p in found if p.suffix not in ('.pyc', '.ipynb')]

@functools.cache
def importing():
    "{module: the modules that it imports, directly or not}"
    found = {m: set() for m in modules()}
    for i in all_imports(lessons(ROOT/'nbs')): found[i.source].add(i.target)
    for middle in found:
        for m in found:
            if middle in found[m]: found[m] |= found[middle]
    return found

def reached(path=None):
    "A checksum of all that a notebook reaches by its imports; of the whole tree, for another check"
    if path is None: parts = [*tree_of('elleci/**/*', '.ci/*', 'data/**/*', '*'), *map(digest, notebooks())]
    else:
        source = '\n'.join(python_of(s) for kind, s, _ in cells(path) if kind == 'code')
        known = importing()
        # what starts processes, or imports by name, may reach anything
        anything = re.search(r'subprocess|elleci_|import_module', source)
        direct = known if anything else {*targets(source, '', known)}
        used = set(direct).union(*(known.get(m, ()) for m in direct))
        files = [m.replace('.', '/') for m in sorted(used)]
        shared = '.ci/[ni]*.py', 'data/**/*', 'constraints.txt'
        if re.search('benchmarks|scripts', source): shared += 'benchmarks/**/*', 'scripts/*'
        parts = [digest(path), *tree_of(*(f'{f}.py' for f in files), *shared)]
    return hashlib.sha256('\n'.join([*parts, str(LONG)]).encode()).hexdigest()

def attempt(name, check):
    began, used = time.time(), None
    try:
        used = check()
        ok, why = True, ''
    except Exception as e: ok, why = False, '\n' + re.sub('^', '    ', f'{type(e).__name__}: {e}', flags=re.M)
    computed = '' if used is None else f', {used:.1f} s of CPU'
    print(f"{'ok  ' if ok else 'FAIL'} {time.time() - began:5.1f} s  {name}{computed}{why}", flush=True)
    return ok, used or 0.

def main():
    ready()
    checks = [(c.__doc__, c, None) for n, c in globals().items() if n.startswith('check_') and c.__doc__]
    # first what takes long and waits for nobody, so that all workers end together
    checks.sort(key=lambda c: c[1] not in (check_kernels, check_pins))
    if LONG: checks.append((newest_transformers.__doc__, newest_transformers, None))
    longest_first = sorted(notebooks(), key=lambda p: 'tests' in p.parts)[::-1]
    checks += [(str(p.relative_to(ROOT)), lambda p=p: check_notebook(p), p) for p in longest_first]
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    now = {name: reached(path) for name, _, path in checks}
    if '--changed' in sys.argv[1:]:
        left = [c for c in checks if passed.get(c[0]) != now[c[0]]]
        print(f'{len(checks) - len(left)} checks reach nothing that has changed since they passed')
        checks = left
    with ThreadPoolExecutor(WORKERS) as pool: results = list(pool.map(lambda c: attempt(*c[:2]), checks))
    for (name, *_), (ok, _) in zip(checks, results): passed[name] = now[name] if ok else ''
    PASSED.write_text(json.dumps(passed))
    failed = sum(not ok for ok, _ in results)
    computed = sum(used for _, used in results) + sum(os.times()[:4])
    print(f'\n{computed:.0f} s of CPU')
    for (name, *_), (ok, _) in zip(checks, results):
        if not ok: print(f'failed: {name}')                         # above with its reason
    print(f'{len(results) - failed} passed, {failed} failed')     # whatever was said before
    return 1 if failed else 0

if __name__ == '__main__': sys.exit(main())
