"""How long an account takes, imports not counted: data/results/account-<commit>.json.

    python benchmarks/account.py [--repeats N]

Of elleci-1b5 as it trains (16 micro-batches), and of Transformers shaped like the 8B and 70B models people
know.
"""
import argparse, datetime, json, time
import torch
import torch.nn.functional as F
from torch import nn
from elleci.planning.account import account
from elleci.config import preset
from elleci.core import atomic_write, fmt_bytes
from elleci.memory.allocator import replay
from elleci.memory.compose import compose
from elleci.memory.trace import dry_run, gc_disabled
from tiny import ROOT, commit, hardware

class Layer(nn.Module):
    "Grouped-query attention with RoPE, and a SwiGLU"
    def __init__(self, D, heads, kv_heads, d_ff):
        super().__init__()
        def linear(i, o): return nn.Linear(i, o, bias=False)
        self.P, self.repeat = D//heads, heads//kv_heads
        self.norm, self.ffn_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q = linear(D, D)
        self.k = linear(D, kv_heads*self.P)
        self.v = linear(D, kv_heads*self.P)
        self.o = linear(D, D)
        self.gate, self.up, self.down = linear(D, d_ff), linear(D, d_ff), linear(d_ff, D)
    def turn(self, x, cos, sin): return x*cos + torch.cat([-x[..., self.P//2:], x[..., :self.P//2]], -1)*sin
    def forward(self, x, cos, sin):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.P)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = self.turn(k, cos, sin).repeat_interleave(self.repeat, 1), v.repeat_interleave(self.repeat, 1)
        x = x + self.o(
            F.scaled_dot_product_attention(self.turn(q, cos, sin), k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y))*self.up(y))

class Transformer(nn.Module):
    def __init__(self, layers, D, heads, kv_heads, d_ff, V):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(V, D), nn.RMSNorm(D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(Layer(D, heads, kv_heads, d_ff) for _ in range(layers))
    def forward(self, tokens):
        x, P = self.embed(tokens), self.layers[0].P
        cos, sin = (torch.ones(tokens.shape[1], P, dtype=x.dtype, device=x.device) for _ in range(2))
        for layer in self.layers: x = layer(x, cos, sin)
        return self.head(self.norm(x))

def step_of(layers, *shape, T=2048):
    "A bf16 model of `layers` layers, a batch, and a step with AdamW"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device('meta'):
            model = Transformer(layers, *shape)
            tokens = torch.zeros(1, T, dtype=torch.long)
    finally: torch.set_default_dtype(default)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return step, model, [tokens]

@gc_disabled()
def transformer(layers, *shape):
    "Peak and reserved bytes of a Transformer with `layers` layers, six of them run"
    trace = compose(dry_run(*step_of(6, *shape)), 1, layers - 6, blocks='layers')
    return trace.peak, replay(trace.replay_events()).peak_reserved

def elleci():
    config = preset('elleci-1b5')
    a = account(config.model, config.train)
    return a.trace.peak, a.peak_reserved

SUBJECTS = {
    'elleci-1b5': (elleci, ()),
    '8B-shaped Transformer': (transformer, (32, 4096, 32, 8, 14336, 128_256)),
    '70B-shaped Transformer': (transformer, (80, 8192, 64, 8, 28672, 128_256)),
}

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=7)
    a = p.parse_args()
    # imports that torch does at first use
    transformer(8, 64, 2, 1, 128, 256)
    account(preset('elleci-tiny').model, preset('elleci-tiny').train)
    rows = {name: dict(seconds=[]) for name in SUBJECTS}
    for _ in range(a.repeats):
        for name, (f, args) in SUBJECTS.items():
            began = time.perf_counter()
            peak, reserved = f(*args)
            rows[name]['seconds'].append(round(time.perf_counter() - began, 3))
            rows[name] |= dict(peak=peak, reserved=reserved)
    result = dict(hardware=hardware(), torch=torch.__version__, commit=commit(), rows=rows,
                  date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'))
    path = ROOT/'data'/'results'/f"account-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    for name, r in rows.items():
        print(
            f"{name:24} {sorted(r['seconds'])[len(r['seconds']) // 2]:.2f} s, "
            f"at most {max(r['seconds']):.2f}   "
            f"peak {fmt_bytes(r['peak'])}, reserved {fmt_bytes(r['reserved'])}"
        )
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
