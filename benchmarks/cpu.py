"""Seconds on this CPU: the scan, attention and a step against their peers, a training against its forecast,
the loop around the step, and two trainings at once. See runner.py for the command line.
"""
import contextlib, dataclasses, gc, io, os, statistics, subprocess, sys, tempfile, time
from pathlib import Path
from unittest import mock

# As the commands set it: `elleci.commands.SLEEP_VARIABLES`.
os.environ['GOMP_SPINCOUNT'] = '1000'
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import elleci.training.run as run
from elleci.config import ModelConfig, preset
from elleci.core import assert_close, optional, seed_everything
from elleci.engine.accumulate import GradAccumStep
from elleci.kernels.document_attention import document_attention
from elleci.kernels.ssd import ssd
from elleci.kernels.ssd_reference import ssd_chunked
from elleci.layers import mamba2
from elleci.layers.attention import document_mask
from elleci.memory.measure import find_leaks
from elleci.model import Elleci
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

# ------------------------------------------------------------------ attention

def masked(q, k, v, seq_idx):
    "With a (B, 1, T, T) mask, made anew in every layer"
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(seq_idx)).transpose(1, 2)

def attention_case(name, T, documents, repeats):
    seed_everything(0)
    model = preset(name).model
    H, P, starts = model.n_attn_heads, model.v_head_dim, torch.zeros(T, dtype=torch.long)
    inputs, dout = [torch.randn(1, T, H, P, requires_grad=True) for _ in range(3)], torch.randn(1, T, H, P)
    starts[torch.randperm(T - 1)[:documents - 1] + 1] = 1
    seq_idx, results = starts.cumsum(0)[None], {}
    def both_passes(f):
        # Read anew in every round, as for every micro-batch.
        out = f(*inputs, seq_idx.clone())
        results[f] = out, *torch.autograd.grad(out, inputs, dout)
    fs = dict(masked=lambda: both_passes(masked), ours=lambda: both_passes(document_attention))
    seconds = in_turn(fs, repeats, dict(cpu=time.process_time))
    for a, b in zip(*results.values()): assert_close(a, b, atol=2e-4)
    mask, ours = seconds['masked']['cpu'], seconds['ours']['cpu']
    row = dict(preset=name, heads=H, width=P, T=T, documents=documents,
               masked_seconds=round(statistics.median(mask), 4), seconds=round(statistics.median(ours), 4),
               faster=median_ratio(mask, ours, 2), slowest_round=round(min(map(np.divide, mask, ours)), 2))
    print(row, flush=True)
    return row

def attention(repeats=7, dry=False):
    "Attention within documents, both ways in fp32, against the same with a mask (wanted: 20 twice as fast)"
    T = 128 if dry else 2048
    rows = [attention_case(name, T, documents, repeats)
            for name in ('elleci-1b5', 'elleci-tiny') for documents in (1, 2, 20, T//10, T)]
    reached = all(row['faster'] >= 2 for row in rows if row['documents'] == 20)
    yield dict(repeats=repeats, rows=rows, twice_as_fast_with_20=reached)

# ------------------------------------------------------------------ a step

class DenseBlock(nn.Module):
    "x + attention(norm(x)), then x + swiglu(norm(x))"
    def __init__(self, D, H, d_ff):
        super().__init__()
        self.H = H
        self.attention_norm, self.ffn_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3*D, bias=False), nn.Linear(D, D, bias=False)
        self.gate_up, self.down = nn.Linear(D, 2*d_ff, bias=False), nn.Linear(d_ff, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.H, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate)*up)

