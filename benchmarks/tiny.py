"""Train elleci-tiny and keep what was measured: data/results/tiny-<commit>.json, which the README reads.

    python benchmarks/tiny.py [--seeds N] [--steps N]
"""
import argparse, datetime, json, platform, statistics, subprocess, tempfile, time
from pathlib import Path
import torch
from elleci.config import preset
from elleci.core import atomic_write, pick_device
from elleci.generation import generate
from elleci.training.load import load_run
from elleci.training.telemetry import read_metrics
from elleci.training.run import PROMPTS, elleci_train

ROOT = Path(__file__).resolve().parents[1]

def git(*args):
    try: return subprocess.run(['git', *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError: return ''
def commit():  # a result changes nothing that is measured
    return git('rev-parse', '--short=12', 'HEAD') + (
        '-dirty' if git('status', '--porcelain', '--', '.', ':!data/results') else ''
    )

def hardware():
    if pick_device().type == 'cuda': return torch.cuda.get_device_name()
    cpuinfo = Path('/proc/cpuinfo')
    names = (
        [l.split(':')[1].strip() for l in cpuinfo.read_text().splitlines() if l.startswith('model name')]
        if cpuinfo.exists()
        else []
    )
    return f'{torch.get_num_threads()} CPU cores ({names[0] if names else platform.machine()})'

def measure(seed, steps):
    "One training in a folder of its own, as the command does it"
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        elleci_train(preset='elleci-tiny', out=out, seed=seed, steps=steps)
        wall, rows, (config, tok, model) = time.perf_counter() - began, read_metrics(out), load_run(out)
        train, vals, t = [r for r in rows if 'loss' in r], [r for r in rows if 'val_loss' in r], config.train
        return dict(
            seed=seed,
            parameters=sum(p.numel() for p in model.parameters()),
            steps=t.steps,
            tokens_per_step=t.tokens_per_step,
            batch=f'{t.grad_accum_steps} × {t.batch_size} × {t.seq_len}',
            wall_seconds=round(wall, 1),
            training_seconds=round(sum(r['seconds'] for r in train), 1),
            tokens_per_second=round(statistics.median(r['tokens_per_s'] for r in train)),
            peak_memory_bytes=max(r['memory_bytes'] for r in train),
            first=vals[0],
            last=vals[-1],
            samples=[generate(model, tok, p, 60, seed=seed) for p in PROMPTS],
        )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seeds', type=int, default=1)
    p.add_argument('--steps', type=int, default=preset('elleci-tiny').train.steps)
    a = p.parse_args()
    result = dict(preset='elleci-tiny', hardware=hardware(), torch=torch.__version__, commit=commit(),
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'))
    result['runs'] = [measure(s, a.steps) for s in range(a.seeds)]
    path = ROOT/'data'/'results'/f"tiny-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    for r in result['runs']:
        print(
            f"seed {r['seed']}: val_loss {r['first']['val_loss']:.3f} -> {r['last']['val_loss']:.3f} in "
            f"{r['training_seconds']} s"
        )
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
