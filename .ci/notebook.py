"""One notebook, run cell by cell in a fork, as `nbdev_test` runs it.

    python .ci/notebook.py nbs/20_ssd.ipynb …            what each of its cells took, and what went wrong
    python .ci/notebook.py --renew nbs/20_ssd.ipynb …    and put what they print now into the notebook

What a cell prints is compared with what is stored in the notebook. A cell whose numbers depend on the
processor's rounding, on a clock or on the machine says so in its metadata, `"varies": "numbers"`: then words
alone are compared. `"varies": "all"` is for what a machine may lack. Pictures are not compared, nor is a cell
that stores nothing. A cell with `"slow": true` runs in `make test-long` alone.
"""
import argparse, compileall, gc, json, multiprocessing, os, re, signal, sys, tempfile, time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from interpreter import speed_up_interpreter

ROOT = Path(__file__).resolve().parents[1]
LONG = bool(os.environ.get('ELLECI_LONG'))
SKIPPED = {'gpu'} if LONG else {'gpu', 'slow'}        # whose cells are left out, by directive or metadata
# A hang must not take the rest along. What is limited is the CPU time that a notebook and all its processes
# take, which does not depend on what else the machine is doing; and, for one that waits for ever, the time
# in which they take next to none.
CPU_LIMIT = 600                                        # seconds; the longest takes about 80
IDLE_LIMIT = 300                                       # seconds in which less than one of CPU time was taken
WALL_LIMIT = 3600                                      # seconds; for what only pretends to be busy
TICK = os.sysconf('SC_CLK_TCK')
FORKS = multiprocessing.get_context('forkserver')
# what all notebooks import
PRELOADED = ['execnb.shell', 'torch', 'torch._dynamo', 'triton', 'matplotlib.pyplot', 'tokenizers',
             'safetensors.torch', 'fastcore.test', 'msgspec']

DOT = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC'
DRAWN = {'04_plots.ipynb'}       # notebooks that look at what was drawn

class Cell(NamedTuple):
    "What became of a cell"
    index: int
    seconds: float     # of CPU
    error: str         # the traceback; '' where it ended well
    stored: list       # of texts, as `printed` gives them
    printed: list
    outputs: list

class Ran(NamedTuple):
    "What became of a notebook"
    cells: list
    seconds: float     # of CPU, with those of the processes that it has waited for
    error: str         # '' where all is well, else what to print

def environment():
    "Of every check: our commands are found, and no bytecode is written"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, 'PATH': path, 'PYTHONDONTWRITEBYTECODE': '1'}

def of_notebooks():
    "And of every notebook: one thread, kernels interpreted, no window, sets in one order"
    kernels = {'TRITON_INTERPRET': '1', 'TRITON_CACHE_DIR': str(ROOT/'.venv'/'triton')}
    same = {'OMP_NUM_THREADS': '1', 'PYTHONHASHSEED': '0'}
    return {**environment(), **kernels, **same, 'MPLBACKEND': 'agg', 'IN_TEST': '1'}

def our_modules():
    "The package, but for what acts as soon as it is imported"
    found = sorted(p.relative_to(ROOT) for p in (ROOT/'elleci').rglob('*.py') if p.name[0] != '_')
    return ['.'.join(p.with_suffix('').parts) for p in found]

def ready(preloaded=None):
    "Start the process of which every notebook's is a fork; by default it has imported the package"
    preloaded = preloaded or [*PRELOADED, *our_modules()]
    # No process that is started here writes bytecode: without this, each would compile the package again.
    compileall.compile_dir(ROOT/'elleci', quiet=2)
    FORKS.set_forkserver_preload(preloaded)
    with mock.patch.dict(os.environ, of_notebooks()): forkserver.ensure_running()

def draw_nothing():
    "A figure that is shown is a dot: drawing takes a tenth of the time of all checks, and nobody looks"
    from matplotlib.figure import Figure
    import base64
    dot = base64.b64decode(DOT)
    real = Figure.savefig
    def savefig(self, to, *args, **kwargs):
        if hasattr(to, 'write') and 'format' not in kwargs: to.write(dot)
        else: real(self, to, *args, **kwargs)
    Figure.savefig = savefig

