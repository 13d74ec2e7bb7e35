"""The direction of imports: no notebook imports from one with a higher number, no room from a floor above it,
no two rooms from each other, and nothing that computes imports the instruments that measure it.

    python .ci/imports.py        prints what is found

A room is a folder of `elleci`, or a module that lies in none. Imports inside functions and under `if` or
`try` count like any other.
"""
import ast, functools, json, re, sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

FLOORS = {
    'basics': 0, 'core': 0, 'files': 0, 'toml': 0, 'config': 0, 'annotate': 0, 'plots': 0, 'command_line': 0,
    'documents': 0, 'records': 0, 'commands': 0, 'summary': 0,
    'memory': 1,
    'kernels': 2,
    'layers': 3,
    'model': 4, 'decode_step': 4, 'data': 4, 'optim': 4,
    'engine': 5, 'generation': 5,
    'planning': 6,
    'training': 7,
    'inference': 8,
    'dashboard': 8, 'bench': 8, 'experiments': 8,
}
NEIGHBOURS = {'model', 'data', 'optim'}                                     # none of them imports another
COMPUTES = {'kernels', 'layers', 'model', 'data', 'optim', 'engine'}        # none of them imports `memory`
BY_NAME = {'import_module', '__import__'}                            # functions that take a module's name


class Lesson(NamedTuple):
    "A notebook, as far as imports are concerned"
    name: str      # of the file; it begins with the notebook's number
    module: str    # that it fills, e.g. 'elleci.kernels.ssd'
    source: str    # its exported code


class Import(NamedTuple):
    name: str      # of the notebook
    source: str    # the module that imports
    target: str    # the module that is imported


def exported(cells):
    "{module: exported code} of a notebook, without magics; a cell may name another module than the notebook"
    code = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    named = re.search(r'^#\|\s*default_exp\s+(\S+)', '\n'.join(code), re.M)
    by_module = {f'elleci.{named[1]}': ''} if named else {}
    for source in code:
        export = re.search(r'^#\|\s*export\w*[ \t]*([\w.]*)', source, re.M)
        if not export: continue
        module = f'elleci.{export[1] or named[1]}'
        kept = '\n'.join('' if re.match(r'\s*[%!]', line) else line for line in source.split('\n'))
        by_module[module] = by_module.get(module, '') + '\n' + kept
    return by_module


def lessons(folder):
    "The notebooks of a folder that fill a module; one that fills several counts once for each"
    for path in sorted(Path(folder).glob('[0-9]*.ipynb')):
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        for module, source in exported(cells).items(): yield Lesson(path.name, module, source)


def called(node):
    "Name of the function or method that a call calls"
    return getattr(node.func, 'attr', getattr(node.func, 'id', ''))


def targets(source, module, modules):
    "The modules of `elleci` that a piece of code imports, wherever in it the import stands"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith('elleci.'))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                base = '.'.join([*module.split('.')[:-node.level], *filter(None, [base])])
            if base.split('.')[0] == 'elleci':
                full = [f'{base}.{a.name}' for a in node.names]
                yield from (f if f in modules else base for f in full)
        elif isinstance(node, ast.Call) and called(node) in BY_NAME:
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            yield from (v for v in values if str(v).startswith('elleci.'))


def all_imports(notebooks):
    "Every import of one module of `elleci` by another, each once"
    return imports_of(tuple(notebooks))


@functools.cache
def imports_of(notebooks):
    modules = {n.module for n in notebooks}
    found = [Import(n.name, n.module, t) for n in notebooks for t in targets(n.source, n.module, modules)]
    return [i for i in dict.fromkeys(found) if i.target not in (i.source, 'elleci')]


def room(module):
    name = module.split('.')[1]
    return name


def number(name):
    return int(re.match(r'\d+', name)[0])


def wrong_numbers(notebooks):
    "Imports from a higher number; where several notebooks fill a module, the first of them counts"
    numbers = {}
    for n in notebooks:
        numbers[n.module] = min(number(n.name), numbers.get(n.module, 1000))
    for i in all_imports(notebooks):
        if i.target not in numbers:
            yield f'{i.name} imports {i.target}, which no notebook fills'
        elif numbers[i.target] > number(i.name):
            yield f'{i.name} imports {i.target} from notebook {numbers[i.target]}'


def wrong_floors(notebooks):
    "Imports from a floor above, from a neighbour who is not to be known, and of the instruments"
    for i in all_imports(notebooks):
        inner, outer = room(i.source), room(i.target)
        unknown = [r for r in (inner, outer) if r not in FLOORS]
        if unknown:
            yield f'{i.name}: the room {unknown[0]} is on no floor of .ci/imports.py'
        elif FLOORS[outer] > FLOORS[inner]:
            yield f'{i.source} imports {i.target}, {FLOORS[outer] - FLOORS[inner]} floors above it'
        elif inner != outer and {inner, outer} <= NEIGHBOURS:
            yield f'{i.source} imports its neighbour {i.target}'
        elif outer == 'memory' and inner in COMPUTES:
            yield f'{i.source} computes and imports the instrument {i.target}'


