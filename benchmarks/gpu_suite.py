"""All that this project measures on a GPU, in one call of nine minutes, with torch, Triton and numpy alone.

    python benchmarks/gpu_suite.py --pack   first, anywhere, with the Triton and Python of the machine with
                                            the card: compile all kernels into .gpu_cache; again after changes
    python benchmarks/gpu_suite.py          there; [--only ssd,tiles] [--most SECONDS] [--out FILE]
                                            [--commit NAME]
    python benchmarks/gpu_suite.py --dry    toy sizes on the CPU; nothing is kept

What must travel: elleci, benchmarks, data, and .gpu_cache, which git ignores. `--pack` prints how large it
is, and run twice, that it had nothing to compile. It takes mamba-ssm and Liger's kernels along where they
are installed.

The parts stand in `PARTS`, in the order of their worth, and run in it or in that of --only. Each runs in a
process of its own and is stopped after its seconds, so that what one breaks or takes is not lost to the
others. Each row is a line of the result, data/results/gpu-<commit>.jsonl, on disk before the next is
measured; a later call appends to it. The table at the end has the rows that matter most, and what failed.
Exit code 1: a part broke, or a kernel computes something wrong. Targets that were missed are results.
"""
import argparse, contextlib, importlib, json, os, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path
# Elleci is found here where it is not installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from gpu import kernel_cache
from gpu.rows import Context, most, note, read_rows, write_row

# The parts, functions of modules of the folder gpu, with the seconds that each may take at most.
PARTS = {
    'machine': 25,           # the card; copy, products and link: the rates that the others are held against
    'numerics': 40,          # every kernel against float64; documents bit by bit; the same bits twice
    'recipe.resident': 170,  # twenty steps of elleci-1b5-12gib under 12 GiB, against the account
    'recipe.rows': 50,       # the same tokens in larger micro-batches: the card decides, not the host
    'recipe.streamed': 60,   # the same with weights and states in RAM, under 3 GiB
    'recipe.ordinary': 50,   # the ordinary step under 12 GiB, without ternary copies of all weights
    'account': 80,           # thirty configurations: peaks against the account; the allocator's history
    'ssd': 40,               # the scan against mamba-ssm and chunked torch: time, floors, peak memory
    'loss': 40,              # linear cross-entropy against Liger's (where installed) and torch's
    'bitnet': 45,            # ternary layers against bf16 ones; packed weights at batch one
    'attention': 30,         # documents in one launch against a mask, T from 1k to 32k
    'decode': 30,            # a token of the whole 1.5B model, with a CUDA graph and without
    'step_time': 40,         # seconds of eight kinds of steps against those predicted from the rates
    'baselines': 40,         # GPT-2-sized models under caps: peaks against the account
    'engine': 60,            # layer-major: the ordinary step's weights, no growth, pinned memory
    'fused': 20,             # convolution, norms, SwiGLU's gate: GB/s
    'block': 20,             # a Mamba-2 block with kernels and without
    'long_rows': 25,         # the eigenstate scan, and sparse attention to 32k
    'switches': 90,          # torch.compile, attention's back-ends, settings of the machine, one by one
    'tiles': 60,             # the sizes in `_tiles`, tried out
}
# The module of a part, where it isn't called like the part.
MODULES = dict(machine='training', account='training', step_time='training', baselines='training', ssd='scan',
               block='scan', tiles='scan', long_rows='attention', fused='decode')
TOTAL = 520     # seconds, of all parts
GRACE = 4       # seconds after its limit when a part is stopped
LEAST = 5       # seconds that a part needs to be worth its start
CAPABILITY = 90
# Of an H100, until the part `machine` has measured them.
STEP_MACHINE = dict(name='assumed', matmul=7.8e14, fp32=5e13, int8=1.5e15, memory=3e12)
STEP_MACHINE |= dict(link_in=5e10, link_out=5e10)
ASSUMED = dict(bandwidth=3e12, flops=7.8e14, step_machine=STEP_MACHINE)

def find(name):
    "The function of a part"
    module, _, function = name.partition('.')
    return getattr(importlib.import_module(f'gpu.{MODULES.get(module, module)}'), function or module)

# ------------------------------------------------------------------ in the process of a part

def part_rows(run, ctx, counts):
    "The rows of a part, and what it compiled"
    yield from run(ctx)
    if counts: yield most('kernels compiled here', counts['compiled'], '', 0, **counts)

