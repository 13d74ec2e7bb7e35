"""What the loop costs over the bare step, what a dashboard in the same process costs it, and whether memory
grows: data/results/loop-<commit>.json.

    python benchmarks/loop.py [--steps N]

One training of elleci-tiny without validations or saves in between. Every step is timed from within; what
lies between two steps is the loop's. A live view of the run is switched on and off every 20 steps, so that
both halves see the same machine. At a few steps the live tensors are counted, byte by byte.
"""
import argparse, contextlib, dataclasses, datetime, gc, io, json, statistics, tempfile, time
from pathlib import Path
from unittest import mock
import numpy as np
import torch
import elleci.config, elleci.training.run
from elleci.core import atomic_write, optional
from elleci.memory.measure import find_leaks
from elleci.training.telemetry import read_metrics
from tiny import ROOT, commit, hardware

BLOCK = 20 # steps with the view, steps without it

def live():
    "Bytes of all tensors that exist, each storage once"
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if torch.is_tensor(t) and t.device.type != 'meta'
    }
    return sum(storages.values())

class Timed:
    "Times an engine's steps, looks at memory, and switches a view on and off"
    def __init__(self, steps, run):
        self.steps = steps
        self.run = run
        self.began = []
        self.ended = []
        self.watched = []
        self.tensors = {}
        self.view = None
        self.viewing = 0.

    def __call__(self, engine):
        step = engine.step
        def timed(micro):
            i = engine.global_step + 1
            if self.run and i % BLOCK == 1: self.switch(i//BLOCK % 2 == 1)
            if i in (10, self.steps//2, self.steps): self.tensors[i] = live()
            self.watched.append(self.view is not None)
            self.began.append(time.perf_counter())
            out = step(micro)
            self.ended.append(time.perf_counter())
            return out
        engine.step = timed
        return engine

    def switch(self, on):
        if self.view:
            clock = time.pthread_getcpuclockid(self.view.ident)
            self.viewing += time.clock_gettime(clock)
            self.view.close()
            self.view = None
        if on:
            from elleci.dashboard.run_view import RunView
            self.view = RunView(self.run, [self.run], 2.)
            self.view.start()

def train(steps, run, view, **settings):
    model, t = elleci.config.PRESETS['elleci-tiny']()
    elleci.config.PRESETS['loop'] = lambda: (model, dataclasses.replace(t, steps=steps, **settings))
    timed, make = Timed(steps, run if view else None), elleci.training.run.make_engine
    with (
        mock.patch.object(elleci.training.run, 'make_engine', lambda *a, **k: timed(make(*a, **k))),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        elleci.training.run.elleci_train(preset='loop', out=str(run))
    timed.switch(False)
    return timed

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=520)
    a = p.parse_args()
    comm = optional('comm')
    # widgets without a browser: everything but its drawing
    if comm: comm.create_comm = comm.DummyComm
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)/'run'
        m = train(a.steps, run, comm and optional('ipywidgets'), val_every=10**8, save_every=10**8)
        rows = [r for r in read_metrics(run) if 'loss' in r]
    inside = [e - b for b, e in zip(m.began, m.ended)]
    between = [b - e for e, b in zip(m.ended, m.began[1:])]
    # of a step and what the loop does after it
    seconds = [b - a for a, b in zip(m.began, m.began[1:])]
    # the first two are measured by a profiler; a view begins with work of its own
    plain = [i for i in range(4, len(between)) if not m.watched[i] and (i + 1) % BLOCK and i % BLOCK > 1]
    seen = [i for i in range(4, len(between)) if m.watched[i] and (i + 1) % BLOCK and i % BLOCK > 1]
    level = np.array([r['memory_bytes'] for r in rows])[100:]
    floor = level[:len(level)//50*50].reshape(-1, 50).min(1)
    result = dict(
        preset='elleci-tiny',
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        steps=a.steps,
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        step_seconds=statistics.median(inside[4:]),
        loop_seconds=statistics.median(between[i] for i in plain),
        loop_share=sum(between[i] for i in plain) / sum(inside[i] for i in plain),
        live_tensor_bytes=m.tensors,
        resident_slope_bytes_per_step=float(np.polyfit(np.arange(len(level)), level, 1)[0]),
        resident_floor_every_50_steps=floor.tolist(),
        leaks=[str(l) for l in find_leaks(level[:, None])],
    )
    if seen:
        one, two = ([seconds[i] for i in which] for which in (seen, plain))
        spread = (statistics.variance(one)/len(one) + statistics.variance(two)/len(two))**.5
        result |= dict(
            view_cpu_seconds=m.viewing,
            view_share=m.viewing / sum(seconds[i] for i in range(len(seconds)) if m.watched[i]),
            with_view=statistics.mean(one),
            without_view=statistics.mean(two),
            standard_error=spread,
        )
    path = ROOT/'data'/'results'/f"loop-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(
        f"the loop: {result['loop_share']:.2%} of the step; live tensors {sorted(set(m.tensors.values()))}; "
        f"resident {result['resident_slope_bytes_per_step']:+,.0f} B a step, leaks: {len(result['leaks'])}"
    )
    if seen:
        print(
            f"the view: {result['view_share']:.3%} of the time; steps with it "
            f"{result['with_view'] / result['without_view'] - 1:+.2%} ± "
            f"{spread / result['without_view']:.2%}"
        )
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
