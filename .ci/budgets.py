"""What each room of the package weighs, in lines of code, beside what it may weigh.

    python .ci/budgets.py        prints the table; exit code 1 where a room is more than 5 % above its budget

A line of code is one that isn't blank, a comment, a docstring or part of `__all__`. So that a room does not
get lighter by moving its code where nobody counts, the code beside the package is counted as well.
"""
import ast, json, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = {
    'memory': 3700, 'kernels': 4500, 'ground': 2100, 'planning': 2100, 'data': 1750, 'training': 1800,
    'inference': 1600, 'engine': 2000, 'dashboard': 1050, 'layers': 1850, 'optim': 490,
}
# Rooms that are still being emptied: what they weigh today, which may only fall.
STILL = {
    'planning': 2520, 'ground': 2407, 'training': 1904, 'together': 23591,
}
# What decoders of transformers weigh: their layers, text and account, a run from folder to folder.
STRANGERS = {
    'engine': 650, 'data': 340, 'planning': 230, 'training': 130, 'inference': 70, 'ground': 60,
    'together': 1540,
}
BESIDE = {
    'cells that are not exported': 27000, 'nbs/tests': 17600, 'nbs/solutions': 3420, 'data/web': 2200,
    'scripts': 185, 'benchmarks': 2710, '.ci': 2430,
}

def code_lines(source):
    "How many lines of code a Python source has"
    tree, skipped = ast.parse(source), set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)): continue
        first = next(iter(node.body), None)
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, 'value', None), str):
            skipped.update(range(first.lineno, first.end_lineno + 1))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == '__all__':
            skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(l.strip()) and not l.strip().startswith('#') and i not in skipped for i, l in lines)

def text(path): return path.read_text(encoding='utf-8')

def rooms(package=ROOT/'elleci'):
    "{room: lines of code}; the modules that lie in no folder are the ground"
    found = {}
    for path in package.rglob('*.py'):
        if path.name == '_modidx.py': continue
        inside = path.relative_to(package).parts
        room = inside[0] if len(inside) > 1 else 'ground'
        found[room] = found.get(room, 0) + code_lines(text(path))
    return found

def plain_lines(paths, comment='#'):
    lines = (l.strip() for p in paths for l in text(p).splitlines())
    return sum(bool(l) and not l.startswith(comment) for l in lines)

def cell_lines(paths, exported=True):
    "Lines of code in notebooks' cells"
    cells = (c for p in paths for c in json.loads(text(p))['cells'] if c['cell_type'] == 'code')
    sources = (''.join(c['source']) for c in cells)
    kept = (s for s in sources if exported or '#| export' not in s)
    return sum(bool(l.strip()) and not l.strip().startswith('#') for s in kept for l in s.splitlines())

def beside(root=ROOT):
    "{place: lines of code} of what isn't the package"
    nbs = root/'nbs'
    ours = [p for p in (root/'data'/'web').glob('*.*s') if '.min.' not in p.name]
    return {
        'cells that are not exported': cell_lines(nbs.glob('*.ipynb'), exported=False),
        'nbs/tests': cell_lines((nbs/'tests').glob('*.ipynb')) + plain_lines((nbs/'tests').glob('*.py')),
        'nbs/solutions': cell_lines((nbs/'solutions').glob('*.ipynb')),
        'data/web': plain_lines(ours, '//'),
        'scripts': plain_lines((root/'scripts').rglob('*.py')),
        'benchmarks': plain_lines((root/'benchmarks').rglob('*.py')),
        '.ci': plain_lines((root/'.ci').glob('*.py')),
    }

def weighed():
    "(place, lines of code, at most) of every row of the table"
    found = rooms()
    def most(place): return STILL.get(place, BUDGET.get(place, 0)) + STRANGERS.get(place, 0)
    rows = [(room, n, most(room)) for room, n in found.items()]
    rows.sort(key=lambda row: -row[1])
    rows.append(('together', sum(found.values()), most('together')))
    return rows + [(place, n, BESIDE[place]) for place, n in beside().items()]

def above(rows): return [place for place, n, most in rows if n > most*(1 if place == 'together' else 1.05)]

def check_budgets():
    "No room weighs more than 5 % above its budget, and nothing beside the package has grown"
    rows = weighed()
    table = '\n'.join(f'     {place:28} {n:>7,} {most:>7,}' for place, n, most in rows)
    print(f'     {"lines of code":28} {"today":>7} {"at most":>7}\n{table}', flush=True)
    too_heavy = ', '.join(above(rows))
    assert not too_heavy, f'too heavy: {too_heavy}. See CONTRIBUTING.md, "What the budgets are for".'

if __name__ == '__main__':
    try: check_budgets()
    except AssertionError as e: sys.exit(str(e))
