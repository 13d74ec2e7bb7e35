"""How lines are written: what `ruff.toml` asks for, and three things that ruff has no rule for.

    python .ci/lines.py          prints how many violations there are, by rule and by file
    python .ci/lines.py --all    prints each of them

- `names`: an assignment of four or more names at once, `a, b, c, d = 1, 2, 3, 4`
  (taking a shape apart, `B, T, H, P = x.shape`, is none);
- `promise`: the line of a notebook that begins with `>` has more than 104 columns (it becomes a docstring);
- `exported`: a line of the package that is longer than 110 columns, outside `__all__`.
"""
import ast, json, re, subprocess, sys, tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ('elleci', 'benchmarks', 'scripts', '.ci', 'setup.py', 'nbs')
COLUMNS, PROMISE, NAMES = 110, 104, 4


class Violation(NamedTuple):
    rule: str
    path: str      # from the root
    where: str     # 'cell 3, line 2' or 'line 7'
    said: str

    def __str__(self):
        return f'{self.path}, {self.where}: {self.rule} {self.said}'


def by_ruff(folder, paths):
    "What ruff finds in some files and folders"
    cmd = [sys.executable, '-m', 'ruff', 'check', '--no-cache', '--output-format', 'json', *paths]
    done = subprocess.run(cmd, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode in (0, 1), done.stderr
    for found in json.loads(done.stdout):
        path = str(Path(found['filename']).resolve().relative_to(Path(folder).resolve()))
        cell = f"cell {found['cell']}, " if found.get('cell') else ''
        where = f"{cell}line {found['location']['row']}"
        yield Violation(found['code'] or 'E9', path, where, found['message'])


def statements(node):
    "All statements below a node, however deep; their expressions are left alone"
    for field in ('body', 'handlers', 'cases', 'orelse', 'finalbody'):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def tree_of(source):
    "The syntax tree of a cell"
    try: return ast.parse(source)
    except SyntaxError: return ast.parse(TransformerManager().transform_cell(source))  # magics become calls


def many_names(source):
    "Line, rule and text of each assignment of four or more names at once"
    for node in statements(tree_of(source)):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List) and len(target.elts) >= NAMES:
                # Taking a shape apart is no assignment of many things at once.
                if isinstance(node.value, ast.Tuple | ast.List):
                    yield node.lineno, 'names', ast.unparse(target)


def by_hand(folder, path):
    "What no rule of ruff finds in a script or a notebook"
    name, text = str(path.relative_to(folder)), path.read_text(encoding='utf-8')
    if path.suffix == '.py':
        yield from (Violation(rule, name, f'line {line}', said) for line, rule, said in many_names(text))
        return
    for i, cell in enumerate(json.loads(text)['cells'], 1):
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code':
            for n, rule, said in many_names(source):
                yield Violation(rule, name, f'cell {i}, line {n}', said)
        elif cell['cell_type'] == 'markdown':
            for n, line in enumerate(source.split('\n'), 1):
                if line.startswith('> ') and len(line) > PROMISE and re.search('^# ', source, re.M):
                    yield Violation('promise', name, f'cell {i}, line {n}', f'{len(line)} columns')


def exported_lines(folder, path):
    "Lines of a module of the package that are too long"
    text = path.read_text(encoding='utf-8')
    if all(len(line) <= COLUMNS for line in text.splitlines()): return
    assigned = [n for n in ast.parse(text).body if isinstance(n, ast.Assign)]
    generated = [n for n in assigned if ast.unparse(n.targets[0]) == '__all__']
    aside = {i for n in generated for i in range(n.lineno, n.end_lineno + 1)}
    for i, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS and i not in aside:
            yield Violation('exported', str(path.relative_to(folder)), f'line {i}', f'{len(line)} columns')


def found(folder=ROOT, paths=CHECKED):
    "All violations in some files and folders, which are given from `folder`"
    folder, paths = Path(folder), [p for p in paths if (Path(folder)/p).exists()]
    given = [folder/p for p in paths]
    files = [f for g in given for f in ([g] if g.is_file() else sorted(g.rglob('*')))]
    files = [f for f in files if f.suffix in ('.py', '.ipynb') and '.ipynb_checkpoints' not in f.parts]
    generated = [f for f in files if f.is_relative_to(folder/'elleci')]
    violations = list(by_ruff(folder, paths))
    for f in files:
        if f not in generated:
            violations += by_hand(folder, f)
    for f in generated:
        if f.name != '_modidx.py':
            violations += exported_lines(folder, f)
    return violations


# Planted mistakes, a cell each, and what must not be taken for one.
PLANTED = {
    'E501': 'x = ' + ' + '.join(['1']*40),
    'E702': 'x = 1; y = 2',
    'E731': 'double = lambda x: 2*x',
    'F401': 'import os',
    'F821': 'print(nobody)',
    'names': 'a, b, c, d = 1, 2, 3, 4',
}
HARMLESS = [
    '%matplotlib inline\n!ls; pwd',
    '%%bash\nls; pwd',
    'files = !ls\nprint(files)',
    'a, b, c = 1, 2, 3\nprint(a, b, c)',
    'B, T, H, P = [0]*4\nprint(B, T, H, P)',
    'def f(x):\n    return x\n\n\nprint(f(1))',
    'def f(x):\n    return 2*x\n\n\nprint(f(1))',
    '# https://example.org/' + 'x'*120,
]


def notebook(cells, promise='> short'):
    "The JSON of a notebook with these cells of code"
    code = [dict(cell_type='code', source=s, metadata={}, outputs=[], execution_count=None) for s in cells]
    first = dict(cell_type='markdown', source=f'# Title\n\n{promise}', metadata={})
    return json.dumps(dict(cells=[first, *code], metadata={}, nbformat=4, nbformat_minor=5))


def planted(cells, promise='> short'):
    "The rules that a notebook of these cells, as part of a project with our `ruff.toml`, violates"
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        (folder/'ruff.toml').write_text((ROOT/'ruff.toml').read_text(encoding='utf-8'), encoding='utf-8')
        (folder/'nbs').mkdir()
        (folder/'nbs'/'00_core.ipynb').write_text(notebook(cells, promise), encoding='utf-8')
        return {v.rule for v in found(folder)}


def check_lines():
    "Lines of at most 110 columns, with one statement and fewer than four new names; no lambda has a name"
    everything = planted(PLANTED.values(), '> ' + 'x'*PROMISE)
    missed = {*PLANTED, 'promise'} - everything
    assert not missed, f'planted, and not found: {missed}'
    assert not planted(HARMLESS), planted(HARMLESS)
    violations = found()
    in_all = f'{len(violations)} in all: python .ci/lines.py'
    assert not violations, '\n'.join([*map(str, violations[:60]), in_all])


def table(violations):
    "Counts by file and rule"
    rules = sorted({v.rule for v in violations})
    counts = Counter((v.path, v.rule) for v in violations)
    width = max([len(v.path) for v in violations], default=4) + 1
    yield ' '*width + ''.join(f'{r:>9}' for r in rules)
    for path in sorted({v.path for v in violations}):
        yield f'{path:{width}}' + ''.join(f"{counts[path, r] or '':>9}" for r in rules)
    yield f"{'all':{width}}" + ''.join(f'{sum(v.rule == r for v in violations):>9}' for r in rules)


if __name__ == '__main__':
    violations = found()
    print('\n'.join(map(str, violations) if '--all' in sys.argv else table(violations)))
    sys.exit(bool(violations))
