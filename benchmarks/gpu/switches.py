"""One step of the same model with each switch, against the step without: torch.compile in each mode (with
CUDA graphs where it has them), attention's back-ends, the scan's, and settings of the machine.

Settings that are environment variables must stand before a process starts, so each subject runs in one of its
own. Peaks stand beside the account's, losses beside those of the plain step.
"""
import contextlib, dataclasses, json, os, subprocess, sys
from pathlib import Path
import torch
from elleci.core import UserError
from elleci.engine.machine_settings import MACHINE_SETTINGS
from elleci.planning.account import account
from gpu import kernel_cache
from gpu.bench import failed, most, note, row
from gpu.rows import Context
from gpu.training import MAJOR, SMALLER, TOY, TRAIN, engine_for, random_batches, seconds

TWO = dataclasses.replace(TRAIN, grad_accum_steps=2)
SMALL = dict(seq_len=32, batch_size=1)
FEW = dict(batch_size=1, seq_len=256)

def subjects():
    "Name: (settings of the training, the machine's setting)"
    found = {'plain': {}, 'plain, few tokens': FEW}
    modes = 'default', 'reduce-overhead', 'max-autotune'
    found |= {f'compile {mode}': dict(compile=mode) for mode in modes}
    found |= {
        'compile reduce-overhead, few tokens': FEW | dict(compile='reduce-overhead'),
        'compile default, recomputed': dict(compile='default', checkpointing='block'),
        'layer-major': MAJOR,
        'layer-major, compile default': MAJOR | dict(compile='default'),
    }
    found |= {f'attention {b}': dict(attention_backend=b) for b in ('flash', 'efficient', 'math', 'cudnn')}
    found |= {f'scan {b}': dict(scan_backend=b) for b in ('torch', 'mamba-ssm')}
    changes = {name: (settings, None) for name, settings in found.items()}
    return changes | {name: ({}, name) for name in MACHINE_SETTINGS}

def baseline(name):
    "With what a subject is compared"
    if name.endswith('few tokens'): return 'plain, few tokens'
    return 'layer-major' if name.startswith('layer-major') else 'plain'

def measure(name, dry):
    "In a process of its own: what one subject's steps take, hold and compute"
    changes, setting = subjects()[name]
    if not dry: kernel_cache.count_compilations()
    ctx, model = Context(dry, 1e9), dataclasses.replace(TOY, n_layers=2, pattern='MA') if dry else SMALLER
    train = dataclasses.replace(TWO, **changes | (SMALL if dry else {}))
    if dry and train.engine == 'grad_accum': train = dataclasses.replace(train, precision='fp32')
    engine, batches = engine_for(ctx, model, train), random_batches(ctx, model, train, 300)
    warm, first = seconds(ctx, engine, batches)
    for _ in range(0 if dry else 3): engine.step(batches)
    if not dry: torch.cuda.reset_peak_memory_stats()
    took = []
    with MACHINE_SETTINGS[setting].active() if setting else contextlib.nullcontext():
        for n in range(1, 2 if dry else 21):
            took.append(seconds(ctx, engine, batches)[0])
            if setting: MACHINE_SETTINGS[setting].after_step(n)
    compiled = engine.compiled_blocks
    try: predicted = account(model, train, 'cpu' if dry else 'cuda').peak_allocated
    except UserError: predicted = None
    return dict(
        ms=1e3*sorted(took)[len(took)//2], first_step_s=warm,
        loss=first['loss'], grad_norm=first['grad_norm'],
        peak=0 if dry else torch.cuda.max_memory_allocated(), predicted=predicted,
        fell_back=compiled.failure if compiled else '',
    )

def run_subject(name, dry):
    "What a process found about one subject; `RuntimeError` with its last words where it broke"
    setting, here = subjects()[name][1], Path(__file__).resolve().parents[1]
    env = os.environ | (MACHINE_SETTINGS[setting].env if setting else {})
    code = f'import sys, json; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n'
    code += f'from gpu.switches import measure\nprint(json.dumps(measure({name!r}, {dry})))'
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=150)
    if done.returncode: raise RuntimeError((done.stderr.strip().splitlines() or ['?'])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])

def switches(ctx):
    if ctx.absent:    # the kernels of the steps; what torch compiles is its own
        for changes, _ in subjects().values():
            # What this card's kernels cannot do is refused.
            with contextlib.suppress(UserError): account(SMALLER, dataclasses.replace(TWO, **changes))
        return
    found = {}
    # Those that torch compiles take longest, and come last.
    names = sorted(subjects(), key=lambda name: 'compile' in name)
    for name in ['plain', 'scan torch', 'attention math', 'gc_collect_10'] if ctx.dry else names:
        if ctx.left < 20 and not ctx.dry:
            yield note(f'no time was left for {name}')
            continue
        try: found[name] = r = run_subject(name, ctx.dry)
        except (RuntimeError, UserError, subprocess.TimeoutExpired, ValueError) as e:
            yield failed(name, e)
            continue
        if r['fell_back']: yield note(f"{name} fell back: {r['fell_back']}")
        yield row(name, r['ms'], 'ms', **{k: r[k] for k in ('loss', 'grad_norm', 'first_step_s')})
        if not ctx.dry:
            if r['predicted']: yield row(f'{name}: peak predicted', r['predicted']/2**20, 'MiB')
            yield row(f'{name}: peak measured', r['peak']/2**20, 'MiB')
        against = found.get(baseline(name), r)
        if against is r: continue
        yield row(f'{name}: speed', against['ms']/r['ms'], '×')
        off = abs(r['loss']/against['loss'] - 1)
        yield most(f'{name}: loss against without', off, 'of it', 1e-3)
