"""What a change that only moves, renames or shortens code leaves as it is: data/pins/*.json.

    python .ci/pins.py            compares, and prints every place that differs
    python .ci/pins.py --write    writes them anew, for a change that means to move one
    python .ci/pins.py names …    some of them alone
    python .ci/pins.py --sample   what `make test` compares

Losses are compared to the last bit on a kind of processor that has written them (data/pins/seeded-*.json),
and to a thousandth on another.
"""
import ast, atexit, dataclasses, functools, importlib, inspect, io, itertools, json, os, re, shutil, signal
import sys, tempfile, threading, time, zlib
os.environ['OMP_NUM_THREADS'] = '1'    # sums in one order
from configparser import ConfigParser
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import torch
from safetensors.torch import load_file
from tqdm import tqdm
import elleci
from elleci.config import PRESETS, preset
from elleci.core import UserError, type_and_range
from elleci.memory.ledger import ledger, parameter_counts, phase_peaks
from elleci.planning.account import account, as_dict
from elleci.planning.planner import estimate_peak, plan
from elleci.training.run import elleci_train
from elleci.training.telemetry import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT/'data'/'pins'
CARDS = '8GiB', '12GiB', '24GiB'
PATTERNS = 'M', 'A', 'E', 'MMMA', 'MEA'
TOY = dict(vocab_size=512, d_model=64, n_layers=2, headdim=16, d_state=8, n_attn_heads=2, kv_lora_rank=16,
           qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, d_ff=128)
STEPS = dict(steps=50, val_every=25, save_every=10, seq_len=64, batch_size=2, grad_accum_steps=2, val_rows=4)

def or_refused(f, *args):
    "A function's result, or the sentence in which it refuses"
    try: return f(*args)
    except UserError as e: return f'refused: {e}'

def engines():
    "(name, model, training) of every preset with its own engine and with the other"
    places = dict(block_inputs_on='auto', weights_on='device', states_on='device')
    other = {'grad_accum': dict(engine='layer-major', clip_by='layer', checkpointing='none'),
             'layer-major': dict(engine='grad_accum', checkpointing='block') | places}
    for name in PRESETS:
        c = preset(name)
        yield name, c.model, c.train
        changed = other[c.train.engine] | (dict(precision='bf16') if c.train.precision == 'fp16' else {})
        yield f"{name}, {changed['engine']}", c.model, dataclasses.replace(c.train, **changed)

def accounts(chosen=None):
    "What `elleci_memory --json` says of every preset, both engines and three cards, but for the settings"
    def sizes(model, train, name):
        a, rows = account(model, train, name=name), {}
        for card in CARDS:
            row = as_dict(a, int(card[:-3]) << 30)
            for part in ('model', 'train'): row.pop(part)
            rows[card] = row
        # what all cards share stands once
        shared = {k: v for k, v in rows[CARDS[0]].items() if all(r[k] == v for r in rows.values())}
        return shared | {c: {k: v for k, v in r.items() if k not in shared} for c, r in rows.items()}
    wanted = [e for e in engines() if chosen is None or e[0] in chosen]
    return {name: or_refused(sizes, model, train, name) for name, model, train in wanted}

def closed_forms():
    "Parameters, ledger, peaks by phase and the planner's estimate"
    def forms(model, train):
        if train.engine == 'layer-major':
            return dict(peak=estimate_peak(model, dataclasses.replace(train, block_inputs_on='device')))
        sizes = dict(parameters=parameter_counts(model), ledger=ledger(model, train))
        return sizes | dict(phases=phase_peaks(model, train))
    return {name: or_refused(forms, model, train) for name, model, train in engines()}

def plans(cards=CARDS):
    "What the planner chooses for the 1.5B model on three cards"
    def choice(card): return plan(preset('elleci-1b5'), vram=card).as_dict()
    return {card: or_refused(choice, card) for card in cards}

def quiet(f, *args, **kwargs):
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()): return f(*args, **kwargs)

def figures(run):
    "Every loss of a run to the last bit, and a checksum of its weights"
    rows, crc = read_metrics(run), 0
    weights = load_file(max(run.glob('checkpoints/*/model.safetensors')))
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].contiguous().view(torch.uint8).numpy().tobytes(), crc)
    def exact(key): return [float(r[key]).hex() for r in rows if key in r]
    return dict(loss=exact('loss'), val_loss=exact('val_loss'), weights=f'{crc:08x}')

