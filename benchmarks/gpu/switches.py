"""One step of the same model with each switch, against the step without: torch.compile in each mode (with
CUDA graphs where it has them), attention's back-ends, the scan's, and settings of the machine.

Settings that are environment variables must stand before a process starts, so each subject runs in one of its
own. Peaks stand beside the account's, gradients beside those of the plain step.
"""
import contextlib, dataclasses, json, os, subprocess, sys, time
import torch
from elleci.config import ModelConfig, TrainConfig
from elleci.core import UserError, seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.engine.machine_settings import MACHINE_SETTINGS
from elleci.optim.optimizers import make_optimizer
from elleci.planning.account import account
from gpu import kernel_cache
from gpu.bench import failed, note, row

MODEL = ModelConfig(vocab_size=32_128, d_model=1024, n_layers=8, d_ff=2816, n_attn_heads=8)
TOY = dataclasses.replace(
    MODEL, vocab_size=256, d_model=64, n_layers=2, pattern='MA', d_ff=96, headdim=16, n_attn_heads=2,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=32,
)
TRAIN = TrainConfig(seq_len=1024, batch_size=8, grad_accum_steps=2, optimizer='adamw')
MAJOR = dict(engine='layer-major', clip_by='layer', optimizer='lion8', precision='bf16-weights',
             block_inputs_on='device')
LAUNCH_BOUND = dict(batch_size=1, seq_len=256)

def subjects():
    "Name: (settings of the training, the machine's setting)"
    modes = ('default', 'reduce-overhead', 'max-autotune')
    found = {'plain': ({}, None), 'plain, few tokens': (LAUNCH_BOUND, None)}
    found |= {f'compile {mode}': (dict(compile=mode), None) for mode in modes}
    found |= {
        'compile reduce-overhead, few tokens': (LAUNCH_BOUND | dict(compile='reduce-overhead'), None),
        'compile default, recomputed': (dict(compile='default', checkpointing='block'), None),
        'layer-major': (MAJOR, None),
        'layer-major, compile default': (MAJOR | dict(compile='default'), None),
    }
    found |= {f'attention {b}': (dict(attention_backend=b), None)
              for b in ('flash', 'efficient', 'math', 'cudnn')}
    found |= {f'scan {b}': (dict(scan_backend=b), None) for b in ('torch', 'mamba-ssm')}
    return found | {name: ({}, name) for name in MACHINE_SETTINGS}

def baseline(name):
    "With what a subject is compared"
    if name.endswith('few tokens'): return 'plain, few tokens'
    return 'layer-major' if name.startswith('layer-major') else 'plain'

def measure(name, dry):
    "In a process of its own: what one subject's steps take, hold and compute; a line of JSON"
    changes, setting = subjects()[name]
    if not dry: kernel_cache.count_compilations()
    device = torch.device('cpu' if dry else 'cuda')
    cfg, train = TOY if dry else MODEL, dataclasses.replace(TRAIN, **changes)
    if dry: train = dataclasses.replace(train, seq_len=32, batch_size=1, precision='fp32'
                                        if train.engine == 'grad_accum' else train.precision)
    seed_everything(0)
    model = make_model(cfg, train).to(device)
    engine = make_engine(model, make_optimizer(model, train), train)
    tokens = torch.randint(0, cfg.vocab_size, (2, train.batch_size, train.seq_len + 1), device=device)
    documents = (torch.arange(train.seq_len, device=device)//300).expand(train.batch_size, -1).contiguous()
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous(), documents) for t in tokens]

    def step():
        result = engine.step(batches)
        if not dry: torch.cuda.synchronize()
        return result

    began = time.perf_counter()
    first = step()
    warm = time.perf_counter() - began
    for _ in range(0 if dry else 3): step()
    if not dry: torch.cuda.reset_peak_memory_stats()
    context = MACHINE_SETTINGS[setting].active() if setting else None
    after_step = context.__enter__() if context else lambda n: None
    seconds = []
    for n in range(1, 2 if dry else 21):
        began = time.perf_counter()
        step()
        after_step(n)
        seconds.append(time.perf_counter() - began)
    if context: context.__exit__(None, None, None)
    compiled = engine.compiled_blocks
    try: predicted = account(cfg, train, 'cpu' if dry else 'cuda').peak_allocated
    except UserError: predicted = None
    return dict(
        ms=1e3*sorted(seconds)[len(seconds)//2],
        first_step_s=warm,
        loss=first['loss'],
        grad_norm=first['grad_norm'],
        peak=0 if dry else torch.cuda.max_memory_allocated(),
        predicted=predicted,
        fell_back=compiled.failure if compiled else '',
    )

def run_subject(name, dry):
    "The line of a process for one subject; `RuntimeError` with its last words where it broke"
    setting = subjects()[name][1]
    env = os.environ | (MACHINE_SETTINGS[setting].env if setting else {})
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = f'import sys, json; sys.path[:0] = [{here!r}, {os.path.dirname(here)!r}]\n'
    code += f'from gpu.switches import measure\nprint(json.dumps(measure({name!r}, {dry})))'
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=150)
    if done.returncode: raise RuntimeError((done.stderr.strip().splitlines() or ['?'])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])

def run(ctx):
    if ctx.absent:    # the kernels of the steps; what torch compiles is its own
        for changes, _ in subjects().values():
            # What this card's kernels cannot do is refused.
            with contextlib.suppress(UserError): account(MODEL, dataclasses.replace(TRAIN, **changes))
        return
    found = {}
    # Those that torch compiles take longest, and come last.
    names = sorted(subjects(), key=lambda name: 'compile' in name)
    if ctx.dry: names = ['plain', 'scan torch', 'attention math', 'gc_collect_10']
    for name in names:
        if ctx.left < 20 and not ctx.dry:
            yield note(f'no time was left for {name}')
            continue
        try: found[name] = r = run_subject(name, ctx.dry)
        except (RuntimeError, UserError, subprocess.TimeoutExpired, ValueError) as e:
            yield failed(name, e)
            continue
        if r['fell_back']: yield note(f"{name} fell back: {r['fell_back']}")
        more = {k: r[k] for k in ('loss', 'grad_norm', 'first_step_s')}
        yield row(name, r['ms'], 'ms', **more)
        against = found.get(baseline(name))
        if against and against is not r: yield row(f'{name}: speed', against['ms']/r['ms'], '×')
        if not ctx.dry:
            if r['predicted']: yield row(f'{name}: peak predicted', r['predicted']/2**20, 'MiB')
            yield row(f'{name}: peak measured', r['peak']/2**20, 'MiB')
        if against and against is not r:
            off = abs(r['loss']/against['loss'] - 1)
            yield row(f'{name}: loss against without', off, 'of it', 1e-3, at_most=True)
