"""Finds assertions that depend on how long something took, and waits that give up too early: a busy machine
fails them.

A name is *timed* if a clock's reading flows into it: by assignment, by `append`, or as what a function
returns. Asserting that a timed value lies above or below another (other than 0) depends on the machine and
on everybody who is using it. What a clock is needed for elsewhere, to print or to leave a loop that hangs,
is allowed.
"""
import ast, re

# CPU time (`process_time`) is not among them: it does not depend on what else the machine is doing
CLOCKS = {
    'perf_counter',
    'perf_counter_ns',
    'monotonic',
    'monotonic_ns',
    'default_timer',
    'elapsed_time',
    'timeit',
    'bandwidth',
    'measured_machine',
    '_fastest',
    '_link',
    '_launch',
}  # our own
# of what a step writes down
TIMED_KEYS = {'data_wait_seconds', 'tokens_per_s', 'eta_s'}
GROWS = {'append', 'extend', 'appendleft'}
WAITS = {'join', 'wait', 'poll', 'communicate', 'alarm', 'within'}
PATIENCE = 300     # seconds: the least that a wait may be limited to

def called(node):
    "Name of the function or method that a call calls"
    f = node.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ''

def is_clock(node):
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in TIMED_KEYS
    if not isinstance(node, ast.Call): return False
    of_time = isinstance(node.func, ast.Attribute) and getattr(node.func.value, 'id', '') == 'time'
    return called(node) in CLOCKS or of_time and called(node) == 'time'

def is_timed(expression, timed):
    "Whether a clock's reading is part of an expression's value"
    return any(is_clock(n) or isinstance(n, ast.Name) and n.id in timed for n in ast.walk(expression))

def names(target):
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}

def flows(tree):
    "Pairs of names and the expression that flows into them"
    for n in ast.walk(tree):
        if isinstance(n, ast.Assign):
            for target in n.targets: yield from pairs(target, n.value)
        elif isinstance(n, (ast.AugAssign, ast.NamedExpr, ast.AnnAssign)) and n.value:
            yield names(n.target), n.value
        elif isinstance(n, (ast.For, ast.comprehension)): yield names(n.target), n.iter
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in GROWS:
            yield from ((names(n.func.value), arg) for arg in n.args)
        elif isinstance(n, ast.FunctionDef):
            for r in ast.walk(n):
                if isinstance(r, ast.Return) and r.value: yield {n.name}, r.value

def pairs(target, value):
    "`a, b = f(), g()` is two assignments"
    both = (
        isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
    )
    if both: yield from ((names(t), v) for t, v in zip(target.elts, value.elts))
    elif isinstance(value, ast.Lambda): yield names(target), value.body
    else: yield names(target), value

def timed_names(tree, before):
    "All names in a cell into which a clock's reading flows, if it does into those of `before`"
    timed, edges = set(before), list(flows(tree))
    while True:
        more = {name for targets, value in edges if is_timed(value, timed) for name in targets} - timed
        if not more: return timed
        timed |= more

def kept(tree):
    "Names that a cell leaves behind"
    for n in tree.body:
        if isinstance(n, ast.FunctionDef): yield n.name
        elif isinstance(n, ast.Assign):
            for target in n.targets: yield from names(target)

def is_zero(node): return isinstance(node, ast.Constant) and node.value == 0

def depends(test, timed):
    "Whether an asserted expression compares a timed value with anything but 0"
    for n in ast.walk(test):
        if isinstance(n, ast.Compare) and any(
            isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in n.ops
        ):
            sides = [n.left, *n.comparators]
            for a, b in zip(sides, sides[1:]):
                if (is_timed(a, timed) or is_timed(b, timed)) and not is_zero(a) and not is_zero(b):
                    return True
    return False

def limits(node):
    "What a call waits for, what is added to a clock's reading, and default waiting times of functions"
    if isinstance(node, ast.Call):
        yield from (k.value for k in node.keywords if k.arg == 'timeout')
        if called(node) in WAITS: yield from node.args[:1]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_clock(node.left): yield node.right
    if isinstance(node, ast.FunctionDef) and any(is_clock(n) for n in ast.walk(node)):
        given = zip(node.args.args[::-1], node.args.defaults[::-1])
        yield from (value for name, value in given if name.arg in ('seconds', 'timeout'))

def impatient(node):
    "Whether a wait is limited to a number of seconds that a busy machine may need"
    values = [v.value for v in limits(node) if isinstance(v, ast.Constant)]
    return any(type(v) in (int, float) and 0 < v < PATIENCE for v in values)

# Without a clock, and without a wait for a number of seconds, nothing can be found.
SUSPECT = re.compile(
    rf"\b(time|timeout|{'|'.join(CLOCKS | TIMED_KEYS)})\b|\b({'|'.join(WAITS)})[\s(]*\(\s*[\d.]"
)
def found(cells):
    "Assertions that depend on a clock, and impatient waits, in the code of a notebook's cells in order"
    if not any(map(SUSPECT.search, cells)): return
    timed = set()
    for tree in map(ast.parse, cells):
        here, left = timed_names(tree, timed - set(kept(tree))), set(kept(tree))
        here |= timed_names(tree, timed) - left
        guards = {n for loop in ast.walk(tree) if isinstance(loop, ast.While) for n in ast.walk(loop)}
        for n in ast.walk(tree):
            if isinstance(n, ast.Assert) and n not in guards and depends(n.test, here): yield ast.unparse(n)
            if impatient(n): yield ast.unparse(n).split('\n')[0]
        timed = timed - left | here & left
