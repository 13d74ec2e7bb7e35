"""What a launch costs the host: data/results/host_launches-<commit>.json, which `63_step_time_bytes` and
`63_step_time_measured` show.

    python benchmarks/host_launches.py     with Triton, without TRITON_INTERPRET

Steps so small that nothing is computed, on CPU tensors, through the code of a GPU: every kernel is compiled,
looked up and launched as there, only that the launch does nothing. Each of sixteen kinds of steps is timed
and divided by the launches that `step_bytes` counts, an operator of ours counted as one to four of PyTorch's.
Beside them stands what `measured_machine` times on a GPU, PyTorch's own encoder layers.
"""
import contextlib, datetime, importlib, itertools, json, os, time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock
os.environ['OMP_NUM_THREADS'] = '1'
import torch
from elleci.core import atomic_write
from elleci.config import preset
from elleci.kernels import document_attention, triton_compat
from elleci.planning import step_time
from gpu.recipe import HOST_BOUND, TOY, as_ordinary, engine_for, text_batches
from tiny import ROOT, commit, hardware

WEIGHTS = 1, 2, 3, 4
CACHED = '_part_traffic', '_rows_traffic', '_pass_traffic', '_update_traffic', '_memory_traffic', 'step_bytes'
CTX = SimpleNamespace(device=torch.device('cpu'), dry=True)

class LaunchNothing(triton_compat.CompileOnlyDriver):
    "Compiles, keeps what it has compiled, and launches nothing"
    def load_binary(self, *_): return 1, 1, 0, 0, 1024

def empty_forward(q, k, v, documents, scale):
    return torch.empty_like(q), q.new_empty((q.shape[2], q.shape[0]*q.shape[1]), dtype=torch.float32)

def empty_backward(dout, q, k, v, *_): return tuple(map(torch.empty_like, (q, k, v)))

@contextlib.contextmanager
def as_on_a_gpu():
    "Within it CPU tensors go where those of a GPU would; what isn't written is not looked at"
    triton_compat.triton.runtime.driver.set_active(LaunchNothing(90))
    with contextlib.ExitStack() as stack:
        def put(owner, name, value): stack.enter_context(mock.patch.object(owner, name, value))
        for kernel in 'bitnet conv gated_norm pointwise ssd lion8 linear_cross_entropy'.split():
            module = importlib.import_module(f'elleci.kernels.{kernel}')
            if hasattr(module, 'pick_backend'): put(module, 'pick_backend', lambda *_: 'triton')
        put(document_attention, '_pick_kernel', lambda q: 'flash')
        put(document_attention, '_forward_flash', empty_forward)
        put(document_attention, '_backward_flash', empty_backward)
        put(torch.cuda, 'device_of', lambda t: contextlib.nullcontext())
        put(torch, 'isfinite', lambda t: torch.tensor(True))
        yield

def kinds():
    "{name: (model, training)}: ternary or not, both engines, one micro-batch or eight, two patterns"
    for ternary, major, M, pattern in itertools.product((True, False), (True, False), (1, 8), ('MMMA', 'A')):
        model = replace(TOY, ternary=ternary, n_layers=4, pattern=pattern)
        lean = preset('elleci-1b5-12gib', block_inputs_on='device').train
        train = replace(lean, **HOST_BOUND, grad_accum_steps=M)
        ordinary = replace(as_ordinary(train, 'none'), optimizer='adamw', precision='bf16')
        layers, engine = 'ternary' if ternary else 'plain', 'layer-major' if major else 'ordinary'
        yield f'{layers}, {engine}, {M} × {pattern}', model, train if major else ordinary

def seconds(model, train, repeats=8):
    "The fastest of some steps, after two that do not count"
    engine, source, took = engine_for(CTX, model, train), text_batches(CTX, train), []
    for _ in range(repeats):
        micro = next(source)
        began = time.perf_counter()
        engine.step(micro)
        took.append(time.perf_counter() - began)
    return min(took[2:])

def launches(model, train, weight):
    "As `step_bytes` counts them, an operator of ours as `weight` of PyTorch's"
    for name in CACHED: getattr(step_time, name).cache_clear()
    with mock.patch.object(step_time, 'OWN_LAUNCHES', weight):
        return sum(phase['launches'] for phase in step_time.step_bytes(model, train).values())

def main():
    torch.set_num_threads(1)
    rows = []
    with as_on_a_gpu():
        for name, model, train in kinds(): rows.append(dict(name=name, seconds=seconds(model, train)))
    for row, (_, model, train) in zip(rows, kinds()):
        counts = {w: launches(model, train, w) for w in WEIGHTS}
        row['microseconds'] = {w: 1e6*row['seconds']/n for w, n in counts.items()}
        each = (f'{us:6.1f}' for us in row['microseconds'].values())
        print(f"{row['name']:32} {1e3*row['seconds']:6.1f} ms ", *each)
    layers = 1e6*step_time._launch_seconds(CTX.device)/step_time.STEP_LAUNCH
    print(f"a launch in PyTorch's own layers: {layers:.1f} µs")
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    versions = dict(torch=torch.__version__, triton=triton_compat.triton.__version__)
    record = dict(commit=commit(), hardware=hardware(), date=now, **versions, layers=layers, rows=rows)
    path = ROOT/'data'/'results'/f'host_launches-{record["commit"]}.json'
    atomic_write(path, json.dumps(record, indent=1).encode())

if __name__ == '__main__': main()
