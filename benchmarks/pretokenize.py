"""Pre-tokenise synthesised text and read it back: data/results/pretokenize-<commit>.json.

    python benchmarks/pretokenize.py [--megabytes N] [--num-workers N] [--repeats N] [--dry] [--out FOLDER]

The text is the embedded corpus' documents, drawn anew with shuffled paragraphs, as JSONL. A process of its
own runs `elleci_pretokenize`'s function; from /proc come its peak memory and its workers' (resident, and
proportional: a page shared by n processes counts 1/n to each), and from the kernel's accounts the CPU time
of both. What the checksum of a shard costs, once per process and shard, is measured beside it. Targets: at
most 300 MiB in all, two cores at 90 % or more, at least 20 million tokens/s read from a warm map. A share
below the target with the machine idle at 0 % says that others were using it. --dry: 4 MB, one repeat,
nothing written.
"""
import argparse, datetime, json, os, platform, random, statistics, subprocess, sys, tempfile, time, zlib
from pathlib import Path
import numpy as np
from elleci.core import MiB, atomic_write
from elleci.data.packing import pack_documents
from elleci.data.shards import Shards, read_document, read_range
from elleci.data.sources import iter_documents, train_tokenizer_on
from elleci.data.tokenizer import save_tokenizer
from tiny import ROOT, commit, hardware

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

def synthesise(docs, path, size, seed=0):
    """JSONL of `size` bytes of text: documents with their paragraphs shuffled and a few of another's, so
    that none is there twice"""
    rng, written = random.Random(seed), 0
    paragraphs = [[p for p in d.text.split('\n\n') if p.strip()] for d in docs if not d.messages]
    with open(path, 'w', encoding='utf-8') as f:
        while written < size:
            own = rng.choice(paragraphs) + rng.choice(paragraphs)[:3]
            text = '\n\n'.join(rng.sample(own, len(own)))
            f.write(json.dumps({'text': text}, ensure_ascii=False) + '\n')
            written += len(text.encode())
    return written

def children(pid):
    try:
        return [
            int(p) for t in Path(f'/proc/{pid}/task').iterdir() for p in (t / 'children').read_text().split()
        ]
    except OSError: return []

def memory(pid):
    "(resident, proportional) bytes of a process now"
    try: lines = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    except OSError: return 0, 0
    found = {l.split(':')[0]: int(l.split()[1])*1024 for l in lines if l.startswith(('Rss:', 'Pss:'))}
    return found.get('Rss', 0), found.get('Pss', 0)

def idle():
    "(idle, all) time of all cores since the start of the machine"
    t = [int(v) for v in Path('/proc/stat').read_text().split('\n')[0].split()[1:9]]
    return np.array([t[3] + t[4], sum(t)])

def watched(process, every=.1):
    """Peaks while `process` runs: resident bytes of it and of its largest worker, proportional bytes of
    all together"""
    peak = dict(parent=0, largest_worker=0, all_proportional=0, workers=0)
    while process.poll() is None:
        (rss, pss), worker_memory = memory(process.pid), [memory(p) for p in children(process.pid)]
        now = dict(
            parent=rss,
            largest_worker=max((r for r, _ in worker_memory), default=0),
            all_proportional=pss + sum(p for _, p in worker_memory),
            workers=len(worker_memory),
        )
        peak = {k: max(peak[k], now[k]) for k in peak}
        time.sleep(every)
    return peak

def write(text, out, tokenizer, workers):
    """One pre-tokenisation, timed inside its process, without the import of torch but with the start of
    the workers"""
    before = idle()
    process = subprocess.Popen(
        [sys.executable, '-c', CHILD, text, out, tokenizer, str(workers)], stdout=subprocess.PIPE, text=True
    )
    peak, said = watched(process), process.stdout.read()
    if process.returncode: raise SystemExit(f'pretokenize ended with {process.returncode}')
    (unused, ticks), (seconds, cpu) = idle() - before, map(float, said.split())
    return dict(seconds=seconds, cpu_seconds=cpu, peak_bytes=peak, machine_idle=float(unused/ticks))

