"""What the process of a training on the CPU holds, beside what was predicted:
data/results/process_memory-<commit>.json.

    python benchmarks/process_memory.py [--cases NAME ...]

Whole trainings of three steps, each in a process of its own, as the command makes them: validated, compared
with their account, saved, sampled. What counts is the highest resident set above that of the process after
its imports. 'streamed-129m' is a model of 129M parameters under the layer-major step with everything in
host memory; each case is run as it is (here: with large freed blocks given back, which the command does
where a run streams), the same without the comparison of the first two steps, and with the C library as it
comes (`heap`), which keeps much of what is freed. Processor seconds and page faults are those of the steps
alone.
"""
import argparse, contextlib, dataclasses, datetime, io, json, re, resource, subprocess, sys, tempfile
from pathlib import Path
import torch
import elleci.config, elleci.training.run
from elleci.config import ModelConfig, TrainConfig
from elleci.core import atomic_write, fmt_bytes
from elleci.engine.offload import allow_malloc_tuning, tune_malloc
from elleci.training.telemetry import read_metrics
from tiny import ROOT, commit, hardware

HOST = dict(
    engine='layer-major',
    clip_by='layer',
    weights_on='host',
    states_on='host',
    block_inputs_on='pageable',
    optimizer='lion8',
    precision='bf16-weights',
)
SHORT = dict(steps=3, val_rows=3, val_every=10**8, save_every=10**8)

def streamed():
    model = ModelConfig(vocab_size=2048, d_model=768, n_layers=15, d_ff=2112, tie_embeddings=True)
    return model, TrainConfig(seq_len=256, batch_size=3, grad_accum_steps=1, **HOST, **SHORT)

def tiny():
    model, train = elleci.config.PRESETS['elleci-tiny']()
    return model, dataclasses.replace(train, **SHORT)

def wide():
    model, train = tiny()
    return dataclasses.replace(model, d_model=512, d_ff=1408), train

CASES = {'elleci-tiny': tiny, 'wide-14m': wide, 'streamed-129m': streamed}
WAYS = ('as it is', 'without the comparison', 'heap')

def status():
    "Resident bytes now and at their highest"
    found = dict(re.findall(r'(VmRSS|VmHWM):\s+(\d+) kB', Path('/proc/self/status').read_text()))
    return int(found['VmRSS'])*1024, int(found['VmHWM'])*1024

class Watched:
    "Counts the processor time and page faults of an engine's steps"
    def __init__(self): self.seconds, self.faults, self.resident = [], [], []
    def __call__(self, engine):
        step = engine.step
        def watched(micro_batches):
            before = resource.getrusage(resource.RUSAGE_SELF)
            out = step(micro_batches)
            after = resource.getrusage(resource.RUSAGE_SELF)
            self.seconds.append(round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3))
            self.faults.append(after.ru_minflt - before.ru_minflt)
            self.resident.append(status()[1])
            return out
        engine.step = watched
        return engine

def child(case, way):
    "One training in this process; its figures as JSON on the last line"
    imports = status()[0]
    if way != 'heap':
        allow_malloc_tuning()
        tune_malloc()
    if way == 'without the comparison': elleci.training.run.measure_first_steps = lambda steps, *_: steps
    elleci.config.PRESETS['measured'] = CASES[case]
    accounts = []
    watched = Watched()
    preflight = elleci.training.run.preflight
    make = elleci.training.run.make_engine
    elleci.training.run.preflight = lambda *a: accounts.append(preflight(*a)) or accounts[0]
    elleci.training.run.make_engine = lambda *a, **k: watched(make(*a, **k))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        elleci.training.run.elleci_train(preset='measured', out=f'{folder}/run')
        rows = read_metrics(Path(folder)/'run')
    a = accounts[0]
    print(
        json.dumps(
            dict(
                imports=imports,
                peak=status()[1] - imports,
                peak_in_steps=max(watched.resident) - imports,
                tensors=a.peak_allocated,
                measured_tensors=next((r['measured_peak'] for r in rows if 'measured_peak' in r), None),
                before=a.process_before - imports,
                margin=a.margin,
                checkpoint=a.checkpoint_bytes,
                cpu_seconds=watched.seconds,
                page_faults=watched.faults,
            )
        )
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES))
    p.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child: return child(*a.child)
    rows = []
    for case in a.cases:
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, __file__, '--child', case, way], capture_output=True, text=True
            )
            if done.returncode: sys.exit(done.stderr)
            rows.append(dict(case=case, way=way, **json.loads(done.stdout.splitlines()[-1])))
            print({k: fmt_bytes(v) if isinstance(v, int) else v for k, v in rows[-1].items()}, flush=True)
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), rows=rows,
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'))
    path = ROOT/'data'/'results'/f"process_memory-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