class Dense(nn.Module):
    "A decoder-only Transformer with learned positions and a tied head"
    def __init__(self, cfg, T, d_ff):
        super().__init__()
        D = cfg.d_model
        self.embedding, self.positions = nn.Embedding(cfg.vocab_size, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(DenseBlock(D, cfg.n_attn_heads, d_ff) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(D)
        for p in self.parameters():
            if p.ndim > 1: nn.init.normal_(p, 0, .02)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks: x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

def n_parameters(model): return sum(p.numel() for p in model.parameters())

def adamw(model): return torch.optim.AdamW(model.parameters(), 1e-4)

def our_step(cfg, tokens):
    "A step of ours as the ordinary engine makes it, and its parameters"
    seed_everything(0)
    model = Elleci(cfg)
    engine, batch = GradAccumStep(model, adamw(model)), (tokens, tokens.roll(1, 1), torch.zeros_like(tokens))
    return lambda: engine.step([batch]), n_parameters(model)

def dense_step(cfg, tokens):
    "A step of the dense model whose FFN is as wide as makes it hold as many parameters as ours"
    T, wanted = tokens.shape[1], n_parameters(Elleci(cfg))
    d_ff = 8 + round((wanted - n_parameters(Dense(cfg, T, 8)))/(3*cfg.d_model*cfg.n_layers)/8)*8
    model = Dense(cfg, T, d_ff)
    optimizer = adamw(model)
    def step():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
    return step, n_parameters(model)

def beside_dense(cfg, rows, T, threads, repeats):
    "Our step, ternary and not, beside the dense one"
    torch.set_num_threads(threads)
    tokens = torch.randint(0, cfg.vocab_size, (rows, T))
    plain = dataclasses.replace(cfg, ternary=False)
    made = {'elleci': our_step(plain, tokens), 'elleci, ternary': our_step(cfg, tokens),
            'dense': dense_step(cfg, tokens)}
    seconds = in_turn({name: step for name, (step, _) in made.items()}, repeats)
    ratios = {name: {c: median_ratio(s, seconds['dense'][c]) for c, s in own.items()}
              for name, own in seconds.items() if name != 'dense'}
    return dict(d_model=cfg.d_model, rows=rows, T=T, threads=threads, seconds=seconds, ratios=ratios,
                parameters={name: n for name, (_, n) in made.items()})

def cpu_step(repeats=24, label='', dry=False):
    """A training step in fp32 with AdamW beside a dense Transformer's of as many parameters. Of the clocks,
    `wall` counts where nothing else runs, `main` (the first thread) on a busy machine"""
    tiny = TINY.model
    widths = {} if dry else dict(d_model=768, n_attn_heads=12, kv_lora_rank=192, d_ff=2112)
    wide = dataclasses.replace(tiny, **widths)
    rows, short, long, n = (1, 64, 128, 1) if dry else (4, 256, 2048, repeats)
    measured = {
        'd 256, T 256, 1 thread': lambda: beside_dense(tiny, rows, short, 1, n),
        'd 256, T 256, 2 threads': lambda: beside_dense(tiny, rows, short, 2, n),
        'd 768, T 256, 2 threads': lambda: beside_dense(wide, rows, short, 2, max(1, n//3)),
        'd 256, T 2048, 2 threads': lambda: beside_dense(tiny, 1, long, 2, max(1, n//2)),
    }
    cases = {}
    for name, measure in measured.items():
        cases[name] = measure()
        print(name, cases[name]['ratios'], flush=True)
        yield dict(label=label, cases=cases)

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

IMPORTED = 'import sys, elleci.training.run, elleci.commands as c; sys.exit(c.run_command(c.elleci_train))'
COMMAND = "import sys; from elleci.commands import main; sys.exit(main('elleci_train'))"
SETTINGS = {
    'as torch comes': (IMPORTED, {}),
    'OMP_WAIT_POLICY=passive': (IMPORTED, {'OMP_WAIT_POLICY': 'passive'}),
    'OMP_NUM_THREADS=1': (IMPORTED, {'OMP_NUM_THREADS': '1'}),
    'elleci_train': (COMMAND, {}),
}

def start(code, variables, out):
    "A training that has far more steps than it will get to make"
    env = {k: v for k, v in os.environ.items() if not k.startswith(('OMP_', 'GOMP_', 'KMP_'))}
    args = ['--out', out, '--steps', '100000', '--save-every', '100000']
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, '-c', code, *args], env=env | variables, **quiet)

def made(out, after=0.):
    "How many steps have ended since `after`; the first ones are measured by a profiler and do not count"
    return sum(r['step'] > 3 and r['time'] > after for r in read_metrics(out) if 'loss' in r)

def wait(true, seconds):
    "Until `true()`, or so long: trainings that hold each other up may not make a step in a minute"
    began = time.time()
    while not true() and time.time() - began < seconds: time.sleep(.2)

def tokens_per_second(n, setting, seconds):
    "Of each of `n` trainings at once"
    with tempfile.TemporaryDirectory() as tmp:
        outs = [f'{tmp}/{i}' for i in range(n)]
        running = [start(*SETTINGS[setting], out) for out in outs]
        try:
            wait(lambda: all(made(out) for out in outs), 120)
            began = time.time()
            time.sleep(seconds)
            wait(lambda: all(made(out, began) >= 2 for out in outs), 60)
            assert all(p.poll() is None for p in running), f'{setting}: a training ended'
            took = time.time() - began
            return [TINY.train.tokens_per_step*made(out, began)/took for out in outs]
        finally:
            for p in running:
                p.kill()
                p.wait()

def two_runs(seconds=10., rounds=3, settings=tuple(SETTINGS)):
    "Two trainings of elleci-tiny at once against one alone, with idle threads that spin or sleep"
    alone, pairs, load = {s: [] for s in settings}, {s: [] for s in settings}, []
    for _ in range(rounds):
        for setting in settings:
            load.append(os.getloadavg()[0])
            alone[setting] += tokens_per_second(1, setting, seconds)
            pairs[setting] += tokens_per_second(2, setting, seconds)
            print(f'{setting:26} alone {alone[setting][-1]:7,.0f}, two {pairs[setting][-2:]}', flush=True)
    found = {}
    for setting in settings:
        one, two = statistics.median(alone[setting]), statistics.median(pairs[setting])
        found[setting] = dict(alone=one, each_of_two=two, slower=one/max(two, 1.), all_alone=alone[setting],
                              all_of_two=pairs[setting])
    yield dict(preset='elleci-tiny', rounds=rounds, seconds=seconds, load_before_each=load, settings=found)

if __name__ == '__main__': main(cpu_scan, attention, cpu_step, loop, two_runs)