def speed(f, n, repeats):
    "Tokens per second, the median; the first run warms the map"
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - began)
    return round(n/statistics.median(seconds[1:]))

def shuffled(shards, some, seed=0):
    """At least `some` tokens: the documents of one shard after the other in random order, each copied out
    of the map"""
    rng, done = np.random.default_rng(seed), 0
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
    maps = [shards.map(k) for k in range(len(shards.shards))]
    verifying = time.perf_counter() - began
    held = sum(len(m) for m in maps)
    return dict(
        ranges=speed(lambda: [read_range(shards, i, min(n, i + T)) for i in range(0, n, T)], n, repeats),
        packed_rows_of_1024=speed(
            lambda: [rows.row(k) for k in range(some // 1024)], some // 1024 * 1024, repeats
        ),
        documents_shuffled=speed(lambda: shuffled(shards, some), some, repeats),
        documents=speed(
            lambda: [read_document(shards, i) for i in range(200)],
            sum(len(read_document(shards, i)[2]) for i in range(200)),
            repeats,
        ),
        checksum_mb_per_s=round(
            speed(lambda: [zlib.crc32(m) for m in maps], held * shards.dtype.itemsize, repeats) / 1e6
        ),
        verify_mb_per_s=round(n * shards.dtype.itemsize / 1e6 / verifying),
    ), dict(tokens=n, documents=shards.num_documents, shards=len(shards.shards))

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--megabytes', type=int, default=100)
    p.add_argument('--num-workers', '--workers', type=int, default=os.cpu_count())
    p.add_argument('--repeats', type=int, default=3)
    p.add_argument('--dry', action='store_true')
    p.add_argument('--out', type=Path, default=ROOT/'data'/'results', help='folder for the result')
    a = p.parse_args()
    size, repeats = (4*10**6, 1) if a.dry else (a.megabytes*10**6, a.repeats)
    data = tuple((part, f'embedded:{part}') for part in ('english', 'italian'))
    docs = [d for name, spec in data for d in iter_documents(name, spec)]
    result = dict(
        hardware=hardware(),
        python=platform.python_version(),
        numpy=np.__version__,
        commit=commit(),
        workers=a.num_workers,
        vocab_size=8192,
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
    )
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        save_tokenizer(train_tokenizer_on(data, result['vocab_size']), tmp/'tokenizer.json')
        text_bytes, runs = synthesise(docs, tmp/'text.jsonl', size), []
        for i in range(repeats):
            r = write(tmp/'text.jsonl', tmp/f'out{i}', tmp/'tokenizer.json', a.num_workers)
            runs.append(
                r
                | dict(
                    mb_per_s=text_bytes / 1e6 / r['seconds'],
                    cpu_share=r['cpu_seconds'] / r['seconds'] / min(a.num_workers, os.cpu_count()),
                )
            )
            print(
                f"{runs[-1]['mb_per_s']:.2f} MB/s, {runs[-1]['cpu_share']:.0%} of {a.num_workers} cores "
                f"(the machine idle {r['machine_idle']:.0%}), "
                f"{r['peak_bytes']['all_proportional'] / MiB:.0f} MiB in all "
                f"(parent {r['peak_bytes']['parent'] / MiB:.0f}, a worker "
                f"{r['peak_bytes']['largest_worker'] / MiB:.0f} resident)"
            )
        reading, size = read(tmp/'out0', max(repeats, 3))
        result |= dict(text_bytes=text_bytes, size=size, runs=runs, read_tokens_per_s=reading)
    print(size, {k: f'{v:,}' for k, v in reading.items()})
    if a.dry: return
    path = a.out/f"pretokenize-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path}')

if __name__ == '__main__': main()
