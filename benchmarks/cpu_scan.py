"""What the scan adds to a Mamba-2 block on this CPU, forward and backward in fp32:
data/results/cpu_scan-<commit>.json.

    python benchmarks/cpu_scan.py [--repeats N] [--dry]

Against the same block without a scan (target: at most 1.5 times), and against the Mamba-2 of transformers
where installed (target: at least twice as fast). Ratios are medians over rounds in which every subject runs
once. --dry: small shapes, nothing written.
"""
import argparse, dataclasses, datetime, json, statistics, time
import torch
from elleci.config import ModelConfig
from elleci.core import assert_close, atomic_write, optional, seed_everything
from elleci.kernels.ssd import ssd
from elleci.kernels.ssd_reference import ssd_chunked
from elleci.layers import mamba2
from tiny import ROOT, commit, hardware

class StraightThrough(torch.autograd.Function):
    "The scan replaced by nothing: y = x, and the gradient of x that of y"
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, dy): return dy

def no_scan(cache, x, *_): return StraightThrough.apply(x)
def scan_with(f, Q=None):
    def scan(cache, x, dt, A, B, C, D, chunk_size, seq_idx, backend):
        return f(x, dt, A, B, C, Q or chunk_size, D, seq_idx=seq_idx)
    return scan

SCANS = {
    'no scan': no_scan,
    'ssd': scan_with(ssd),
    'ssd, chunks of 32': scan_with(ssd, 32),
    'ssd_chunked': scan_with(ssd_chunked),
}

def block(cfg, x, scan):
    "A function that runs our block forward and backward, and the block"
    m = mamba2.Mamba2(cfg)
    def step():
        mamba2._scan = scan
        y = m(x)
        y.sum().backward()
        return y
    return step, m

def peer(cfg, x, ours):
    """The same for transformers' Mamba2Mixer with our weights, once it is seen to compute the same; None
    where it is not installed"""
    if (modeling := optional('transformers.models.mamba2.modeling_mamba2')) is None: return None
    from transformers import Mamba2Config
    shape = dict(
        hidden_size=cfg.d_model,
        num_heads=cfg.n_ssm_heads,
        head_dim=cfg.headdim,
        state_size=cfg.d_state,
        expand=cfg.expand,
    )
    m = modeling.Mamba2Mixer(
        Mamba2Config(**shape, n_groups=cfg.ngroups, conv_kernel=cfg.d_conv, chunk_size=cfg.chunk_size),
        layer_idx=0,
    )
    m.load_state_dict(
        {
            k.replace('conv_', 'conv1d.'): v[:, None] if k == 'conv_weight' else v
            for k, v in ours.state_dict().items()
        }
    )
    def step():
        y = m(x)
        y.sum().backward()
        return y
    mamba2._scan = SCANS['ssd']
    assert_close(m(x), ours(x), atol=1e-4, label="transformers' block against ours")
    return step

def measure(D, P, rows, T, repeats):
    "Seconds of every subject, round by round"
    seed_everything(0)
    cfg = dataclasses.replace(ModelConfig(), d_model=D, headdim=P, d_state=8, chunk_size=64, ngroups=1)
    x = torch.randn(rows, T, D, requires_grad=True)
    subjects = {}
    for name, scan in SCANS.items(): subjects[name], ours = block(cfg, x, scan)
    if (step := peer(cfg, x, ours)) is None:
        print('transformers is not installed: no comparison with its Mamba2Mixer')
    else: subjects['transformers'] = step
    seconds = {name: [] for name in subjects}
    for i in range(repeats + 1):
        for name, step in subjects.items():
            began = time.perf_counter()
            step()
            # the first round warms up
            if i: seconds[name].append(round(time.perf_counter() - began, 5))
    def ratio(a, b): return round(statistics.median(s/t for s, t in zip(seconds[a], seconds[b])), 3)
    ratios = {f'{name} / no scan': ratio(name, 'no scan') for name in subjects if name != 'no scan'}
    if 'transformers' in subjects: ratios['transformers / ssd'] = ratio('transformers', 'ssd')
    return dict(
        shape=[rows, T, D],
        heads=cfg.n_ssm_heads,
        headdim=P,
        d_state=8,
        chunk_size=64,
        seconds=seconds,
        ratios=ratios,
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=15)
    p.add_argument('--dry', action='store_true')
    a = p.parse_args()
    torch.set_num_threads(2)
    rows, T = (1, 130) if a.dry else (2, 1024)
    cases = [measure(D, P, rows, T, 2 if a.dry else a.repeats) for D, P in ((256, 64), (512, 128))]
    for c in cases:
        print(f"{tuple(c['shape'])}, {c['heads']} heads of {c['headdim']}")
        for name, s in c['seconds'].items(): print(f'  {name:28} {1e3*statistics.median(s):8.1f} ms')
        for name, r in c['ratios'].items(): print(f'  {name:40} {r:.2f}')
    if a.dry: return
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), cases=cases,
                  targets={'ssd / no scan': 1.5, 'transformers / ssd': 2.},
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'))
    path = ROOT/'data'/'results'/f"cpu_scan-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
