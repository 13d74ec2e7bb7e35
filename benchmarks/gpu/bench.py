"What the parts of gpu_suite.py share: the stopwatch, inputs, and the package mamba-ssm."
import contextlib, gc, importlib, importlib.util, math, statistics, sys, time, types
from typing import NamedTuple
import torch
from torch import Tensor
from elleci.kernels.triton_compat import interpreted
from gpu.rows import check as check, most as most, note as note, row as row

# (B, T, H, P, G, N)
RECIPE_A, WIDE, LONG = (4, 1024, 64, 64, 1, 16), (8, 4096, 64, 64, 1, 128), (1, 32_768, 64, 64, 1, 16)
TOY, TOY_WIDE = (1, 70, 2, 16, 1, 16), (1, 70, 2, 16, 1, 32)
# how the names of subjects begin that are not ours
PEERS = ('mamba_ssm', 'chunked', 'torch', 'plain', 'causal_conv1d', 'liger')

class Timing(NamedTuple):
    "Milliseconds on the device; `host`: how long Python took to ask for it"
    ms:float
    low:float
    high:float
    host:float
    repeats:int
    def fields(self):
        return dict(ms=self.ms, quartiles=[self.low, self.high], host_ms=self.host, repeats=self.repeats)

class Stopwatch:
    "Medians over rounds in which each subject runs once, the L2 cold, the queue full: without Python's share"
    def __init__(self, ctx):
        self.absent, self.gpu = ctx.absent, not (ctx.dry or ctx.absent)
        if not self.gpu: return
        size = max(2*torch.cuda.get_device_properties(0).L2_cache_size, 2**26)
        self.cache = torch.empty(size, dtype=torch.uint8, device='cuda')
        torch.cuda._sleep(1000)
        self.cycles = 1e7/self._events(lambda: torch.cuda._sleep(10**7))    # per ms

    def _record(self, f):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        return start, end

    def _events(self, f):
        start, end = self._record(f)
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def _warm(self, f):
        "(ms, host ms) of a warm call; raises what f raises"
        if not self.gpu:
            f()
            return 1., 1.
        for _ in range(3): f()
        torch.cuda.synchronize()
        began = time.perf_counter()
        f()
        host = 1e3*(time.perf_counter() - began)
        torch.cuda.synchronize()
        return self._events(f), host

    def _once(self, f, host):
        "What a call took: ms on a CPU, a pair of events on a GPU"
        if not self.gpu:
            began = time.perf_counter()
            f()
            return 1e3*(time.perf_counter() - began)
        self.cache.zero_()
        # Half as much again was too little on a slow host: some of Python was in the figures.
        torch.cuda._sleep(int(self.cycles*min(40., 3*host + .2)))
        return self._record(f)

    def __call__(self, subjects, seconds=1.5):
        "{name: Timing or the exception} for {name: function}; about `seconds` in all"
        out, warm = {}, {}
        for name, f in subjects.items():
            try: warm[name] = self._warm(f)
            except Exception as e:
                out[name] = e
                free()
        if self.absent: return out | dict.fromkeys(warm, Timing(1., 1., 1., 1., 1))
        rounds = 2
        if self.gpu and warm:
            a_round = sum(2*ms + 3*host + .5 for ms, host in warm.values())
            rounds = max(7, min(60, int(1e3*seconds/a_round)))
        taken = {name: [] for name in warm}
        for _ in range(rounds):
            for name, (_, host) in warm.items(): taken[name].append(self._once(subjects[name], host))
            if self.gpu: torch.cuda.synchronize()
        for name, t in taken.items():
            ms = [s.elapsed_time(e) for s, e in t] if self.gpu else t
            low, mid, high = statistics.quantiles(ms, n=4)
            out[name] = Timing(mid, low, high, warm[name][1], rounds)
        return out

    def rows(self, subjects, seconds, label):
        "A row for each subject that broke; {name: Timing} of the others is what `yield from` gives"
        times = self(subjects, seconds)
        for name, t in times.items():
            if isinstance(t, Exception): yield failed(f'{name}, {label}', t)
        return {name: t for name, t in times.items() if not isinstance(t, Exception)}

def free():
    gc.collect()
    if torch.cuda.is_available(): torch.cuda.empty_cache()

def peak(f):
    "Bytes that f allocates at most beyond what was there"
    f()
    free()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = f()
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before

def failed(name, e):
    "A subject that could not run: a failure of the suite, unless it is a peer's or the card is too small"
    said = f'{name}: {type(e).__name__}: {" ".join(str(e).split())[:300]}'
    ours = not (isinstance(e, torch.OutOfMemoryError) or name.startswith(PEERS))
    return note(said, error=ours, gave_up=True)

