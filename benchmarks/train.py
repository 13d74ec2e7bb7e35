"""A training of elleci-tiny, as the command makes it. See runner.py for the command line.
"""
import statistics, tempfile, time
from elleci.config import preset
from elleci.generation import generate
from elleci.training.load import load_run
from elleci.training.run import PROMPTS, elleci_train
from elleci.training.telemetry import read_metrics
from runner import main

def tiny(seeds=1, steps=preset('elleci-tiny').train.steps):
    "Train elleci-tiny as the command does, each seed in a folder of its own; the README reads the newest"
    runs = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as out:
            began = time.perf_counter()
            elleci_train(preset='elleci-tiny', out=out, seed=seed, steps=steps)
            wall, rows, (config, tok, model) = time.perf_counter() - began, read_metrics(out), load_run(out)
        train, vals, t = [r for r in rows if 'loss' in r], [r for r in rows if 'val_loss' in r], config.train
        runs.append(dict(
            seed=seed, parameters=sum(p.numel() for p in model.parameters()), steps=t.steps,
            tokens_per_step=t.tokens_per_step, batch=f'{t.grad_accum_steps} × {t.batch_size} × {t.seq_len}',
            wall_seconds=round(wall, 1), training_seconds=round(sum(r['seconds'] for r in train), 1),
            tokens_per_second=round(statistics.median(r['tokens_per_s'] for r in train)),
            peak_memory_bytes=max(r['memory_bytes'] for r in train), first=vals[0], last=vals[-1],
            samples=[generate(model, tok, p, 60, seed=seed) for p in PROMPTS],
        ))
        print(f"seed {seed}: val_loss {vals[0]['val_loss']:.3f} -> {vals[-1]['val_loss']:.3f}", flush=True)
        yield dict(preset='elleci-tiny', runs=runs)

if __name__ == '__main__': main(tiny)
