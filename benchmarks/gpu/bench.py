"What the parts of gpu_suite.py share: rows, the stopwatch, inputs, and the package mamba-ssm."
import contextlib, gc, importlib, importlib.util, math, statistics, sys, time, types
from typing import NamedTuple
import torch
from torch import Tensor
from elleci.kernels.triton_compat import interpreted
from gpu.rows import note as note, row as row

# (B, T, H, P, G, N)
RECIPE_A, WIDE, LONG = (4, 1024, 64, 64, 1, 16), (8, 4096, 64, 64, 1, 128), (1, 32_768, 64, 64, 1, 16)
# names of subjects that are not ours
PEERS = ('mamba_ssm', 'chunked', 'torch', 'plain', 'causal_conv1d')
TOY, TOY_WIDE = (1, 70, 2, 16, 1, 16), (1, 70, 2, 16, 1, 32)

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
    """Medians over rounds in which every subject runs once, with a cold L2 and the queue full, so that
    Python's share is not in them"""
    def __init__(self, ctx):
        self.absent, self.gpu = ctx.absent, not (ctx.dry or ctx.absent)
        if self.gpu:
            self.cache = torch.empty(
                max(2 * torch.cuda.get_device_properties(0).L2_cache_size, 2**26),
                dtype=torch.uint8,
                device='cuda',
            )
            # per ms
            torch.cuda._sleep(1000)
            self.cycles = 1e7/self._events(lambda: torch.cuda._sleep(10**7))

    def _events(self, f):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
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

    def __call__(self, subjects, seconds=1.5):
        "{name: Timing or the exception} for {name: function}; about `seconds` in all"
        out, warm = {}, {}
        for name, f in subjects.items():
            try: warm[name] = self._warm(f)
            except Exception as e:
                out[name] = e
                free()
        if self.absent: return out | dict.fromkeys(warm, Timing(1., 1., 1., 1., 1))
        rounds = (
            2
            if not self.gpu
            else max(
                7, min(60, int(1e3 * seconds / sum(2 * ms + 3 * host + 0.5 for ms, host in warm.values())))
            )
            if warm
            else 0
        )
        taken = {name: [] for name in warm}
        for _ in range(rounds):
            for name, (_, host) in warm.items():
                if not self.gpu:
                    began = time.perf_counter()
                    subjects[name]()
                    taken[name].append(1e3*(time.perf_counter() - began))
                    continue
                self.cache.zero_()
                # Half as much again was too little on a slow host: some of Python was in the figures.
                torch.cuda._sleep(int(self.cycles*min(40., 3*host + .2)))
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                subjects[name]()
                end.record()
                taken[name].append((start, end))
            if self.gpu: torch.cuda.synchronize()
        for name, t in taken.items():
            ms = [s.elapsed_time(e) for s, e in t] if self.gpu else t
            low, mid, high = statistics.quantiles(ms, n=4)
            out[name] = Timing(mid, low, high, warm[name][1], rounds)
        return out

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
    return note(
        said, error=not (isinstance(e, torch.OutOfMemoryError) or name.startswith(PEERS)), gave_up=True
    )

def scan_inputs(shape, dtype=torch.bfloat16, device='cpu', docs=False, seed=0, fill=True, state=False):
    "Inputs of `ssd` as a layer makes them; fill=False leaves the memory as it is"
    (b, T, H, P, G, N), gen = shape, torch.Generator(device).manual_seed(seed)
    def normal(*s):
        return (torch.randn(s, generator=gen, device=device) if fill else torch.empty(s, device=device))
    def even(low, high, *s):
        return (
            torch.rand(s, generator=gen, device=device) * (high - low) + low
            if fill
            else torch.ones(s, device=device)
        )
    e = {k: normal(*s).to(dtype) if fill else torch.empty(s, dtype=dtype, device=device)
         for k, s in (('x', (b, T, H, P)), ('B', (b, T, G, N)), ('C', (b, T, G, N)))}
    e |= dict(dt=even(math.log(1e-3), math.log(1e-1), b, T, H).exp(), A=-even(1, 16, H), D=normal(H))
    if state: e['initial_state'] = normal(b, H, P, N)
    if docs: e['seq_idx'] = (torch.arange(T, device=device)//max(T//5, 30)).int().expand(b, T).contiguous()
    return e

def leaves_of(e):
    return {
        k: v.detach().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in e.items()
    }

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

def mamba_ssm(module='ssd_combined'):
    """A module of mamba_ssm.ops.triton, or None where the package is not installed; past its __init__,
    which asks for a CUDA extension"""
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
    """Let kernels that tune themselves (mamba-ssm's) do so in 25 ms a configuration, not 125; the same
    choice within the noise"""
    autotuner = importlib.import_module('triton.runtime.autotuner')
    bench = importlib.import_module('triton.testing').do_bench
    autotuner.Autotuner.do_bench = property(
        lambda self: lambda f, quantiles: bench(f, warmup=5, rep=20, quantiles=quantiles)
    )
