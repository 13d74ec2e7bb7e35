"README.md from nbs/index.ipynb: its prose, its code and the small text its cells printed. `--check` only compares."
import sys
from pathlib import Path
from nbconvert import MarkdownExporter
import nbformat

def render(path):
    nb = nbformat.read(path, 4)
    nb.cells = [c for c in nb.cells if not c.source.startswith('#| hide')]
    for c in nb.cells: c.source = c.source.replace('#| echo: false\n', '')
    body, _ = MarkdownExporter().from_notebook_node(nb)
    note = '<!-- Made from nbs/index.ipynb by `make readme`: change it there. -->\n\n'
    return note + body.strip() + '\n'

root = Path(__file__).parents[1]
text, readme = render(root/'nbs/index.ipynb'), root/'README.md'
if '--check' in sys.argv: sys.exit(readme.read_text(encoding='utf-8') != text and 'README.md differs from nbs/index.ipynb: run `make readme`.')
readme.write_text(text, encoding='utf-8')
