"""The course: where each notebook stands, what to read before it, how long it takes, and what comes next.

    python .ci/course.py            writes it into the notebooks and into the index
    python .ci/course.py index      writes it into the index alone; any names can be given
    python .ci/course.py --check    changes nothing; prints what is missing or out of date
    python .ci/course.py --add      gives each notebook that is missing in the table an entry, to be edited

Its one source is `nbs/course.toml`. A notebook gets two paragraphs, each behind the comment `<!-- course -->`
at the end of a cell: of the one with its title, and of its last prose. The index gets its cells that begin
with `<!-- course: ... -->` filled.

Minutes are computed from what there is to read: 200 words of prose or 20 lines of code a minute, half a
minute for a picture, rounded up to five minutes. Hidden cells count nothing, nor do the two paragraphs.
"""
import json, math, re, sys, tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = '<!-- course -->'
SHELVES = {'lesson': 'Lesson', 'reference': 'Reference'}
WORDS_PER_MINUTE = 200
LINES_PER_MINUTE = 20
MINUTES_PER_PICTURE = .5
ROUNDED_TO = 5


@dataclass
class Entry:
    "A notebook's place in the course, as `course.toml` has it"
    shelf: str                                 # 'lesson' or 'reference'
    shows: str                                 # the row of the index's table
    needs: list = field(default_factory=list)  # notebooks to read before it
    know: str = ''                             # what else one should know, in words
    next: str = ''                             # a notebook; by default that of the path, else of the list


def text(cell): return ''.join(cell['source'])
def with_text(cell, source): return cell | {'source': source.splitlines(keepends=True)}
def link(name, label=''): return f'[{label or name}]({name}.ipynb)'


def read_cells(path): return json.loads(path.read_text(encoding='utf-8'))['cells']


def without_course(cells):
    "A notebook's cells as its author wrote them"
    kept = []
    for cell in cells:
        if cell['cell_type'] == 'markdown' and MARK in text(cell):
            own = text(cell).split(MARK)[0].rstrip()
            if not own: continue
            cell = with_text(cell, own)
        kept.append(cell)
    return kept


def title(cells):
    "The H1 of a notebook; '' where it has none"
    prose = '\n'.join(text(c) for c in cells if c['cell_type'] == 'markdown')
    found = re.search(r'^# (.+)$', prose, re.M)
    return found[1].strip() if found else ''


def module(cells):
    "The module that a notebook exports to, or ''"
    code = '\n'.join(text(c) for c in cells if c['cell_type'] == 'code')
    # What it begins, or what its cells add to.
    patterns = r'^#\|\s*default_exp\s+(\S+)', r'^#\|\s*export\w*[ \t]+([\w.]+)'
    found = next(filter(None, (re.search(pattern, code, re.M) for pattern in patterns)), None)
    if not found:
        return ''
    return 'elleci' if found[1] == '__init__' else f'elleci.{found[1]}'


def is_shown(cell): return not re.search(r'^#\|\s*hide\b', text(cell), re.M)


def minutes(cells):
    "How long a notebook takes to read, by the rule above"
    prose = [text(c) for c in cells if c['cell_type'] == 'markdown']
    code = [c for c in cells if c['cell_type'] == 'code' and is_shown(c)]
    words = sum(len(s.split()) for s in prose)
    lines = sum(bool(line.strip()) for c in code for line in text(c).split('\n'))
    pictures = sum('image/png' in o.get('data', {}) for c in code for o in c.get('outputs', []))
    exact = words/WORDS_PER_MINUTE + lines/LINES_PER_MINUTE + pictures*MINUTES_PER_PICTURE
    return max(ROUNDED_TO, ROUNDED_TO*math.ceil(exact/ROUNDED_TO))


def hours(n):
    "Minutes as people say them"
    if n < 60:
        return f'{n} minutes'
    return f'{n//60} h {n%60:02} min' if n % 60 else f'{n//60} h'


