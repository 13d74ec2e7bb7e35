"""Seconds on this CPU: the scan against its peers, and the loop around the step. See runner.py for the
command line.
"""
import contextlib, dataclasses, gc, io, os, tempfile, time
from pathlib import Path
from unittest import mock

# As the commands set it: `elleci.commands.SLEEP_VARIABLES`.
os.environ['GOMP_SPINCOUNT'] = '1000'
import numpy as np
import torch
import elleci.training.run as run
from elleci.config import ModelConfig, preset
from elleci.core import assert_close, optional, seed_everything
from elleci.kernels.ssd import ssd
from elleci.kernels.ssd_reference import ssd_chunked
from elleci.layers import mamba2
from elleci.memory.measure import find_leaks
from elleci.training.telemetry import read_metrics
from runner import in_turn, main, median_ratio

TINY = preset('elleci-tiny')
WALL = dict(wall=time.perf_counter)

# ------------------------------------------------------------------ the scan

class StraightThrough(torch.autograd.Function):
    "The scan replaced by nothing: y = x, and the gradient of x that of y"
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, dy): return dy

def no_scan(cache, x, *_): return StraightThrough.apply(x)

def scan_with(f, Q=None):
    def scan(cache, x, dt, A, B, C, D, chunk_size, seq_idx, backend):
        return f(x, dt, A, B, C, Q or chunk_size, D, seq_idx=seq_idx)
    return scan

SCANS = {'no scan': no_scan, 'ssd': scan_with(ssd), 'ssd, chunks of 32': scan_with(ssd, 32),
         'ssd_chunked': scan_with(ssd_chunked)}

def both_ways(block, x, scan=None):
    def step():
        if scan: mamba2._scan = scan
        y = block(x)
        y.sum().backward()
        return y
    return step

def mixer_of_transformers(cfg, ours):
    "transformers' Mamba2Mixer with our weights; None where it is not installed"
    if (modeling := optional('transformers.models.mamba2.modeling_mamba2')) is None: return None
    from transformers import Mamba2Config
    theirs = modeling.Mamba2Mixer(Mamba2Config(
        hidden_size=cfg.d_model, num_heads=cfg.n_ssm_heads, head_dim=cfg.headdim, state_size=cfg.d_state,
        expand=cfg.expand, n_groups=cfg.ngroups, conv_kernel=cfg.d_conv, chunk_size=cfg.chunk_size,
    ), layer_idx=0)
    state = {k.replace('conv_', 'conv1d.'): v for k, v in ours.state_dict().items()}
    state['conv1d.weight'] = state['conv1d.weight'][:, None]
    theirs.load_state_dict(state)
    return theirs

def scan_case(D, P, rows, T, repeats):
    "Seconds of every subject, round by round"
    seed_everything(0)
    cfg = dataclasses.replace(ModelConfig(), d_model=D, headdim=P, d_state=8, chunk_size=64, ngroups=1)
    x, ours = torch.randn(rows, T, D, requires_grad=True), mamba2.Mamba2(cfg)
    subjects = {name: both_ways(ours, x, scan) for name, scan in SCANS.items()}
    if theirs := mixer_of_transformers(cfg, ours):
        assert_close(theirs(x), subjects['ssd'](), atol=1e-4, label="transformers' block against ours")
        subjects['transformers'] = both_ways(theirs, x)
    seconds = {name: found['wall'] for name, found in in_turn(subjects, repeats, WALL).items()}
    base = seconds['no scan']
    ratios = {f'{n} / no scan': median_ratio(s, base) for n, s in seconds.items() if s is not base}
    if theirs: ratios['transformers / ssd'] = median_ratio(seconds['transformers'], seconds['ssd'])
    print((rows, T, D), ratios, flush=True)
    return dict(shape=[rows, T, D], heads=cfg.n_ssm_heads, headdim=P, d_state=8, chunk_size=64,
                seconds=seconds, ratios=ratios)

