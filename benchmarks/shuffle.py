"""Sorted bilingual text against the same documents permuted beforehand, on elleci-tiny:
data/results/shuffle-<commit>.json.

    python benchmarks/shuffle.py [--steps N] [--seeds N] [--older COMMIT] [--dry]

A folder of text is read in the order of its names, so a folder of en_* and it_* is sorted by language. If
the order in which rows are read is as good as it should be, that costs nothing: the loss on held-out
documents is that of the same documents permuted beforehand. The text is what the machine has: gettext
catalogues of installed programs, which hold each message in English and in Italian, or, where there are
none, the corpus that comes with Python and with this project. --older measures an older version of the
package on the sorted text too.
"""
import argparse, datetime, gettext, json, math, os, random, re, subprocess, sys, tempfile, time, zlib
from pathlib import Path
import numpy as np
import torch
from elleci.config import EMBEDDED, preset
from elleci.core import atomic_write, seed_everything
from elleci.data.loader import make_loader, open_data
from elleci.data.packing import pack_documents
from elleci.data.shards import pretokenize
from elleci.data.sources import Document, iter_documents
from elleci.data.tokenizer import encode_documents
from elleci.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from elleci.engine.layer_major import make_engine, make_model
from elleci.optim.optimizers import make_optimizer
from elleci.optim.schedules import lr_factor
from elleci.training.loop import validate
from tiny import ROOT, commit, hardware

CATALOGUES = '/usr/share/locale/it/LC_MESSAGES'
LENGTH = 1000          # characters of a document, at least
HELD = 16              # one document of so many is held out
LANGUAGES = ('en', 'it')

def catalogues(folder=CATALOGUES):
    """{language: [documents]} of gettext catalogues: a document is some messages of a program that follow
    each other"""
    texts = {language: [] for language in LANGUAGES}
    for path in sorted(Path(folder).glob('*.mo')):
        try:
            with open(path, 'rb') as f: messages = gettext.GNUTranslations(f)._catalog
        except (OSError, ValueError, LookupError): continue
        pairs = [(k, v) for k, v in messages.items() if isinstance(k, str) and isinstance(v, str) and k and v]
        for language, side in zip(LANGUAGES, zip(*pairs)): texts[language] += grouped(side)
    return texts

def embedded():
    "{language: [documents]} of the corpus that is always there"
    parts = {
        name: [p for d in iter_documents(name, spec) for p in grouped(d.text.split('\n\n'))]
        for name, spec in EMBEDDED
    }
    english = random.Random(0).sample(parts['english'], min(len(parts['english']), 10*len(parts['italian'])))
    return {'en': sorted(english), 'it': parts['italian'] + parts['instructions']}

def grouped(messages):
    "Messages joined to documents of `LENGTH` characters"
    found, size = [[]], 0
    for message in messages:
        if size >= LENGTH:
            found.append([])
            size = 0
        found[-1].append(message)
        size += len(message)
    return ['\n'.join(f) for f in found if f]

def bilingual():
    "What the text is, and {language: [documents]}"
    texts = catalogues()
    if min(len(t) for t in texts.values()) >= 500:
        return 'gettext catalogues of installed programs, msgid and msgstr', texts
    return 'the embedded corpus', embedded()

def split(texts):
    "((name, text) to train on in the order of a folder, {language: texts held out})"
    train, held = [], {language: [] for language in LANGUAGES}
    for language, found in texts.items():
        for i, text in enumerate(found):
            if zlib.crc32(text.encode()) % HELD: train.append((f'{language}_{i:05}.txt', text))
            else: held[language].append(text)
    return train, held

def data(folder, named, tok, permuted):
    """The documents as shards in `folder`; their names, and so what the run itself holds out, are the
    same in any order"""
    named = list(named)
    if permuted is not None: random.Random(permuted).shuffle(named)
    pretokenize([Document('text', name, text) for name, text in named], folder, tok)
    return (('text', str(folder)),)

