"README.md from nbs/index.ipynb: its prose, its code and the text its cells printed. `--check` only compares."
import json, sys
from pathlib import Path

def block(kind, text): return f'```{kind}\n{text.rstrip()}\n```'

def render(cell):
    "Markdown of one cell; `#| hide` shows nothing, `#| echo: false` only what was printed or displayed"
    source = ''.join(cell['source'])
    # README lies one folder up
    if cell['cell_type'] == 'markdown': return [source.replace('](images/', '](nbs/images/')]
    if source.startswith('#| hide'): return []
    outputs = cell['outputs']
    plain = [o for o in outputs if 'text/markdown' not in o.get('data', {})]
    printed = ''.join(''.join(o.get('text', o.get('data', {}).get('text/plain', ''))) for o in plain)
    shown = [] if source.startswith('#| echo: false') else [block('python', source)]
    tables = [''.join(o['data']['text/markdown']) for o in outputs if 'text/markdown' in o.get('data', {})]
    return shown + ([block('text', printed)] if printed else []) + tables

root = Path(__file__).parents[1]
cells = json.loads((root/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
text = (
    '\n\n'.join(
        [
            '<!-- Made from nbs/index.ipynb by `make readme`: change it there. -->',
            *(part for c in cells for part in render(c)),
        ]
    )
    + '\n'
)
readme = root/'README.md'
if '--check' in sys.argv:
    sys.exit(
        readme.read_text(encoding='utf-8') != text
        and 'README.md differs from nbs/index.ipynb: run `make readme`.'
    )
readme.write_text(text, encoding='utf-8')
