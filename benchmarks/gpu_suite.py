"""All that this project measures on a GPU, in at most 8 minutes, with torch, Triton and numpy alone:
data/results/<gpu>-<commit>.json.

    python benchmarks/gpu_suite.py [--only ssd,tiles] [--out FILE] [--commit NAME]
    python benchmarks/gpu_suite.py --dry                            # toy sizes on the CPU; nothing is written
    python benchmarks/gpu_suite.py --only compile --capability 90   # fill Triton's cache for an absent card

Parts, each in a process of its own, so that what one breaks is not lost to the others:
  machine   the card; copy and matmul, the ceilings that the others are held against (always runs first)
  compile   every kernel that the parts chosen will launch, compiled on all cores before the card is used
  numerics  every kernel against float64, forward and gradients; documents bit by bit; the same bits twice
            (here a miss is a failure)
  ssd       the scan against mamba-ssm (where installed) and chunked torch: time, share of the floors, peak
            memory
  block     a Mamba-2 block of recipe A, with kernels and without; its peak against the account's
  fused     convolution, norms, SwiGLU's gate: GB/s, against plain torch
  attention documents in one launch against a mask, T from 1k to 32k: time, peak memory
  long_rows the eigenstate scan's kernels against float64 and torch; sparse attention against dense, to 32k
  decode    one token for many rows; a token of the whole 1.5B model, with a CUDA graph and without
  bitnet    ternary layers against bf16 ones, with both backward passes; packed weights at batch one
  loss      linear cross-entropy against Liger's (where installed) and torch's: time and peak memory
  account   thirty training configurations, peaks predicted against measured; the allocator's history replayed
  baselines chatgot-85m at batch 8 under a cap of 4 GiB, GPT-2-sized models under others: peaks against the
            account
  step_time the link, launches, and seconds of real steps against those predicted from the rates
  layer_major  recipe A under a cap of 12 GiB, then 6.5 and 3: peaks against the account, seconds, copies,
            growth; the 8-bit Lion; pinned memory
  switches  torch.compile in each mode with CUDA graphs, attention's back-ends, scans, and settings of the
            machine, each against the same step without: time, peak memory, loss and gradients
  tiles     the sizes in `_tiles`, tried out
Results of parts that were not run are kept from an earlier run of the same card and commit. mamba-ssm: put
its folder on PYTHONPATH.
Exit code 1: a part broke, or a kernel computes something wrong. Targets that were missed are results.
"""
import argparse, contextlib, datetime, importlib, itertools, json, math, os, random, re, subprocess, sys
import tempfile, time
from pathlib import Path
# Elleci is found here where it is not installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
# The parts, with the seconds that each may take at most.
PARTS = dict(
    machine=30,
    compile=130,
    numerics=60,
    ssd=110,
    block=30,
    fused=25,
    attention=40,
    long_rows=40,
    decode=40,
    bitnet=60,
    loss=60,
    account=100,
    baselines=60,
    step_time=60,
    layer_major=150,
    switches=180,
    tiles=90,
)
TOTAL = 480
RESERVED = dict(layer_major=120)
COMPILED = (
    'numerics',
    'ssd',
    'block',
    'fused',
    'long_rows',
    'decode',
    'bitnet',
    'loss',
    'account',
    'step_time',
    'layer_major',
    'tiles',
)

def plain(o):
    "What JSON can hold"
    if isinstance(o, dict): return {str(k): plain(v) for k, v in o.items()}
    if isinstance(o, (list, tuple)): return [plain(v) for v in o]
    if isinstance(o, float) and not math.isfinite(o): return str(o)
    return o if o is None or isinstance(o, (bool, int, float, str)) else str(o)

# ------------------------------------------------------------------ in the process of a part

def run_part(a):
    "Run one part, a line of JSON for each row"
    from gpu.bench import Context
    if a.dry:
        # Kernels are interpreted, and the checks know how to do that in less time.
        sys.path.append(str(Path(__file__).resolve().parents[1]/'.ci'))
        from interpreter import speed_up_interpreter
        speed_up_interpreter()
    ctx = Context(a.dry, a.limit, a.only == [a.part], json.loads(a.machine))
    with open(a.rows, 'a') as f:
        for r in importlib.import_module(f'gpu.{a.part}').run(ctx):
            f.write(json.dumps(plain(r)) + '\n')
            f.flush()

def launches_of_share(a, k, n):
    "(name, launch) of the parts chosen that the k-th of n processes compiles"
    from gpu.ssd import peer_launches
    def launches(name): return importlib.import_module(f'gpu.{name}').launches(a.dry)
    fixed = [launch for name in COMPILED if name in a.only and name != 'tiles' for launch in launches(name)]
    tiles = launches('tiles') if 'tiles' in a.only else []
    # Shuffled, so that no share gets all the slow ones.
    for found in (fixed, tiles): random.Random(0).shuffle(found)
    # The kernels of others tune themselves: every process launches them, and compiles some configurations.
    peers = peer_launches(a.dry) if 'ssd' in a.only else []
    return fixed[k::n] + peers + tiles[k::n]