def cpu_scan(repeats=15, dry=False):
    """What the scan adds to a Mamba-2 block, both ways in fp32, against the block without (wanted:
    at most 1.5 times), and against transformers' (wanted: twice as fast)"""
    torch.set_num_threads(2)
    rows, T, repeats = (1, 130, 2) if dry else (2, 1024, repeats)
    cases = [scan_case(D, P, rows, T, repeats) for D, P in ((256, 64), (512, 128))]
    yield dict(cases=cases, targets={'ssd / no scan': 1.5, 'transformers / ssd': 2.})

# ------------------------------------------------------------------ trainings

BLOCK = 20 # steps with the view, steps without it

def live_bytes():
    "Bytes of all tensors that exist, each storage once"
    tensors = [t for t in gc.get_objects() if torch.is_tensor(t) and t.device.type != 'meta']
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

class Timed:
    "Times an engine's steps, counts live tensors, and switches a view of the run on and off"
    def __init__(self, steps, run):
        self.steps, self.run = steps, run
        self.view, self.viewing = None, 0.
        self.began, self.ended, self.watched = [], [], []
        self.tensors = {}

    def __call__(self, engine):
        step = engine.step
        def timed(micro):
            i = engine.global_step + 1
            if self.run and i % BLOCK == 1: self.switch(i//BLOCK % 2 == 1)
            if i in (10, self.steps//2, self.steps): self.tensors[i] = live_bytes()
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

def loop(steps=520):
    """What the loop costs over the bare step, what a dashboard in the same process costs, and whether memory
    grows: one training of elleci-tiny, a live view switched on and off every 20 steps"""
    comm, make = optional('comm'), run.make_engine
    # widgets without a browser: everything but its drawing
    if comm: comm.create_comm = comm.DummyComm
    has_view = comm and optional('ipywidgets')
    config = preset('elleci-tiny', steps=steps, val_every=10**8, save_every=10**8)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)/'run'
        m = Timed(steps, out if has_view else None)
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with mock.patch.object(run, 'make_engine', lambda *a, **k: m(make(*a, **k))), silent[0], silent[1]:
            run.elleci_train(config=config, out=str(out))
        m.switch(False)
        level = np.array([r['memory_bytes'] for r in read_metrics(out) if 'loss' in r])[100:]
    inside, between = np.subtract(m.ended, m.began), np.subtract(m.began[1:], m.ended[:-1])
    # the first two are measured by a profiler; a view begins with work of its own
    settled = [i for i in range(4, len(between)) if (i + 1) % BLOCK and i % BLOCK > 1]
    plain, seen = ([i for i in settled if m.watched[i] == on] for on in (False, True))
    seconds = np.diff(m.began)    # of a step and what the loop does after it
    floor = level[:len(level)//50*50].reshape(-1, 50).min(1)
    found = dict(
        preset='elleci-tiny', steps=steps, step_seconds=float(np.median(inside[4:])),
        loop_seconds=float(np.median(between[plain])),
        loop_share=float(between[plain].sum()/inside[plain].sum()), live_tensor_bytes=m.tensors,
        resident_slope_bytes_per_step=float(np.polyfit(np.arange(len(level)), level, 1)[0]),
        resident_floor_every_50_steps=floor.tolist(), leaks=[str(l) for l in find_leaks(level[:, None])],
    )
    if seen:
        one, two = seconds[seen], seconds[plain]
        found |= dict(
            view_cpu_seconds=m.viewing, view_share=float(m.viewing/seconds[m.watched[:-1]].sum()),
            with_view=float(one.mean()), without_view=float(two.mean()),
            standard_error=float((one.var(ddof=1)/len(one) + two.var(ddof=1)/len(two))**.5),
        )
    print(f"the loop: {found['loop_share']:.2%} of the step; leaks: {len(found['leaks'])}")
    yield found

if __name__ == '__main__': main(cpu_scan, loop)
