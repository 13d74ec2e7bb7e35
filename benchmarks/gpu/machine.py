"""The card and its rates, measured on the spot: a copy within memory (bytes read and written), a bf16 matrix
product, and the rates from which `elleci.planning.step_time` predicts the seconds of a step.
"""
import importlib.metadata, platform, statistics
from dataclasses import asdict
import torch
from elleci.memory.measure import bandwidth
from elleci.planning.step_time import measured_machine
from gpu.bench import Stopwatch, note, row

RATES = dict(link_in='GB/s', link_out='GB/s', memory='GB/s', matmul='TFLOP/s', fp32='TFLOP/s', int8='TOP/s')

def version(package):
    try: return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError: return None

def card():
    p = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return dict(device=p.name, capability=10*p.major + p.minor, memory=p.total_memory, L2=p.L2_cache_size,
                multiprocessors=p.multi_processor_count, context=total - free)

def run(ctx):
    found = dict(device=f'CPU ({platform.machine()})') if ctx.dry else card()
    found |= {n: version(n) for n in ('triton', 'numpy', 'transformers', 'mamba_ssm')}
    found |= dict(torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version())
    label = f'{found["device"]}, torch {found["torch"]}, Triton {found["triton"]}'
    yield note(label, machine=found, head=True)
    times = [bandwidth(ctx.device, 2**20 if ctx.dry else 2**31, 5) for _ in range(1 if ctx.dry else 5)]
    speed = 1e9*statistics.median(times)
    yield row('copy within memory', speed/1e9, 'GB/s', machine=dict(bandwidth=speed), head=True)
    n = 64 if ctx.dry else 8192
    a, b = torch.randn(2, n, n, device=ctx.device).bfloat16()
    c = torch.empty_like(a)
    t = Stopwatch(ctx)(dict(matmul=lambda: torch.mm(a, b, out=c)))['matmul']
    rate = 2*n**3/t.ms*1e3
    yield row('bf16 matrix product', rate/1e12, 'TFLOP/s', machine=dict(flops=rate), head=True, **t.fields())
    rates = measured_machine(ctx.device, *((2**20, 64) if ctx.dry else ()))
    for what, unit in RATES.items():
        yield row(f'rate: {what}', getattr(rates, what)/(1e9 if unit == 'GB/s' else 1e12), unit)
    yield row('rate: pageable', rates.pageable, 'of the link')
    yield row('rate: launch', rates.launch*1e6, 'µs', machine=dict(step_machine=asdict(rates)), head=True)