def wrong_circles(notebooks):
    "Pairs of rooms of which each reaches the other, and an import for either way"
    edges = {}
    for i in all_imports(notebooks):
        if room(i.source) != room(i.target):
            edges.setdefault((room(i.source), room(i.target)), i)
    reach = {a: {b for x, b in edges if x == a} for a, _ in edges}
    for middle in list(reach):
        for a in reach:
            if middle in reach[a]:
                reach[a] |= reach[middle]
    for (a, b), i in sorted(edges.items()):
        if a in reach.get(b, ()):
            yield f'{a} and {b} are in a circle: {i.source} imports {i.target}'


def wrong_stars(notebooks):
    for n in notebooks:
        if re.search(r'^\s*from elleci\S* import \*', n.source, re.M):
            yield f'{n.name} imports a star'


def found(notebooks):
    "All that is wrong with the imports of some notebooks, a line for each"
    notebooks = list(notebooks)
    rules = wrong_numbers, wrong_floors, wrong_circles, wrong_stars
    return [line for rule in rules for line in rule(notebooks)]


# Each planted mistake: what is said of it, then the notebooks as (number and name, module, code).
GROUND = ('00_core.ipynb', 'elleci.core', 'import torch')
PLANTED = [
    (
        'imports elleci.kernels.ssd from notebook 21',
        GROUND,
        ('20_ssd.ipynb', 'elleci.kernels.reference', 'def f():\n    from elleci.kernels.ssd import ssd'),
        ('21_ssd_triton.ipynb', 'elleci.kernels.ssd', ''),
    ),
    ('which no notebook fills', GROUND, ('20_ssd.ipynb', 'elleci.kernels.ssd', 'import elleci.kernels.gone')),
    (
        '1 floors above it',
        GROUND,
        ('20_norm.ipynb', 'elleci.layers.norm', ''),
        ('21_ssd.ipynb', 'elleci.kernels.ssd', 'if True:\n    from elleci.layers import norm'),
    ),
    (
        'imports its neighbour',
        GROUND,
        ('50_model.ipynb', 'elleci.model', 'IGNORE = -100'),
        ('73_mixing.ipynb', 'elleci.data.loader', 'from ..model import IGNORE'),
    ),
    (
        'computes and imports the instrument',
        GROUND,
        ('11_trace.ipynb', 'elleci.memory.trace', ''),
        ('21_ssd.ipynb', 'elleci.kernels.ssd', 'try:\n    import elleci.memory.trace as t\nfinally: pass'),
    ),
    (
        'computes and imports the instrument',
        GROUND,
        ('13_measure.ipynb', 'elleci.memory.measure', ''),
        (
            '61_step.ipynb',
            'elleci.engine.step',
            "import importlib as i\ni.import_module('elleci.memory.measure')",
        ),
    ),
    (
        'are in a circle',
        GROUND,
        ('74_files.ipynb', 'elleci.training.checkpoint', ''),
        ('75_generate.ipynb', 'elleci.inference.generate', 'from elleci.training.checkpoint import newest'),
        (
            '76_train.ipynb',
            'elleci.training.loop',
            'def f():\n    from elleci.inference.generate import chat',
        ),
    ),
    ('is on no floor', GROUND, ('33_toys.ipynb', 'elleci.toys.spade', 'from elleci.core import UserError')),
    ('imports a star', GROUND, ('10_memory.ipynb', 'elleci.memory.ledger', 'from elleci.core import *')),
]
HARMLESS = [
    GROUND, ('01_files.ipynb', 'elleci.files', 'from elleci.core import UserError'),
    ('10_ledger.ipynb', 'elleci.memory.ledger', 'import elleci.files\nfrom elleci import core'),
    ('20_ssd.ipynb', 'elleci.kernels.ssd', 'from ..core import UserError\nfrom . import ssd'),
    ('64_account.ipynb', 'elleci.planning.account', 'import elleci.kernels.ssd\nfrom ..memory import ledger'),
]


def check_imports():
    "No notebook imports from a higher number, no room from above it, and nothing that computes from `memory`"
    for says, *sources in PLANTED:
        said = found(Lesson(*s) for s in sources)
        assert any(says in line for line in said), f'planted, and not found: {says}; said was {said}'
    assert not found(Lesson(*s) for s in HARMLESS), found(Lesson(*s) for s in HARMLESS)
    notebooks = list(lessons(ROOT/'nbs'))
    assert len(notebooks) >= 30 and len(all_imports(notebooks)) >= 100, 'the notebooks were not found'
    wrong = found(notebooks)
    assert not wrong, '\n'.join(wrong)


if __name__ == '__main__':
    try:
        check_imports()
    except AssertionError as e:
        sys.exit(str(e))