class Course:
    "`course.toml` and the notebooks of a folder"
    def __init__(self, nbs):
        self.nbs = Path(nbs)
        table = tomllib.loads((self.nbs/'course.toml').read_text(encoding='utf-8'))
        self.paths = table['paths']
        self.entries = {name: Entry(**values) for name, values in table['notebooks'].items()}
        self.cells = {p.stem: without_course(read_cells(p)) for p in sorted(self.nbs.glob('[0-9]*.ipynb'))}
        solutions = sorted((self.nbs/'solutions').glob('*.ipynb'))
        # A solutions notebook has a section for each notebook whose exercises it solves.
        def headings(path): return re.findall('^##+ .*', '\n'.join(map(text, read_cells(path))), re.M)
        self.solutions = {p.stem: '\n'.join(headings(p)) for p in solutions}

    @property
    def names(self): return [name for name in self.cells if name in self.entries]

    def problems(self):
        "What is wrong with the table, a sentence each"
        for name in self.cells:
            if name not in self.entries:
                wanted = f'[notebooks.{name}], shelf = "lesson" or "reference", shows = "...", needs = [...]'
                yield f"nbs/{name}.ipynb isn't in nbs/course.toml: add {wanted}; then run `make readme`."
            if not title(self.cells[name]):
                yield f'nbs/{name}.ipynb has no title: begin its first cell with "# ...", then "> ...".'
        for name, entry in self.entries.items():
            if name not in self.cells:
                yield f'nbs/course.toml has {name}, but there is no nbs/{name}.ipynb: rename or remove it.'
            if entry.shelf not in SHELVES:
                yield f'nbs/course.toml: {name} is on the shelf {entry.shelf!r}: take one of {list(SHELVES)}.'
            for other in [*entry.needs, *filter(None, [entry.next])]:
                if other not in self.entries:
                    yield f'nbs/course.toml: {name} names {other}, which is not in the table.'
        for path in self.paths.values():
            yield from self.path_problems(path)

    def path_problems(self, path):
        "What is wrong with the order of a path"
        steps = path['notebooks']
        for i, name in enumerate(steps):
            if name not in self.entries:
                yield f"nbs/course.toml: the path {path['title']!r} has {name}, which is not in the table."
                continue
            for late in set(self.entries[name].needs) & set(steps[i + 1:]):
                yield f"nbs/course.toml: in {path['title']!r}, {name} comes before {late}, which it needs."

    def header(self, name):
        "The paragraph below a notebook's title"
        entry = self.entries[name]
        n = minutes(self.cells[name])
        at_leisure = '; look up what you need' if entry.shelf == 'reference' else ''
        parts = [f'**{SHELVES[entry.shelf]}**, {hours(n)}{at_leisure}.']
        for path in self.paths.values():
            if name in path['notebooks']:
                step = path['notebooks'].index(name) + 1
                parts.append(f"Step {step} of {len(path['notebooks'])} on [{path['title']}](index.ipynb).")
        if entry.needs:
            parts.append(f"Read first: {', '.join(map(link, entry.needs))}.")
        if entry.know:
            parts.append(f'You should know: {entry.know}.')
        if entry.shelf == 'lesson' and not entry.needs and not entry.know:
            parts.append('No other notebook is needed.')
        return f"{MARK}\n{' '.join(parts)}"

    def footer(self, name):
        "The paragraph at a notebook's end"
        lines = []
        solved = [s for s, words in self.solutions.items() if re.search(rf'\b{re.escape(name)}\b', words)]
        if solved:
            links = ', '.join(link(f'solutions/{s}', s) for s in solved)
            lines.append(f'Solutions to the exercises: {links}.')
        for path in self.paths.values():
            if name in path['notebooks']:
                lines.append(self.next_step(name, path))
        entry = self.entries[name]
        if entry.next:
            lines.append(f'Next: {self.named_link(entry.next)}.')
        elif not any(name in path['notebooks'] for path in self.paths.values()):
            after = self.names[self.names.index(name) + 1:]
            following = self.named_link(after[0]) if after else '[the index](index.ipynb)'
            lines.append(f'Next in the list: {following}.')
        # A title may end with a mark of its own.
        return f'{MARK}\n' + '  \n'.join(lines).replace('?.', '?')

    def next_step(self, name, path):
        "Where a path goes on from a notebook"
        after = path['notebooks'][path['notebooks'].index(name) + 1:]
        if not after:
            return f"Here the path [{path['title']}](index.ipynb) ends."
        return f"Next on [{path['title']}](index.ipynb): {self.named_link(after[0])}."

    def named_link(self, name): return f'{link(name)}, {title(self.cells[name])}'

    def with_cells(self, name):
        "A notebook's cells with its two paragraphs of the course, newly written"
        cells = list(self.cells[name])
        top = next(i for i, c in enumerate(cells) if re.search(r'^# .+', text(c), re.M)
                   and c['cell_type'] == 'markdown')
        cells[top] = appended(cells[top], self.header(name))
        end = len(cells)
        while end > top + 1 and cells[end - 1]['cell_type'] == 'code' and not is_shown(cells[end - 1]):
            end -= 1
        if cells[end - 1]['cell_type'] == 'markdown' and end - 1 > top:
            cells[end - 1] = appended(cells[end - 1], self.footer(name))
            return cells
        return [*cells[:end], prose('course-footer', self.footer(name)), *cells[end:]]

    def for_index(self):
        "What the index's cells of the course hold, by their names"
        return {'paths': self.paths_table(), 'notebooks': self.notebooks_table()}

    def paths_table(self):
        "The reading paths: minutes, and a link for each step"
        out = []
        for path in self.paths.values():
            steps = [name for name in path['notebooks'] if name in self.cells]
            total = sum(minutes(self.cells[name]) for name in steps)
            takes = f'**{len(steps)} notebooks, {hours(total)}:**'
            out.append(f"### {path['title']}\n\n{path['about']} {takes}\n")
            out += [f'{i}. {link(name, title(self.cells[name]))}, {minutes(self.cells[name])} min'
                    for i, name in enumerate(steps, 1)]
            out.append('')
        return '\n'.join(out).rstrip()

    def notebooks_table(self):
        "All notebooks, in the order of their names"
        rows = ['| notebook | shelf | minutes | module | what it shows |', '| --- | --- | --- | --- | --- |']
        for name in self.names:
            entry, cells = self.entries[name], self.cells[name]
            exported = f'`{module(cells)}`' if module(cells) else ''
            rows.append(f'| {link(name)} | {entry.shelf} | {minutes(cells)} | {exported} | {entry.shows} |')
        return '\n'.join(rows)