def printed(outputs):
    "What outputs say in words: what went to stdout, then the Markdown or text of each object displayed"
    streams = (o['text'] for o in outputs if o['output_type'] == 'stream' and o['name'] == 'stdout')
    texts = (o['data'] for o in outputs if 'data' in o)
    shown = (data.get('text/markdown', data.get('text/plain', '')) for data in texts)
    return [''.join(map(''.join, streams)), *map(''.join, shown)]

NUMBER = r'[-+]?\d[\d,.]*(e[-+]?\d+)?|[ █▏▎▍▌▋▊▉]+'   # and what pads it, or draws it
def without_numbers(text): return re.sub(NUMBER, '#', text)

def is_stale(cell, ran):
    "Whether a cell printed otherwise than is stored, by what its metadata let vary"
    varies = cell['metadata'].get('varies')
    if not any(ran.stored) or varies == 'all': return False
    if varies == 'numbers': return [*map(without_numbers, ran.stored)] != [*map(without_numbers, ran.printed)]
    return ran.stored != ran.printed

def is_left_out(cell, flags):
    "Whether a check leaves a cell out: by its directives, or because it exports"
    if cell['cell_type'] != 'code' or 'nbdev_export'+'(' in cell['source']: return True
    if 'slow' in flags and cell['metadata'].get('slow'): return True
    directives = re.findall(r'^#\| *(.+)$', cell['source'], re.M)
    return any(d.split(':')[0].strip() in flags or re.fullmatch(r'eval: *false', d) for d in directives)

def cells_of(path):
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [c | dict(source=''.join(c['source'])) for c in cells]

def run_cells(path, flags, begins):
    "Run a notebook in this process, until a cell raises; `begins` is told of each before it runs"
    from execnb.shell import CaptureShell
    os.chdir(path.parent)
    shell = CaptureShell(path)
    def used(): return sum(os.times()[:4])
    for i, cell in enumerate(cells_of(path)):
        if is_left_out(cell, flags): continue
        begins(i)
        shell._cell_idx, began = i, used()    # for its traceback
        outputs = shell.run(cell['source'])
        error = shell.prettytb(fname=path) if shell.exc else ''
        yield Cell(i, used() - began, error, printed(cell['outputs']), printed(outputs), outputs)
        if error: break

def in_fork(path, root, first, flags, end, out, cover):
    "What `run_notebook` does, in a process and a process group of its own"
    os.setsid()
    gc.freeze()    # what is imported by now is no garbage: it need not be looked through
    said = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ['ELLECI_CHECK'] = out
    if root != ROOT: os.environ['PYTHONPATH'] = str(root)
    if cover:
        import coverage
        folder = str(Path(cover).parent)
        os.environ.update(COVERAGE_FILE=cover, COVERAGE_PROCESS_START=f'{folder}/rc')
        os.environ['PYTHONPATH'] = f'{folder}/site'
        measured = coverage.Coverage(data_file=cover, config_file=f'{folder}/rc', data_suffix=True)
        measured.start()
    speed_up_interpreter()
    if path.name not in DRAWN: draw_nothing()
    sys.path[:] = [*first, str(root), *(p for p in sys.path if p != str(ROOT/'.ci'))]
    ran = list(run_cells(path, flags, end.send))
    if cover:
        measured.stop()
        measured.save()
    # as text: an output may hold an object of any library
    end.send((json.dumps(ran, default=str), sum(os.times()[:4])))

def cpu_seconds(group):
    "CPU time of the living processes of a process group, and of their children that have ended"
    total = 0
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try: fields = stat.read_text(errors='replace').rpartition(')')[2].split()
        except OSError: continue                               # it has just ended
        if int(fields[2]) == group: total += sum(map(int, fields[11:15]))
    return total/TICK

def end_all(group, mark):
    "Kill a process group, and what it has started in groups of its own: it has `mark` in its environment"
    for environ in Path('/proc').glob('[0-9]*/environ'):
        with suppress(OSError):
            if mark.encode() in environ.read_bytes(): os.kill(int(environ.parent.name), signal.SIGKILL)
    with suppress(ProcessLookupError): os.killpg(group, signal.SIGKILL)

