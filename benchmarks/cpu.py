"""Seconds on this CPU: the scan against its peers. See runner.py for the command line.
"""
import dataclasses, os

# As the commands set it: `elleci.commands.SLEEP_VARIABLES`.
os.environ['GOMP_SPINCOUNT'] = '1000'
import torch
from elleci.config import ModelConfig
from elleci.core import assert_close, optional, seed_everything
from elleci.kernels.ssd import ssd
from elleci.kernels.ssd_reference import ssd_chunked
from elleci.layers import mamba2
from runner import in_turn, main, median_ratio

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

SCANS = {'no scan': no_scan, 'ssd': scan_with(ssd), 'ssd, chunks of 32': scan_with(ssd, 32),
         'ssd_chunked': scan_with(ssd_chunked)}

def both_ways(block, x, scan=None):
    def step():
        if scan: mamba2._scan = scan
        y = block(x)
        y.sum().backward()
        return y
    return step

def mixer_of_transformers(cfg, ours):
    "transformers' Mamba2Mixer with our weights; None where it is not installed"
    if (modeling := optional('transformers.models.mamba2.modeling_mamba2')) is None: return None
    from transformers import Mamba2Config
    theirs = modeling.Mamba2Mixer(Mamba2Config(
        hidden_size=cfg.d_model, num_heads=cfg.n_ssm_heads, head_dim=cfg.headdim, state_size=cfg.d_state,
        expand=cfg.expand, n_groups=cfg.ngroups, conv_kernel=cfg.d_conv, chunk_size=cfg.chunk_size,
    ), layer_idx=0)
    state = {k.replace('conv_', 'conv1d.'): v for k, v in ours.state_dict().items()}
    state['conv1d.weight'] = state['conv1d.weight'][:, None]
    theirs.load_state_dict(state)
    return theirs

def scan_case(D, P, rows, T, repeats):
    "Seconds of every subject, round by round"
    seed_everything(0)
    cfg = dataclasses.replace(ModelConfig(), d_model=D, headdim=P, d_state=8, chunk_size=64, ngroups=1)
    x, ours = torch.randn(rows, T, D, requires_grad=True), mamba2.Mamba2(cfg)
    subjects = {name: both_ways(ours, x, scan) for name, scan in SCANS.items()}
    if theirs := mixer_of_transformers(cfg, ours):
        assert_close(theirs(x), subjects['ssd'](), atol=1e-4, label="transformers' block against ours")
        subjects['transformers'] = both_ways(theirs, x)
    seconds = in_turn(subjects, repeats)
    base = seconds['no scan']
    ratios = {f'{n} / no scan': median_ratio(s, base) for n, s in seconds.items() if s is not base}
    if theirs: ratios['transformers / ssd'] = median_ratio(seconds['transformers'], seconds['ssd'])
    print((rows, T, D), ratios, flush=True)
    return dict(shape=[rows, T, D], heads=cfg.n_ssm_heads, headdim=P, d_state=8, chunk_size=64,
                seconds=seconds, ratios=ratios)

def cpu_scan(repeats=15, dry=False):
    """What the scan adds to a Mamba-2 block, both ways in fp32, against the block without (wanted:
    at most 1.5 times), and against transformers' (wanted: twice as fast)"""
    torch.set_num_threads(2)
    rows, T, repeats = (1, 130, 2) if dry else (2, 1024, repeats)
    cases = [scan_case(D, P, rows, T, repeats) for D, P in ((256, 64), (512, 128))]
    yield dict(cases=cases, targets={'ssd / no scan': 1.5, 'transformers / ssd': 2.})

if __name__ == '__main__': main(cpu_scan)