def appended(cell, paragraph): return with_text(cell, f'{text(cell).rstrip()}\n\n{paragraph}')


def prose(cell_id, source):
    "A Markdown cell, as nbdev writes it"
    return dict(cell_type='markdown', id=cell_id, metadata={}, source=source.splitlines(keepends=True))


def index_cells(course, cells):
    "The index's cells, those of the course newly written"
    filled = course.for_index()
    found = set()
    out = []
    for cell in cells:
        named = re.match(r'<!-- course: (\w+) -->', text(cell))
        if named and cell['cell_type'] == 'markdown':
            found.add(named[1])
            cell = cell | {'source': f'{named[0]}\n{filled[named[1]]}'.splitlines(keepends=True)}
        out.append(cell)
    assert found == set(filled), f'nbs/index.ipynb has cells for {found}, and not for {set(filled)}'
    return out


def as_file(notebook): return json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + '\n'


def outdated(nbs):
    "The files that would change, and what they should hold"
    course = Course(nbs)
    wanted = {f'{name}.ipynb': course.with_cells(name) for name in course.names}
    wanted['index.ipynb'] = index_cells(course, read_cells(course.nbs/'index.ipynb'))
    for name, cells in wanted.items():
        path = course.nbs/name
        notebook = json.loads(path.read_text(encoding='utf-8'))
        if notebook['cells'] != cells:
            yield path, as_file(notebook | {'cells': cells})


def unsolved(course):
    "Lessons with exercises that no notebook of solutions names"
    for name, cells in course.cells.items():
        exercises = any(re.search(r'^#+ .*\bexercises?\b', text(c), re.M | re.I) for c in cells)
        if exercises and not any(re.search(rf'\b{re.escape(name)}\b', s) for s in course.solutions.values()):
            yield name


def check_course(nbs=ROOT/'nbs'):
    "Every notebook has its place in the course, and says what comes before it and after it"
    problems = list(Course(nbs).problems())
    if not problems:
        problems = [f'{p.relative_to(ROOT)}: its place in the course is out of date: run `make readme`.'
                    for p, _ in outdated(nbs)]
    assert not problems, '\n'.join(problems)


def promise(cells):
    "What a notebook promises below its title"
    prose = '\n'.join(text(c) for c in cells if c['cell_type'] == 'markdown')
    found = re.search(r'^> (.+?)\.?$', prose, re.M)
    return found[1] if found else title(cells)


def add_missing(course):
    "Entries for new notebooks; one that is named like a longer form of another follows it on its paths"
    path = course.nbs/'course.toml'
    table = path.read_text(encoding='utf-8')
    for name in [name for name in course.cells if name not in course.entries]:
        parts = [other for other in course.cells if name.startswith(f'{other}_')]
        before = max(parts, key=len, default='')
        needs = f'needs = ["{before}"]\n' if before else ''
        shows = json.dumps(promise(course.cells[name]), ensure_ascii=False)
        table = table.rstrip() + f'\n\n[notebooks.{name}]\nshelf = "lesson"\nshows = {shows}\n{needs}'
        if before:
            # The last of those that follow `before` already, e.g. a part 3 after a part 2
            steps = rf'^    "{before}",\n(    "{before}_\w+",\n)*'
            table = re.sub(steps, rf'\g<0>    "{name}",\n', table, flags=re.M)
        print(f'added: {name}' + (f', after {before}' if before else ''))
    path.write_text(table, encoding='utf-8')


if __name__ == '__main__':
    here = ROOT/'nbs'
    if '--add' in sys.argv:
        add_missing(Course(here))
    if '--check' in sys.argv:
        try: check_course(here)
        except AssertionError as e: sys.exit(str(e))
    else:
        problems = list(Course(here).problems())
        if problems:
            sys.exit('\n'.join(problems))
        only = [name for name in sys.argv[1:] if not name.startswith('-')]
        for path, new in outdated(here):
            if only and path.stem not in only: continue
            path.write_text(new, encoding='utf-8')
            print(f'written: {path.relative_to(ROOT)}')
    if names := list(unsolved(Course(here))):
        print(f"note: no notebook of nbs/solutions names these, which have exercises: {', '.join(names)}")