class Patience:
    "Ask again and again: an `AssertionError` once too much CPU time was taken, or for too long none"
    def __init__(self, group, cpu_limit, idle_limit, wall_limit):
        self.group = group
        self.cpu_limit = cpu_limit
        self.idle_limit = idle_limit
        self.wall_limit = wall_limit
        self.began = self.moved_at = time.monotonic()
        self.moved = 0.

    def __call__(self):
        used, now = cpu_seconds(self.group), time.monotonic()
        assert used < self.cpu_limit, f'no end after {used:.0f} s of CPU time'
        # less, where a process has ended
        if abs(used - self.moved) >= 1: self.moved, self.moved_at = used, now
        idle, wall = now - self.moved_at, now - self.began
        assert idle < self.idle_limit, f'no end: {idle:.0f} s went by and nothing was computed'
        assert wall < self.wall_limit, f'no end after {wall:.0f} s'

def limits():
    "Limits of CPU time, of silence and of time for a notebook, in seconds"
    longer = 10 if LONG else 1
    return CPU_LIMIT*longer, IDLE_LIMIT*longer, WALL_LIMIT*longer

def what_is_wrong(path, ran):
    "What to say of the cells of a notebook; '' where all is well"
    for cell in ran:
        if cell.error: return f'cell {cell.index}:\n{cell.error}'
    cells, lines = cells_of(path), []
    # a notebook that knows of long tests does more in them than is stored
    if LONG and any('ELLECI_LONG' in c['source'] for c in cells if c['cell_type'] == 'code'): return ''
    for cell in ran:
        if not is_stale(cells[cell.index], cell): continue
        pairs = [(a, b) for a, b in zip([*cell.stored, ''], [*cell.printed, '']) if a != b] or [('', 'more')]
        a, b = pairs[0]
        same = max(len(os.path.commonprefix([a, b])) - 40, 0)
        lines.append(f'cell {cell.index} stores {a[same:same + 300]!r}, and prints {b[same:same + 300]!r}')
    if lines: lines.append('renew what is stored: python .ci/notebook.py --renew, or let it vary (see there)')
    return '\n'.join(lines)

def run_notebook(path, root=ROOT, first=(), flags=SKIPPED, within=None, cover='')->Ran:
    """Run a notebook of the tree `root` in a fork, which is killed with all that it has started.

    `first`: where it looks for packages first; `within`: limits, see `limits`; `cover`: file of coverage."""
    with tempfile.TemporaryDirectory() as tmp:
        end, ended = FORKS.Pipe(False)
        out = f'{tmp}/out'
        p = FORKS.Process(target=in_fork, args=(path, root, first, flags, ended, out, cover))
        p.start()
        ended.close()
        patience = Patience(p.pid, *(within or limits()))
        ran, used, error = [], 0., ''
        got = None    # the number of each cell as it begins, and in the end what became of them
        try:
            while not isinstance(got, tuple):
                while not end.poll(1): patience()
                got = end.recv()
            ran, used = [Cell(*row) for row in json.loads(got[0])], got[1]
            p.join(60)
        except AssertionError as e: error = str(e)
        except EOFError: error = 'it died without a word'
        finally:
            end_all(p.pid, tmp)
        if error:
            said = Path(out).read_text(errors='replace').splitlines()[-40:]
            error = '\n'.join([*said, f'in cell {got}: {error}'])
    return Ran(ran, used, error or what_is_wrong(path, ran))

def renew(path, ran):
    "Put what the cells of a run have printed into the notebook, where it is another text"
    notebook, cells = json.loads(path.read_text(encoding='utf-8')), cells_of(path)
    for cell in ran.cells:
        if is_stale(cells[cell.index], cell): notebook['cells'][cell.index]['outputs'] = cell.outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('notebooks', nargs='+', type=Path)
    p.add_argument('--renew', action='store_true')
    a = p.parse_args()
    ready()
    bad = 0
    for path in (p.resolve() for p in a.notebooks):
        ran = run_notebook(path)
        slow = ', '.join(f'cell {c.index} {c.seconds:.1f}' for c in ran.cells if c.seconds > 1)
        print(f'{path.name}: {ran.seconds:.1f} s of CPU ({slow})' + ('\n' + ran.error if ran.error else ''))
        bad += bool(ran.error)
        if a.renew: renew(path, ran)
    return bad

if __name__ == '__main__': sys.exit(main())
