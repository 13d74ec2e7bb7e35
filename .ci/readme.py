"""README.md from nbs/index.ipynb: its prose, its code, and what its cells printed and drew.

    python .ci/readme.py            writes README.md, and a file in nbs/images for each drawing
    python .ci/readme.py --check    changes nothing; fails where they differ from the index

Links in the index are relative to `nbs`, README.md lies one folder up: they are rewritten.
A drawing needs a `#| label:`, the name of its file, and a `#| fig-alt:`, for those who can't see it.
"""
import base64, json, os, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = '<!-- Made from nbs/index.ipynb by `make readme`: change it there. -->'


def block(kind, text): return f'```{kind}\n{text.rstrip()}\n```'


def from_root(prose):
    "Prose whose relative links start at the repository's root instead of `nbs`"
    def moved(match):
        target = match[1]
        if re.match(r'[a-z]+:|#|/', target):
            return match[0]
        return f"]({os.path.normpath(f'nbs/{target}')})"
    return re.sub(r'\]\(([^)\s]+)\)', moved, prose)


def option(source, name):
    "A directive of a cell, as `#| label: fig-bytes`"
    found = re.search(rf'^#\|\s*{name}:\s*(.+)$', source, re.M)
    return found[1].strip() if found else ''


def drawings(source, outputs):
    "The pictures of a cell: name of the file, its bytes, what it shows"
    for o in outputs:
        if image := o.get('data', {}).get('image/png'):
            name = option(source, 'label')
            assert name, f'a drawing of the index has no label: {source[:80]}'
            yield f'{name}.png', base64.b64decode(''.join(image)), option(source, 'fig-alt')


def without_comments(prose): return re.sub(r'^<!-- course.*-->\n', '', prose, flags=re.M)


def render(cell):
    "Markdown of one cell; `#| hide` shows nothing, `#| echo: false` only what was printed, shown or drawn"
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown':
        return [from_root(without_comments(source))]
    if source.startswith('#| hide'):
        return []
    outputs = cell['outputs']
    plain = [o for o in outputs if not {'text/markdown', 'image/png'} & set(o.get('data', {}))]
    printed = ''.join(''.join(o.get('text', o.get('data', {}).get('text/plain', ''))) for o in plain)
    shown = [] if source.startswith('#| echo: false') else [block('python', source)]
    tables = [''.join(o['data']['text/markdown']) for o in outputs if 'text/markdown' in o.get('data', {})]
    pictures = [f'![{alt}](nbs/images/{name})' for name, _, alt in drawings(source, outputs)]
    return shown + [from_root(t) for t in tables] + pictures + ([block('text', printed)] if printed else [])


def files(root=ROOT):
    "What is made from the index: path and content"
    cells = json.loads((root/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    parts = [HEAD, *(part for c in cells for part in render(c))]
    made = {root/'README.md': ('\n\n'.join(parts) + '\n').encode()}
    for c in cells:
        if c['cell_type'] == 'code':
            for name, image, _ in drawings(''.join(c['source']), c['outputs']):
                made[root/'nbs'/'images'/name] = image
    return made


if __name__ == '__main__':
    made = files()
    if '--check' in sys.argv:
        wrong = [p for p, new in made.items() if not p.exists() or p.read_bytes() != new]
        stale = [str(p.relative_to(ROOT)) for p in wrong]
        if stale:
            sys.exit(f"{', '.join(stale)}: not what nbs/index.ipynb has; run `make readme`.")
        sys.exit()
    for path, new in made.items():
        path.write_bytes(new)
