"What a part of gpu_suite.py is told, and the rows that it gives back: a line of JSON each, on disk at once."
import datetime, json, math, os, time
from dataclasses import dataclass, field
from pathlib import Path

@dataclass
class Context:
    "What a part is told"
    dry:bool              # toy sizes, on the CPU
    limit:float           # seconds, from now on
    absent:bool = False   # full sizes, on a card that is not there: see `gpu.kernel_cache.absent_card`
    # what the part `machine` found: bandwidth (B/s), flops (/s in bf16), the rates of `step_time`
    machine:dict = field(default_factory=dict)
    folder:Path = Path()  # where the result is written, and what belongs to it
    began:float = field(default_factory=time.monotonic)
    @property
    def device(self):
        import torch     # here, since a part that needs none starts at once
        return torch.device('cpu' if self.dry else 'cuda')
    @property
    def left(self): return self.limit - (time.monotonic() - self.began)

def row(name, measured, unit, target=None, at_most=False, must=False, **more):
    "A result; ratio is 1 or more where the target is reached. `must`: missing it is a failure, not a finding"
    ratio = met = None
    if target is not None and measured is not None:
        met = measured <= target if at_most else measured >= target
        by, of = (target, measured) if at_most else (measured, target)
        ratio = by/of if of else None
    more |= dict(must=True) if must else {}
    return dict(name=name, target=target, measured=measured, ratio=ratio, unit=unit, met=met, **more)

def note(name, **more): return row(name, None, '', **more)

def most(name, measured, unit, limit, **more): return row(name, measured, unit, limit, at_most=True, **more)

def check(name, measured, unit, limit, **more): return most(name, measured, unit, limit, must=True, **more)

def plain(o):
    "What JSON can hold"
    if isinstance(o, dict): return {str(k): plain(v) for k, v in o.items()}
    if isinstance(o, (list, tuple)): return [plain(v) for v in o]
    if isinstance(o, float) and not math.isfinite(o): return str(o)
    return o if o is None or isinstance(o, (bool, int, float, str)) else str(o)

def write_row(path, r):
    "Append it, with the date; what is cut afterwards cannot take it back"
    date = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M:%S UTC')
    r = plain(r | dict(date=date))
    with open(path, 'ab+') as f:
        # Whoever was stopped in the middle of a line has left one without an end.
        if f.seek(0, os.SEEK_END) and (f.seek(-1, os.SEEK_END), f.read())[1] != b'\n': f.write(b'\n')
        f.write(json.dumps(r, ensure_ascii=False).encode() + b'\n')
        f.flush()
        os.fsync(f.fileno())
    return r

def read_rows(path, offset=0):
    "The rows in a file from that byte on, and the byte behind the last; what is no row is passed over"
    with open(path, 'rb') as f:
        f.seek(offset)
        whole = f.read().rpartition(b'\n')[0] + b'\n'
    rows = []
    for line in whole.splitlines():
        try: rows.append(json.loads(line))
        except ValueError: pass
    return rows, offset + (len(whole) if whole != b'\n' else 0)