def compile_every_nth_configuration(k, n):
    "Have kernels that tune themselves compile every n-th of their configurations, and measure none"
    from triton.runtime.autotuner import Autotuner
    turn = itertools.count(1)
    def run(self, *args, **kwargs):
        for config in self.configs:
            self.best_config = config
            if next(turn) % n != k: continue
            # The tuner too skips a configuration that does not fit.
            with contextlib.suppress(Exception): self.fn.run(*args, **kwargs, **config.all_kwargs())
    Autotuner.run = run

def compile_share(a):
    """Compile every n-th launch of the parts chosen, and every n-th configuration of kernels that tune
    themselves"""
    import torch
    from elleci.kernels import triton_compat
    k, n = map(int, a.share.split('/'))
    driver = triton_compat.CompileOnlyDriver(a.capability)
    triton_compat.triton.runtime.driver.set_active(driver)
    torch.cuda.is_available = lambda: False
    todo = launches_of_share(a, k, n)
    compile_every_nth_configuration(k, n)
    with open(a.rows, 'a') as f:
        for name, launch in todo:
            driver.launch, before, began = name, len(driver.rows), time.monotonic()
            problem = ''
            try: launch()
            except Exception as e: problem = f'{type(e).__name__}: {" ".join(str(e).split())[:200]}'
            kernels = [
                dict(kernel=r.kernel, registers=r.registers, shared=r.shared, stack=r.stack)
                for r in driver.rows[before:]
            ]
            seconds = round(time.monotonic() - began, 2)
            f.write(json.dumps(dict(launch=name, seconds=seconds, kernels=kernels, problem=problem)) + '\n')
            f.flush()

# ------------------------------------------------------------------ in the process of the suite