def killed_and_resumed(config, out):
    "Train in a process that is killed after its twentieth step, then go on"
    child = os.fork()
    if not child:
        tqdm.set_lock(threading.RLock())    # else it may die with the lock that we share
        quiet(elleci_train, config=config, data=str(tokens()), out=str(out))
        os._exit(0)
    metrics = out/'metrics.jsonl'
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 20): time.sleep(.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    quiet(elleci_train, config=config, data=str(tokens()), out=str(out), resume=True)

@functools.cache
def tokens():
    "The embedded corpus, tokenised into a folder that this process removes at its end"
    from elleci.data.prepare import elleci_pretokenize
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    quiet(elleci_pretokenize, data='embedded', out=f'{folder}/tokens', vocab_size=TOY['vocab_size'])
    return Path(folder)/'tokens'

def shards():
    "Checksum and size of each file that the embedded corpus is tokenised into"
    files = [p for p in sorted(tokens().rglob('*')) if p.suffix in ('.tokens', '.toml')]
    texts = {str(p.relative_to(tokens())): p.read_bytes() for p in files}
    return {name: [len(text), f'{zlib.crc32(text):08x}'] for name, text in texts.items()}

def seeded(patterns=PATTERNS):
    "Fifty steps of a toy: five patterns of mixers, both engines; one of them killed and resumed"
    found, base = {}, preset('elleci-tiny')
    with tempfile.TemporaryDirectory() as tmp:
        for engine, pattern in itertools.product(('grad_accum', 'layer-major'), patterns):
            changes = STEPS | dict(engine=engine, clip_by='layer' if engine == 'layer-major' else 'model')
            model = dataclasses.replace(base.model, **TOY | dict(pattern=pattern))
            config = dataclasses.replace(base, model=model, train=dataclasses.replace(base.train, **changes))
            out = Path(tmp)/f'{engine}-{pattern}'
            quiet(elleci_train, config=config, data=str(tokens()), out=str(out))
            found[f'{engine}, {pattern}'] = figures(out)
        killed_and_resumed(config, out := Path(tmp)/'killed')
        found['killed and resumed'] = figures(out)
    return dict(processor=processor(), torch=torch.__version__, runs=found)

def processor():
    "Maker and instruction set: matrix products of two makers' processors are summed in another order"
    info = Path('/proc/cpuinfo')
    makers = re.findall(r'vendor_id\s*: (\S+)', info.read_text()) if info.exists() else []
    return f"{(makers or ['unknown'])[0]}-{torch.backends.cpu.get_cpu_capability()}"

def pinned_in(name):
    "The file of a pin; where no processor like this one has written seeded losses, that of another"
    if name != 'seeded': return PINS/f'{name}.json'
    own, *others = PINS/f'seeded-{processor()}.json', *sorted(PINS.glob('seeded-*.json'))
    return own if own.exists() else others[0]

def flags():
    "Flag: type and default, of every console command"
    settings = ConfigParser(delimiters=['='])
    settings.read(ROOT/'settings.ini')
    lines = [l.split('=')[0].strip() for l in settings['DEFAULT']['console_scripts'].splitlines()]
    found = {}
    for command in filter(None, lines):
        module = next(m for m in modules() if f'\ndef {command}(' in (ROOT/m).read_text())
        f = getattr(importlib.import_module(module[:-3].replace('/', '.')), command)
        parameters = inspect.signature(f).parameters.items()
        types = {n: type_and_range(p.annotation)[0] for n, p in parameters}
        names = {n: getattr(kind, '__name__', str(kind)) for n, kind in types.items()}
        found[command] = {n: [names[n], repr(p.default)] for n, p in parameters}
    return found

def modules(): return sorted(str(p.relative_to(ROOT)) for p in (ROOT/'elleci').rglob('*.py'))

def names():
    "What `import elleci` offers, and what lessons and references import from its modules"
    used = {}
    for path in sorted((ROOT/'nbs').glob('*.ipynb')):
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        for source in (''.join(c['source']) for c in cells if c['cell_type'] == 'code'):
            try: tree = ast.parse(source)
            except SyntaxError: continue      # a line for the shell
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('elleci'):
                    public = {a.name for a in node.names if not a.name.startswith('_')}
                    used.setdefault(node.module, set()).update(public)
    return dict(elleci=list(elleci.__all__), modules={m: sorted(used[m]) for m in sorted(used)})

# What `make test` compares, where all would take too long
SAMPLE = dict(plans=(), accounts=[*PRESETS], seeded=PATTERNS[-1:])
MADE = dict(names=names, flags=flags, closed_forms=closed_forms, accounts=accounts, plans=plans,
            shards=shards, seeded=seeded)

def differences(old, new, path=''):
    "Where two results differ: in a value, or in the order of their keys"
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new) and sorted(old) == sorted(new): yield f'{path}: keys in another order'
        for key in {**old, **new}: yield from differences(old.get(key), new.get(key), f'{path}/{key}')
    elif old != new: yield f'{path}: {str(old)[:100]} pinned, {str(new)[:100]} now'

def nearly(old, new):
    "Where seeded losses differ by more than a thousandth"
    for name in new['runs']:
        for key in ('loss', 'val_loss'):
            before, now = ([float.fromhex(x) for x in r['runs'][name][key]] for r in (old, new))
            off = max(abs(a/b - 1) for a, b in zip(before, now, strict=True))
            if off > 1e-3: yield f': {name}, {key} differs by {off:.2%}'

def sampled(old, name):
    "The part of a pin that a sample has"
    if name != 'seeded': return {k: old[k] for k in SAMPLE[name]}
    chosen = [n for n in old['runs'] if n.split(', ')[-1] in (*SAMPLE[name], 'killed and resumed')]
    return old | dict(runs={n: old['runs'][n] for n in chosen})

def main(chosen, write, sample):
    bad = []
    for name in chosen or MADE:
        began, sampling = time.process_time(), sample and name in SAMPLE
        now = json.loads(json.dumps(MADE[name](SAMPLE[name]) if sampling else MADE[name]()))
        if write:
            path = PINS/(f'seeded-{processor()}.json' if name == 'seeded' else f'{name}.json')
            path.write_text(json.dumps(now, indent=0, ensure_ascii=False) + '\n', encoding='utf-8')
        old, how = json.loads(pinned_in(name).read_text(encoding='utf-8')), ''
        if sampling: old = sampled(old, name)
        if name == 'seeded' and (old['processor'], old['torch']) != (now['processor'], now['torch']):
            found = list(nearly(old, now))
            how = f"; to a thousandth, since the pins are of {old['processor']} and torch {old['torch']}"
        else: found = list(differences(old, now))
        print(f'{name}: {len(found)} differences, {time.process_time() - began:.1f} s of CPU{how}')
        bad += [f'{name}{line}' for line in found]
    print('\n'.join(bad[:40]))
    return bool(bad)

if __name__ == '__main__':
    options = {'--write', '--sample'}
    args = sys.argv[1:]
    sys.exit(main([a for a in args if a not in options], '--write' in args, '--sample' in args))