def run_part(a):
    "Load a part, wait until it is told to begin, write its rows"
    if a.dry:
        # Kernels are interpreted, and the checks know how to do that in less time.
        sys.path.append(str(kernel_cache.ROOT/'.ci'))
        from interpreter import speed_up_interpreter
        speed_up_interpreter()
    run = find(a.part)
    # Torch imports it at the first operator of ours.
    if 'torch' in sys.modules: importlib.import_module('torch._dynamo')
    told = json.loads(sys.stdin.readline() or sys.exit())
    torch, has_triton = sys.modules.get('torch'), 'triton' in sys.modules and not a.dry
    stamp = told['stamp'] | dict(part=a.part)
    if torch and torch.cuda.is_available(): stamp['hardware'] = torch.cuda.get_device_name()
    ctx = Context(a.dry, told['limit'], a.absent, told['machine'], a.out.parent)
    counts = kernel_cache.count_compilations() if has_triton else {}
    with kernel_cache.absent_card(CAPABILITY) if a.absent else contextlib.nullcontext():
        for r in part_rows(run, ctx, counts): write_row(a.out, stamp | r)

# ------------------------------------------------------------------ in the process of the suite

class Part:
    "The process of a part: loaded while the one before it runs, told to begin, followed, stopped"
    def __init__(self, name, a):
        self.name, self.out, self.log = name, a.out, tempfile.TemporaryFile('w+')
        flags = [f'--{flag}' for flag in ('dry', 'absent') if getattr(a, flag)]
        env = os.environ | kernel_cache.SETTINGS | dict(PYTHONUNBUFFERED='1', **a.env)
        command = [sys.executable, __file__, '--part', name, '--out', str(a.out), *flags]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=self.log,
                                        stderr=self.log, text=True, process_group=0)

    def begin(self, limit, machine, stamp):
        self.began, self.limit, self.stamp = time.monotonic(), limit, stamp | dict(part=self.name)
        self.place = self.out.stat().st_size
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(dict(limit=limit, machine=machine, stamp=stamp)) + '\n')
            self.process.stdin.flush()

    def stop(self):
        "End it, and what it has started"
        with contextlib.suppress(ProcessLookupError): os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def follow(self):
        "Its rows as they come, one of ours at the end if it broke or was stopped"
        while True:
            ended = self.process.poll() is not None
            late = not ended and time.monotonic() - self.began > self.limit + GRACE
            if late: self.stop()
            rows, self.place = read_rows(self.out, self.place)
            yield from rows
            if ended or late: break
            time.sleep(.1)
        seconds = round(time.monotonic() - self.began, 1)
        self.log.seek(0)
        if late: r = note(f'stopped after {seconds} s', cut=True)
        elif self.process.returncode: r = note('broke', error=True, said=self.log.read()[-3000:])
        else: r = note('ended')
        write_row(self.out, self.stamp | r | dict(seconds=seconds))
        rows, self.place = read_rows(self.out, self.place)
        yield from rows

def line(r):
    def number(v): return '' if v is None else f'{v:.4g}' if isinstance(v, float) else str(v)
    missed = '  missed'*(r['met'] is False) + '  cut'*bool(r.get('cut'))
    if is_wrong(r): missed = '  FAILED'
    numbers = ' '.join(f'{number(r[k]):>9}' for k in ('target', 'measured', 'ratio'))
    return f'{r["part"]:16} {numbers} {r["unit"]:14} {r["name"]}{missed}'[:150]

def is_wrong(r): return bool(r.get('error') or r.get('must') and not r['met'])

def run_suite(a, names):
    "Run the parts; all rows"
    began, found, machine = time.monotonic(), [], ASSUMED
    stamp = dict(hardware='CPU' if a.dry else 'unknown', commit=a.commit, dry=a.dry)
    ahead = Part(names[0], a)
    try:
        for name, following in zip(names, [*names[1:], None]):
            part, ahead = ahead, following and Part(following, a)
            limit = min(a.parts[name], a.most, TOTAL - GRACE - (time.monotonic() - began))
            if limit < LEAST:
                part.stop()
                found.append(write_row(a.out, stamp | note('no time was left', part=name, cut=True)))
                continue
            part.begin(limit, machine, stamp)
            for r in part.follow():
                found.append(r)
                machine = machine | (r.get('machine') or {})
                print(line(r), flush=True)
                if r.get('error') and r.get('said'): print(r['said'][-600:], flush=True)
    finally:
        for p in (ahead, part):
            if p and p.process.poll() is None: p.stop()
    return found

