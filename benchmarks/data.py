"""Text to shards and back. See runner.py for the command line.
"""
import json, os, platform, random, subprocess, sys, tempfile, time, zlib
from pathlib import Path
from statistics import median
import numpy as np
from elleci.data.packing import pack_documents
from elleci.data.shards import Shards, read_document, read_range
from elleci.data.sources import iter_documents, train_tokenizer_on
from elleci.data.tokenizer import save_tokenizer
from runner import main

CHILD = """import os, sys, time
from elleci.data.shards import pretokenize
from elleci.data.sources import iter_documents
from elleci.data.tokenizer import load_tokenizer
tok = load_tokenizer(sys.argv[3])
# seconds of CPU, of this process and of the children that it has waited for
def cpu_seconds(): return sum(os.times()[:4])
began, before = time.perf_counter(), cpu_seconds()
pretokenize(iter_documents('text', sys.argv[1]), sys.argv[2], tok)
print(time.perf_counter() - began, cpu_seconds() - before)"""

def synthesise(docs, path, size):
    "JSONL of `size` bytes: documents with paragraphs shuffled and a few of another's: none is twice"
    rng, written = random.Random(0), 0
    paragraphs = [[p for p in d.text.split('\n\n') if p.strip()] for d in docs if not d.messages]
    with open(path, 'w', encoding='utf-8') as f:
        while written < size:
            own = rng.choice(paragraphs) + rng.choice(paragraphs)[:3]
            text = '\n\n'.join(rng.sample(own, len(own)))
            f.write(json.dumps({'text': text}, ensure_ascii=False) + '\n')
            written += len(text.encode())
    return written

def write(text, out, tokenizer):
    "One pre-tokenisation, timed inside its process, without the import of torch"
    command = [sys.executable, '-c', CHILD, text, out, tokenizer]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu = map(float, done.stdout.split())
    return dict(seconds=seconds, cpu_seconds=cpu)

def speed(f, n, repeats):
    "n per second, the median; the first run warms the map"
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - began)
    return round(n/median(seconds[1:]))

def shuffled(shards, some):
    "At least `some` tokens: the documents of one shard after another in random order, copied out of it"
    rng, done = np.random.default_rng(0), 0
    for k in rng.permutation(len(shards.shards)):
        tokens, lengths = shards.map(k), np.array(shards.details(k).lengths)
        starts = np.cumsum(lengths) - lengths
        for i in rng.permutation(len(lengths)):
            done += len(np.array(tokens[starts[i]:starts[i] + lengths[i]]))
            if done >= some: return

def read(out, repeats, T=2**16):
    "Tokens per second of each way to read, from a warm map; and what checking costs"
    shards = Shards(out)
    n, some, rows = shards.num_tokens, min(shards.num_tokens, 2**22), pack_documents(shards, 1024)
    began = time.perf_counter()
    maps = [shards.map(k) for k in range(len(shards.shards))]    # the first look at a shard checks it
    verifying, width = time.perf_counter() - began, shards.dtype.itemsize
    of_200 = sum(len(read_document(shards, i)[2]) for i in range(200))
    found = dict(
        ranges=speed(lambda: [read_range(shards, i, min(n, i + T)) for i in range(0, n, T)], n, repeats),
        packed_rows_of_1024=speed(lambda: [rows.row(k) for k in range(some//1024)], some//1024*1024, repeats),
        documents_shuffled=speed(lambda: shuffled(shards, some), some, repeats),
        documents=speed(lambda: [read_document(shards, i) for i in range(200)], of_200, repeats),
    )
    checked = speed(lambda: [zlib.crc32(m) for m in maps], sum(map(len, maps))*width, repeats)
    found |= dict(checksum_mb_per_s=round(checked/1e6), verify_mb_per_s=round(n*width/1e6/verifying))
    return found, dict(tokens=n, documents=shards.num_documents, shards=len(shards.shards))

def pretokenize(megabytes=100, repeats=3, dry=False):
    """Pre-tokenise synthesised text in a process of its own, and read it back (wanted: two cores at 90 %, 20
    million tokens/s read from a warm map)"""
    if dry: megabytes, repeats = 4, 1
    data = tuple((part, f'embedded:{part}') for part in ('english', 'italian'))
    docs, runs, vocab_size = [d for part in data for d in iter_documents(*part)], [], 8192
    with tempfile.TemporaryDirectory() as tmp:
        text, tokenizer = Path(tmp)/'text.jsonl', Path(tmp)/'tokenizer.json'
        save_tokenizer(train_tokenizer_on(data, vocab_size), tokenizer)
        text_bytes = synthesise(docs, text, megabytes*10**6)
        for i in range(repeats):
            r = write(text, f'{tmp}/out{i}', tokenizer)
            share = r['cpu_seconds']/r['seconds']/os.cpu_count()
            runs.append(r | dict(mb_per_s=text_bytes/1e6/r['seconds'], cpu_share=share))
            print(f"{runs[-1]['mb_per_s']:.2f} MB/s, {share:.0%} of the cores", flush=True)
        reading, size = read(Path(tmp)/'out0', max(repeats, 3))
    yield dict(python=platform.python_version(), numpy=np.__version__, workers=os.cpu_count(),
               vocab_size=vocab_size, text_bytes=text_bytes, size=size, runs=runs, read_tokens_per_s=reading)

if __name__ == '__main__': main(pretokenize)