def train(config, tok, folder, val, labels, held_bytes):
    "One training; bits per byte of the held-out documents of each language, and of all"
    seed_everything(config.train.seed)
    t, losses = config.train, []
    mix, _ = open_data(t, tok, folder)
    model = make_model(config.model, t)
    engine = make_engine(model, make_optimizer(model, t), t)
    began = time.perf_counter()
    for i, (micro, *_) in enumerate(make_loader(mix, t), 1):
        for group in engine.optimizer.param_groups: group['lr'] = t.lr*lr_factor(t, i)
        losses.append(engine.step(micro)['loss'])
    seconds = time.perf_counter() - began
    bits = {}
    for language, rows in val.items():
        bits[language] = (
            validate(engine, {language: rows}, 16, 10**6)['val_loss'] * labels[language] / math.log(2)
        )
    per_byte = {language: round(b/held_bytes[language], 4) for language, b in bits.items()}
    every = max(1, t.steps//12)
    curve = [[i + every, round(float(np.mean(losses[i:i + every])), 4)] for i in range(0, t.steps, every)]
    return dict(
        bits_per_byte=round(sum(bits.values()) / sum(held_bytes.values()), 4),
        **per_byte,
        seconds=round(seconds, 1),
        curve=curve,
    )

def measure(order, seeds, steps):
    "The trainings on text that is 'sorted' or 'permuted' beforehand: a line of JSON each"
    torch.set_num_threads(int(os.environ.get('OMP_NUM_THREADS', torch.get_num_threads())))
    source, texts = bilingual()
    named, held = split(texts)
    tiny = preset('elleci-tiny')
    with tempfile.TemporaryDirectory() as tmp:
        tok_path = Path(tmp)/'tokenizer.json'
        save_tokenizer(train_tokenizer([text for _, text in named], tiny.model.vocab_size), tok_path)
        tok = load_tokenizer(tok_path)
        encoded = {
            l: encode_documents(tok, [Document('held', str(i), t) for i, t in enumerate(ts)])
            for l, ts in held.items()
        }
        val = {language: pack_documents(docs, tiny.train.seq_len) for language, docs in encoded.items()}
        # of a document all but its first token
        labels = {language: sum(len(d) - 1 for d in docs) for language, docs in encoded.items()}
        held_bytes = {language: sum(len(t.encode()) for t in ts) for language, ts in held.items()}
        size = {l: sum(len(x.encode()) for n, x in named if n.startswith(l)) for l in LANGUAGES}
        print(
            json.dumps(dict(text=source, documents=len(named), bytes=size, held_out_bytes=held_bytes)),
            flush=True,
        )
        for seed in seeds:
            where = data(Path(tmp)/f'{order}-{seed}', named, tok, seed if order == 'permuted' else None)
            config = preset('elleci-tiny', steps=steps, seed=seed, data=where, mix=())
            print(
                json.dumps(dict(order=order, seed=seed) | train(config, tok, tmp, val, labels, held_bytes)),
                flush=True,
            )

def measured(order, seeds, steps, package=ROOT):
    "The lines of `measure` in a process of its own, with another version of the package if need be"
    code = (
        'import sys, json; sys.path.insert(0, sys.argv[1]); import shuffle; '
        'shuffle.measure(*json.loads(sys.argv[2]))'
    )
    env = os.environ | {'PYTHONPATH': str(package)}
    argv = [sys.executable, '-c', code, str(Path(__file__).parent), json.dumps([order, list(seeds), steps])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env, cwd=tempfile.gettempdir()) as p:
        for line in p.stdout:
            if line.startswith('{'): yield json.loads(line)
    if p.returncode: raise SystemExit(f'{order}: ended with {p.returncode}')

def older_version(name, folder):
    "Another commit of this repository, checked out into `folder`"
    archive = subprocess.run(
        ['git', 'archive', name, 'elleci', 'data/corpus'], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(['tar', '-x', '-C', folder], input=archive, check=True)
    return folder

def summary(runs):
    "Means over the seeds, and how much worse than permuted each order is"
    kinds = dict.fromkeys((r['order'], r.get('version', '')) for r in runs)
    found = {k: [r for r in runs if (r['order'], r.get('version', '')) == k] for k in kinds}
    means = {
        k: {key: round(float(np.mean([r[key] for r in rs])), 4) for key in ('bits_per_byte', *LANGUAGES)}
        for k, rs in found.items()
    }
    reference = means.get(('permuted', ''), {}).get('bits_per_byte', math.nan)
    return [dict(order=' '.join(filter(None, k)), seeds=len(found[k])) | m
            | dict(against_permuted=round(m['bits_per_byte']/reference - 1, 4)) for k, m in means.items()]

def write(result, path):
    "A pair of numbers to a line"
    flat = re.sub(
        r'\[\s+([\d.]+),\s+([\d.]+)\s+\]', r'[\1, \2]', json.dumps(result, indent=1, ensure_ascii=False)
    )
    atomic_write(path, flat + '\n')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=240)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--older', help='a commit whose package is measured on the sorted text too')
    p.add_argument('--dry', action='store_true', help='a few steps, nothing is written')
    a = p.parse_args()
    if a.dry: a.steps, a.seeds = 3, 1
    t = preset('elleci-tiny').train
    result = dict(
        preset='elleci-tiny',
        steps=a.steps,
        tokens_per_step=t.tokens_per_step,
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
    )
    runs, path = [], ROOT/'data'/'results'/f"shuffle-{result['commit']}.json"
    def note(lines, **more):
        for line in lines:
            if 'order' not in line: result.update(line)
            else:
                runs.append(line | more)
                print({k: v for k, v in runs[-1].items() if k != 'curve'}, flush=True)
                if not a.dry: write(result | dict(summary=summary(runs), runs=runs), path)
    for order in ('sorted', 'permuted'): note(measured(order, range(a.seeds), a.steps))
    if a.older:
        with tempfile.TemporaryDirectory() as folder:
            note(measured('sorted', range(a.seeds), a.steps, older_version(a.older, folder)), version=a.older)
    for line in summary(runs): print(line)
    if not a.dry: print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
