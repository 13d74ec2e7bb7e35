"""What measuring the first two steps of a run costs, in memory and in time:
data/results/first_steps-<commit>.json.

    python benchmarks/first_steps.py [--repeats N] [--cases NAME ...]

Each case runs in a process of its own: steps as they are until the process grows no more, then as many
steps measured. The memory is the highest resident set of the second part above that of the first; the time
is processor time of a step, the median, since other programs may run. 'deep' has many small operators for
its size, too many for a run to measure it at all, and 'streamed-129m' is the model of `process_memory.py`.
"""
import argparse, datetime, json, re, statistics, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from elleci.planning.account import account, can_measure
from elleci.config import TrainConfig, preset
from elleci.core import MiB, atomic_write, fmt_bytes, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.engine.offload import allow_malloc_tuning, tune_malloc
from elleci.optim.optimizers import make_optimizer
from elleci.training.run import measure_steps
from process_memory import HOST, streamed
from tiny import ROOT, commit, hardware

def tiny():
    config = preset('elleci-tiny')
    return config.model, config.train

def wide():
    model, train = tiny()
    return replace(model, d_model=512, d_ff=1408), train

def deep():
    model, train = tiny()
    return replace(model, d_model=64, n_layers=32, headdim=32, d_ff=192), replace(
        train, seq_len=128, batch_size=1
    )

def deep_streamed():
    model, _ = deep()
    return model, TrainConfig(seq_len=128, batch_size=1, grad_accum_steps=2, **HOST)

CASES = {
    'elleci-tiny': tiny,
    'wide-14m': wide,
    'deep': deep,
    'deep, streamed': deep_streamed,
    'streamed-129m': streamed,
}

def resident_peak(forget=False):
    "The highest resident set of this process since it was last forgotten, in bytes (Linux)"
    if forget: Path('/proc/self/clear_refs').write_text('5')
    return int(re.search(r'VmHWM:\s+(\d+) kB', Path('/proc/self/status').read_text())[1])*1024

def child(case, repeats):
    "Steps as they are, then measured, in this process"
    allow_malloc_tuning()
    tune_malloc()                                  # so that what is freed does not hide what is taken
    model_config, train = CASES[case]()
    seed_everything(0)
    model = make_model(model_config, train)
    optimizer = make_optimizer(model, train)
    engine = make_engine(model, optimizer, train, 0, torch.device('cpu'))
    def tokens(): return torch.randint(model_config.vocab_size, (train.batch_size, train.seq_len))
    micro = [[tokens(), tokens(), torch.zeros_like(tokens())] for _ in range(train.grad_accum_steps)]
    def steps():
        seconds = []
        for _ in range(repeats):
            began = time.process_time()
            engine.step(micro)
            seconds.append(time.process_time() - began)
        return seconds
    steps()
    resident_peak(forget=True)
    plain, before = steps(), resident_peak()
    resident_peak(forget=True)
    with measure_steps(engine) as memory: measured = steps()
    extra = resident_peak() - before
    a = account(model_config, train, 'cpu')
    print(
        json.dumps(
            dict(
                extra=extra,
                allowed=max(16 * MiB, a.peak_allocated // 10),
                tensors=a.peak_allocated,
                would_be_measured=can_measure(a),
                measured_tensors=memory.measurement().peak_allocated,
                plain_seconds=plain,
                measured_seconds=measured,
            )
        )
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=2)
    p.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES))
    p.add_argument('--child', help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child: return child(a.child, a.repeats)
    rows = []
    for case in a.cases:
        done = subprocess.run(
            [sys.executable, __file__, '--child', case, '--repeats', str(a.repeats)],
            capture_output=True,
            text=True,
        )
        if done.returncode: sys.exit(done.stderr)
        rows.append(dict(case=case, **json.loads(done.stdout.splitlines()[-1])))
        r = rows[-1]
        print(
            f"{case:16} {fmt_bytes(r['tensors']):>12} in tensors, {fmt_bytes(r['extra']):>10} more while "
            f"measured ({fmt_bytes(r['allowed'])} allowed), "
            f"a step {statistics.median(r['plain_seconds']):.2f} s, measured "
            f"{statistics.median(r['measured_seconds']):.2f} s",
            flush=True,
        )
        assert r['extra'] <= r['allowed'] or not r['would_be_measured'], r
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), rows=rows,
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'))
    path = ROOT/'data'/'results'/f"first_steps-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