def of_the_copy(ctx, label, nbytes, t, target=None, **more):
    share = nbytes/t.ms*1e3/ctx.machine['bandwidth']
    return row(f'{label}: of the copy', share, 'of the bandwidth', target, **more)

def faster(label, mine, others):
    for n, t in others.items(): yield row(f'{label}: faster than {n}', t.ms/mine.ms, '×', **t.fields())

def guarded(ctx, cases, least):
    "The rows of {name: function that gives rows}; what broke, or that there was no time"
    for n, (name, f) in enumerate(cases.items()):
        if ctx.left < least and n:
            yield note(f'cut for time: {name} and what follows', cut=True)
            return
        try: yield from f()
        except Exception as e: yield failed(name, e)
        free()

def documents_of(T, length, rows, device):
    return (torch.arange(T, device=device)//length).expand(rows, T).contiguous()

def scan_inputs(shape, dtype=torch.bfloat16, device='cpu', docs=False, seed=0, state=False):
    "Inputs of `ssd` as a layer makes them"
    (b, T, H, P, G, N), gen = shape, torch.Generator(device).manual_seed(seed)
    def normal(*s): return torch.randn(s, generator=gen, device=device)
    def even(low, high, *s): return torch.rand(s, generator=gen, device=device)*(high - low) + low
    e = {k: normal(*s).to(dtype) for k, s in (('x', (b, T, H, P)), ('B', (b, T, G, N)), ('C', (b, T, G, N)))}
    e |= dict(dt=even(math.log(1e-3), math.log(1e-1), b, T, H).exp(), A=-even(1, 16, H), D=normal(H))
    if state: e['initial_state'] = normal(b, H, P, N)
    if docs: e['seq_idx'] = documents_of(T, max(T//5, 30), b, device).int()
    return e

def leaves_of(e):
    def is_leaf(v): return isinstance(v, Tensor) and v.is_floating_point()
    return {k: v.detach().requires_grad_() if is_leaf(v) else v for k, v in e.items()}

def both_ways(f, e):
    "A function that runs y = f(**e) and its gradients"
    e, g = leaves_of(e), []
    wanted = [v for v in e.values() if isinstance(v, Tensor) and v.requires_grad]
    def run():
        y = f(**e)
        if not g: g.append(torch.randn_like(y))
        return torch.autograd.grad(y, wanted, g)
    return run

def no_grad(f, e):
    def run():
        with torch.no_grad(): return f(**e)
    return run

WAYS = {'forward': no_grad, 'forward + backward': both_ways}

def race(ctx, watch, label, fs, seconds=.6, nbytes=None):
    "Rows of ours beside others: its time, or GB/s and share of the copy; and how much faster it is"
    good = yield from watch.rows(fs, seconds, label)
    if (mine := good.pop('ours', None)) is None: return
    if nbytes is None: yield row(label, mine.ms, 'ms', **mine.fields())
    else:
        yield row(label, nbytes/mine.ms/1e6, 'GB/s', **mine.fields())
        yield of_the_copy(ctx, label, nbytes, mine)
    yield from faster(label, mine, good)

def relative(a, b): return ((a.float() - b.float()).norm()/b.float().norm()).item()

def mamba_ssm(module='ssd_combined'):
    "A module of mamba_ssm.ops.triton, past its __init__, which asks for a CUDA extension; None where absent"
    if 'mamba_ssm' not in sys.modules:
        if (spec := importlib.util.find_spec('mamba_ssm')) is None: return None
        package = types.ModuleType('mamba_ssm')
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules['mamba_ssm'] = package
    try: m = importlib.import_module(f'mamba_ssm.ops.triton.{module}')
    except ImportError as e:
        print(f'mamba_ssm.ops.triton.{module} cannot be imported: {e}', file=sys.stderr)
        return None
    if interpreted():                                           # let its launchers run on CPU tensors
        torch.cuda.device = lambda *_: contextlib.nullcontext()
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=1)
    return m

def quick_tuning():
    "Let kernels that tune themselves (mamba-ssm's) take 25 ms a configuration, not 125"
    autotuner = importlib.import_module('triton.runtime.autotuner')
    bench = importlib.import_module('triton.testing').do_bench
    def do_bench(self): return lambda f, quantiles: bench(f, warmup=5, rep=20, quantiles=quantiles)
    autotuner.Autotuner.do_bench = property(do_bench)