def worker(args, a, log):
    env = {**os.environ, 'PYTHONUNBUFFERED': '1'}
    if a.dry: env |= dict(TRITON_INTERPRET='1', MAMBA_DETERMINISTIC='1', CUDA_VISIBLE_DEVICES='')
    if 'share' in ' '.join(args):
        env |= dict(TRITON_INTERPRET='0', CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1')
    return subprocess.Popen(
        [sys.executable, __file__, *args, *(['--dry'] if a.dry else [])], env=env, stdout=log, stderr=log
    )

def show(part, r):
    def number(v): return '' if v is None else f'{v:.4g}' if isinstance(v, float) else str(v)
    met = {True: '', False: '  missed', None: ''}[r.get('met')] + ('  FAILED' if r.get('error') else '')
    print(
        f"{part:11}{number(r['target']):>9}{number(r['measured']):>11}{number(r['ratio']):>9} "
        f"{r['unit']:18} {r['name']}{met}",
        flush=True,
    )

def finish(process, seconds):
    "Wait, at most so long; whether it ended by itself"
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False

def part(name, limit, machine, a, folder):
    "Rows of a part in a process of its own; what it said if it broke"
    rows, log = folder/f'{name}.rows', folder/f'{name}.log'
    rows.touch()
    began, shown, found = time.monotonic(), 0, []
    args = [
        '--part',
        name,
        '--rows',
        str(rows),
        '--limit',
        str(limit),
        '--machine',
        json.dumps(machine),
        '--only',
        ','.join(a.only),
    ]
    with open(log, 'w') as f:
        process, ended = worker(args, a, f), None
        while ended is None:
            if process.poll() is not None: ended = True
            elif time.monotonic() - began > limit + 5: ended = finish(process, 0)
            else: time.sleep(.1)
            lines = [l for l in rows.read_text().splitlines(True) if l.endswith('\n')]
            found += (new := [json.loads(l) for l in lines[shown:]])
            shown = len(lines)
            for r in new: show(name, r)
    result = dict(seconds=round(time.monotonic() - began, 1), rows=found)
    print(f'{name:11} {result["seconds"]} s', flush=True)
    if not ended: result['cut'] = f'stopped after {limit + 5:.0f} s'
    elif process.returncode: result['error'] = log.read_text()[-3000:]
    if any(r.get('cut') for r in found): result['cut'] = 'rows say what is missing'
    return result

def compile_all(names, limit, a, folder):
    "Every kernel of these parts into Triton's cache, on all cores"
    n, began = 1 if a.dry else min(os.cpu_count(), 24), time.monotonic()
    def args(k):
        return [
            '--share',
            f'{k}/{n}',
            '--capability',
            str(a.capability),
            '--only',
            ','.join(names),
            '--rows',
            str(folder / f'compile.{k}'),
        ]
    with open(folder/'compile.log', 'w') as log:
        processes = [worker(args(k), a, log) for k in range(n)]
        ended = [finish(p, max(0, limit - (time.monotonic() - began))) for p in processes]
    done = [
        json.loads(l)
        for k in range(n)
        if (folder / f'compile.{k}').exists()
        for l in (folder / f'compile.{k}').read_text().splitlines()
        if l.endswith('}')
    ]
    kernels = sum(len(d['kernels']) for d in done)
    problems = [f"{d['launch']}: {d['problem']}" for d in done if d['problem']]
    seconds = round(time.monotonic() - began, 1)
    r = dict(
        name=f'kernels for sm_{a.capability}, {seconds} s on {n} cores; '
        f'{len(problems)} launches that do not compile',
        target=None,
        measured=kernels,
        ratio=None,
        unit='kernels',
        problems=problems,
        launches=[d for d in done if not d['launch'].startswith('mamba')],
    )
    show('compile', r)
    result = dict(seconds=seconds, rows=[r])
    if not all(ended):
        result['cut'] = f'stopped after {limit:.0f} s: what is missing is compiled when it is launched'
    elif not done: result['error'] = (folder/'compile.log').read_text()[-3000:]
    return result

def results(a, chosen, folder):
    "Run the parts chosen; {part: result}, and what `machine` found"
    began, found, machine = time.monotonic(), {}, {}
    for i, name in enumerate(chosen):
        later = sum(RESERVED.get(n, 0) for n in chosen[i+1:])
        limit = min(PARTS[name], TOTAL - 8 - later - (time.monotonic() - began))
        if limit < 5:
            found[name] = dict(seconds=0, rows=[], cut='no time was left')
            print(f'{name}: no time was left')
            continue
        if name == 'compile':
            a.capability = a.capability or machine.get('capability') or 90
            todo = [n for n in COMPILED if n in chosen] or list(COMPILED)
            found[name] = compile_all(['decode'] if a.dry else todo, limit, a, folder)
        else: found[name] = part(name, limit, machine, a, folder)
        for r in found[name]['rows']: machine |= r.get('machine', {})
        for what in ('cut', 'error'):
            if what in found[name]: print(f'{name}: {what}: {found[name][what]}', flush=True)
        if name == 'machine' and 'flops' not in machine: break
    return found, machine

def write(a, found, machine, seconds):
    from tiny import ROOT, commit
    from elleci.core import atomic_write
    name = a.commit or commit() or 'unknown'
    card = re.sub(
        r'[^a-z0-9]+', '-', re.sub(r'nvidia|geforce', '', machine.get('device', 'unknown').lower())
    ).strip('-')
    path = Path(a.out) if a.out else ROOT/'data'/'results'/f'{card}-{name}.json'
    old = json.loads(path.read_text()) if path.exists() else {}
    parts = (old.get('parts', {}) if old.get('commit') == name and old.get('dry') == a.dry else {}) | found
    result = dict(machine=machine, commit=name, dry=a.dry, seconds=seconds, parts=parts,
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(f'written to {path}')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', default='', metavar='PARTS')
    p.add_argument('--dry', action='store_true')
    p.add_argument('--out', metavar='FILE')
    p.add_argument('--commit', help='where there is no git')
    p.add_argument('--capability', type=int, help='of the card to compile for')
    for hidden in ('part', 'rows', 'machine', 'share'): p.add_argument(f'--{hidden}', help=argparse.SUPPRESS)
    p.add_argument('--limit', type=float, help=argparse.SUPPRESS)
    a = p.parse_args()
    a.only = a.only.split(',') if a.only else []
    if a.share: return compile_share(a)
    if a.part: return run_part(a)
    if unknown := [n for n in a.only if n not in PARTS]:
        p.error(f'{unknown[0]!r} is no part: choose from {", ".join(PARTS)}.')
    chosen = [
        n
        for n in PARTS
        if not a.only
        or n in a.only
        or n == 'machine'
        or n == 'compile'
        and not a.dry
        and set(a.only) & set(COMPILED)
    ]
    if a.only == ['compile']: chosen = ['compile']
    elif not a.dry:
        import torch
        if not torch.cuda.is_available():
            raise SystemExit(
                'gpu_suite: torch sees no GPU here; --dry goes through all parts at toy size on the CPU.'
            )
    began = time.monotonic()
    print(f'{"part":11}{"target":>9}{"measured":>11}{"ratio":>9} {"unit":18} what')
    with tempfile.TemporaryDirectory() as folder: found, machine = results(a, chosen, Path(folder))
    seconds = round(time.monotonic() - began, 1)
    rows = [(n, r) for n, f in found.items() for r in f['rows']]
    missed = [r for _, r in rows if r.get('met') is False]
    wrong = [(n, r) for n, r in rows if r.get('error') or r.get('must') and not r['met']]
    broken = [n for n, f in found.items() if 'error' in f]
    print(
        f'{len(rows)} rows in {seconds} s; {sum(r.get("met") is True for _, r in rows)} targets reached, '
        f'{len(missed)} missed; '
        f'broken: {", ".join(broken) or "nothing"}; cut: '
        f'{", ".join(n for n, f in found.items() if "cut" in f) or "nothing"}'
    )
    for n, r in wrong: print(f'FAILED {n}: {r["name"]}')
    if not a.dry and chosen != ['compile'] or a.out: write(a, found, machine, seconds)
    sys.exit(1 if broken or wrong else 0)

if __name__ == '__main__': main()
