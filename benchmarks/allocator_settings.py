"""What the settings of the allocator do to a step of elleci-1b5: data/results/allocator_settings-*.json.

    python benchmarks/allocator_settings.py

A prediction: the events of the step come from the account, and the replay follows the allocator's rules.
"""
import datetime, json
import torch
from elleci.config import preset
from elleci.core import atomic_write, fmt_bytes
from elleci.memory.allocator import replay
from elleci.planning.account import trace_step
from tiny import ROOT, commit, hardware

SETTINGS = [''] + [f'max_split_size_mb:{2**i}' for i in range(5, 10)]
SETTINGS += ['roundup_power2_divisions:4', 'roundup_power2_divisions:8', 'expandable_segments:True']
FRACTION = 'per_process_memory_fraction:0.95'
LIMITED = [FRACTION, FRACTION + ',garbage_collection_threshold:0.8']

def row(events, text, capacity=None):
    r = replay(events, capacity, settings=text)
    return dict(allocated=r.peak_allocated, reserved=r.peak_reserved, mallocs=r.n_mallocs, frees=r.n_frees,
                retries=r.n_retries)

def main():
    config = preset('elleci-1b5')
    events = trace_step(config.model, config.train).replay_events()
    card = int(1.25*replay(events).peak_allocated)
    result = dict(
        hardware=hardware(), torch=torch.__version__, commit=commit(), events=len(events), card=card,
        unlimited={text: row(events, text) for text in SETTINGS},
        limited={text: row(events, text, card) for text in LIMITED},
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
    )
    path = ROOT/'data'/'results'/f"allocator_settings-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    for text, r in (result['unlimited'] | result['limited']).items():
        print(f"{text or 'as it is':68} {fmt_bytes(r['reserved'])}, {r['mallocs']} calls of cudaMalloc")
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
