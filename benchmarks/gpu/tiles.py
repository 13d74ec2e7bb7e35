"""The sizes in `_tiles`, with a stopwatch: chunk, channels, warps and pipeline stages of the three large
kernels, at two shapes.
"""
import contextlib, itertools, statistics, time
from unittest import mock
import torch
from elleci.kernels import ssd as module
from gpu.bench import RECIPE_A, TOY, Stopwatch, note, row, scan_inputs

KERNELS = ('_forward_kernel', '_backward_x_kernel', '_backward_BC_kernel')

def shapes(dry): return (TOY,) if dry else (RECIPE_A,)
def variants(dry): # (Q, BP, warps, stages)
    if dry: return [(16, 16, 4, 1), (32, 16, 4, 2)]
    # 128 steps fit into no 4 warps
    return [
        v for v in itertools.product((64, 32, 128), (64, 32, 16), (4, 8), (1, 2)) if v[0] < 128 or v[2] > 4
    ]

class Kernel:
    "A kernel launched with other options; what it took, or why it could not, is noted"
    def __init__(self, kernel, options, clock):
        self.kernel = kernel
        self.options = options
        self.clock = clock
        self.spans = []
        self.error = None
    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            begun = self.clock()
            try: self.kernel[grid](*args, **{**kwargs, **self.options})
            except Exception as e: self.error = f'{type(e).__name__}: {" ".join(str(e).split())[:160]}'
            self.spans.append((begun, self.clock()))
        return launch
    def ms(self, warm=0):
        took = [
            a.elapsed_time(b) if hasattr(a, 'elapsed_time') else 1e3 * (b - a) for a, b in self.spans[warm:]
        ]
        return statistics.median(took) if took and self.error is None else None

def mark():
    "Now, on the GPU's clock or the CPU's"
    if not torch.cuda.is_available(): return time.perf_counter()
    e = torch.cuda.Event(enable_timing=True)
    e.record()
    return e

@contextlib.contextmanager
def sizes(variant, clock=mark):
    "Within it the scan works with these sizes (None: its own); gives the kernels"
    with contextlib.ExitStack() as stack:
        if variant:
            Q, BP, warps, stages = variant
            own = module._tiles
            stack.enter_context(
                mock.patch.object(module, '_tiles', lambda *a: own(*a)._replace(Q=Q, BP=BP, num_warps=warps))
            )
        options = dict(num_stages=stages) if variant else {}
        kernels = {n: Kernel(getattr(module, n), options, clock) for n in KERNELS}
        for n, k in kernels.items(): stack.enter_context(mock.patch.object(module, n, k))
        yield kernels

def scan(e):
    args = [e[k] for k in 'x dt A B C D'.split()]
    y, _, states = module._forward_triton(*args, None, None, 64, True)
    dx, ddt, dA, dB, *_ = module._backward_triton(e['x'], None, *args, None, states, False, 64)
    return y, dx, dB

def measured(ctx, watch, e, variant, truth, rounds=12):
    "{kernel: ms or None} of one variant, and {kernel: what is wrong}"
    with sizes(variant) as kernels:
        outputs = scan(e)
        wrong = {n: k.error for n, k in kernels.items() if k.error}
        if wrong: wrong = {'_backward_BC_kernel': 'needs the other two'} | wrong
        for n, mine, right in zip(KERNELS, outputs, truth):             # y, dx, dB: one of each kernel
            off = ((mine.float() - right.float()).norm()/right.float().norm()).item()
            if n not in wrong and not off < 2e-2: wrong[n] = f'off by {off:.1e}'
        del outputs
        for _ in range(1 if ctx.dry else rounds):
            if watch.gpu:
                watch.cache.zero_()
                torch.cuda._sleep(int(watch.cycles*.5))
            scan(e)
        if watch.gpu: torch.cuda.synchronize()
        return {n: None if n in wrong else k.ms(1) for n, k in kernels.items()}, wrong

def run(ctx):
    watch = Stopwatch(ctx)
    for n, shape in enumerate(shapes(ctx.dry)):
        e, share = scan_inputs(shape, device=ctx.device), ctx.left/(len(shapes(ctx.dry)) - n)
        truth, table, stop = scan(e), [], ctx.left - share + 2
        base, _ = measured(ctx, watch, e, None, truth)
        for v in variants(ctx.dry):
            if ctx.left < stop:
                yield note(
                    f'{shape} cut for time: {len(table)} of {len(variants(ctx.dry))} variants', cut=True
                )
                break
            ms, wrong = measured(ctx, watch, e, v, truth)
            table.append(dict(Q=v[0], BP=v[1], warps=v[2], stages=v[3], ms=ms, wrong=wrong))
        yield row(
            f'{shape}: the three kernels as they are',
            sum(filter(None, base.values())),
            'ms',
            ms=base,
            table=table,
        )
        best = {}
        for Q in {t['Q'] for t in table}:
            picks = {
                k: min(
                    (t for t in table if t['Q'] == Q and t['ms'][k]), key=lambda t: t['ms'][k], default=None
                )
                for k in KERNELS
            }
            if all(picks.values()): best[Q] = picks
        if not best: continue
        Q = min(best, key=lambda Q: sum(t['ms'][k] for k, t in best[Q].items()))
        for k, t in best[Q].items():
            yield row(
                f'{shape} {k}: Q {Q}, BP {t["BP"]}, warps {t["warps"]}, stages {t["stages"]}',
                t['ms'][k],
                'ms',
                was=base[k],
            )
        yield row(
            f'{shape}: faster with the best of each',
            sum(base.values()) / sum(t['ms'][k] for k, t in best[Q].items()),
            '×',
        )
        by = {tuple(t[k] for k in ('Q', 'BP', 'warps', 'stages')): t['ms'] for t in table}
        alike = {
            (*v, s): [
                by[*v, s]['_forward_kernel'],
                by[*v, 1]['_backward_x_kernel'],
                by[*v, s]['_backward_BC_kernel'],
            ]
            for *v, s in by
            if (*v, 1) in by
        }  # what `_tiles` can say: one stage backwards
        alike = {v: sum(ms) for v, ms in alike.items() if all(ms)}
        if alike:
            v = min(alike, key=alike.get)
            yield row(
                f'{shape}: faster within `_tiles` alone: Q {v[0]}, BP {v[1]}, warps {v[2]}, stages {v[3]}',
                sum(base.values()) / alike[v],
                '×',
            )