def summary(rows, names, seconds):
    "The lines that matter most, in fewer than 12,000 characters"
    lines = [f'\n{"part":16} seconds  rows  reached  missed']
    for name in names:
        own = [r for r in rows if r['part'] == name]
        took = sum(r.get('seconds') or 0 for r in own[-1:])
        met = [r['met'] for r in own]
        lines.append(f'{name:16} {took:7} {len(own):5} {met.count(True):8} {met.count(False):7}')
    wrong = [r for r in rows if is_wrong(r)]
    head = [r for r in rows if r.get('head') and r not in wrong]
    rest = [r for r in rows if (r['met'] is False or r.get('cut')) and r not in wrong + head]
    lines += ['', *map(line, wrong[:15] + head[:50] + rest[:20])]
    return '\n'.join(lines + [f'{len(rows)} rows in {seconds:.0f} s'])

def pack(a):
    "Fill the cache: every part at its real sizes, without a card"
    kernel_cache.CACHE.mkdir(exist_ok=True)
    kernel_cache.settle()
    site, counted, rows = kernel_cache.CACHE/'site', {}, []
    for name in ('mamba_ssm', 'einops', 'liger_kernel'):
        spec = importlib.util.find_spec(name)
        if not spec or (site/name).exists(): continue
        shutil.copytree(Path(spec.origin).parent, site/name, ignore=shutil.ignore_patterns('__pycache__'))
    with tempfile.TemporaryDirectory() as folder:
        a.absent, a.out = True, Path(folder)/'rows'
        a.env = dict(TRITON_INTERPRET='0', CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1')
        a.env |= dict(PYTHONPATH=str(site), TRITON_LIBCUDA_PATH=kernel_cache.stub_libcuda(folder))
        a.out.touch()
        waiting, running = [n for n in a.names if n != 'machine'], []
        while waiting or running:
            while waiting and len(running) < os.cpu_count():
                running.append(Part(waiting.pop(0), a))
                running[-1].begin(3600, ASSUMED, {})
            time.sleep(.1)
            for part in [p for p in running if p.process.poll() is not None]:
                running.remove(part)
                part.place = 0
                own = [r for r in part.follow() if r['part'] == part.name]
                rows += own
                for r in own:
                    if 'compiled' in r: counted[part.name] = {k: r[k] for k in kernel_cache.COUNTED}
                    if r.get('error') or r.get('gave_up'): print(line(r), r.get('said', ''), flush=True)
                print(f'{part.name:16} {counted.get(part.name)}', flush=True)
    kernel_cache.settle()
    (kernel_cache.CACHE/'commit').write_text(a.commit)
    size = sum(p.stat().st_size for p in kernel_cache.CACHE.rglob('*') if p.is_file())
    compiled = sum(c['compiled'] for c in counted.values())
    print(f'{size/2**20:.1f} MiB in {kernel_cache.CACHE.name}, {compiled} kernels compiled')
    return any(r.get('error') for r in rows)

def commit():
    "Of the code that runs; where there is no git, of that which was packed"
    from runner import commit
    packed = kernel_cache.CACHE/'commit'
    return commit() or (packed.read_text() if packed.exists() else 'unknown')

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', default='', metavar='PARTS')
    p.add_argument('--most', type=float, default=TOTAL, metavar='SECONDS', help='of a part')
    p.add_argument('--dry', action='store_true')
    p.add_argument('--pack', action='store_true')
    p.add_argument('--out', type=Path, metavar='FILE')
    p.add_argument('--commit', default='')
    p.add_argument('--part', help=argparse.SUPPRESS)
    p.add_argument('--absent', action='store_true', help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.part: return run_part(a)
    only = a.only.split(',') if a.only else []
    if unknown := [n for n in only if n not in PARTS]:
        p.error(f'{unknown[0]!r} is no part: choose from {", ".join(PARTS)}.')
    a.parts, a.names = PARTS, ['machine', *(n for n in only or PARTS if n != 'machine')]
    a.commit, a.env = a.commit or commit(), {}
    if a.pack: sys.exit(pack(a))
    run_all(a)

def run_all(a):
    "The suite, its rows in a file, its summary on the screen"
    began = time.monotonic()
    # So that what is running ends with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        if a.dry:
            a.out = a.out or Path(folder)/'rows.jsonl'
            a.env = dict(TRITON_INTERPRET='1', MAMBA_DETERMINISTIC='1', CUDA_VISIBLE_DEVICES='')
        else:
            kernel_cache.settle()
            path = filter(None, [os.environ.get('PYTHONPATH'), str(kernel_cache.CACHE/'site')])
            a.env = dict(PYTHONPATH=os.pathsep.join(path))
        a.out = a.out or kernel_cache.ROOT/'data'/'results'/f'gpu-{a.commit}.jsonl'
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.touch()
        rows = run_suite(a, a.names)
    print(summary(rows, a.names, time.monotonic() - began), 'in the folder that is gone' if a.dry else a.out)
    sys.exit(any(map(is_wrong, rows)))

if __name__ == '__main__': main()
