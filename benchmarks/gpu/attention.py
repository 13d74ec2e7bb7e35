"""Attention within documents in one launch against a mask: time, peak memory, bytes against those that are
declared. Long rows: the eigenstate scan's kernels, and attention to a share of the past.
"""
import functools, math
import torch
import torch.nn.functional as F
from elleci.kernels.document_attention import document_attention, find_documents
from elleci.kernels.eigenstate import eigenstate_scan
from elleci.kernels.eigenstate_reference import eigenstate_recurrent
from elleci.kernels.sparse_attention import sparse_attention
from elleci.layers.attention import document_mask
from elleci.memory.emulate import emulate, find_temporaries
from gpu.bench import WAYS, Stopwatch, both_ways, check, documents_of, failed, free, most, peak, race, row

# the longest row for which a mask is tried: the mask and its bf16 copy are 3·T² bytes, the scores none
LONGEST_MASK = 16_384

def cases(dry):
    "T, documents in a row"
    if dry: return [(40, 3), (40, 40)]
    return [(T, documents) for T in (1024, 2048, 4096, 8192, 16_384, 32_768) for documents in (1, 20, T//64)]

def masked(q, k, v, seq_idx):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(seq_idx)).transpose(1, 2)

def inputs(ctx, T, documents):
    "The heads of the 1.5B preset"
    gen, shape = torch.Generator(ctx.device).manual_seed(0), (1, T, 2, 16) if ctx.dry else (1, T, 16, 128)
    e = {name: torch.randn(shape, generator=gen, device=ctx.device).bfloat16() for name in 'qkv'}
    return e | dict(seq_idx=(torch.arange(T, device=ctx.device)*documents//T)[None].contiguous())

def peaks(e, label):
    "What is allocated at most beyond the inputs, against what the operator declares"
    mine, q = peak(both_ways(document_attention, e)), torch.empty_like(e['q'], device='meta')
    with emulate('cuda'):
        op = torch.ops.elleci.document_attention_backward.default
        _, before, after = find_temporaries('cuda', op, (q, q, q, q, q, q, q, 1.), {})
    outputs = 5*q.nbytes + q.nbytes*4//(q.itemsize*q.shape[3])  # output, its gradient, three gradients; sums
    declared = outputs + sum(before) + sum(after)
    yield row(f'{label}: peak', mine/2**20, 'MiB')
    yield most(f'{label}: peak, of what is declared', mine/declared, 'of it', 1.01)
    if e['q'].shape[1] > LONGEST_MASK: return
    try: yield row(f'{label}: peak with a mask', peak(both_ways(masked, e))/2**20, 'MiB')
    except torch.OutOfMemoryError as error: yield failed(f'torch, with a mask, {label}', error)

def exact(ctx):
    "How far gradients are from the mask's in fp32"
    for T, documents in cases(ctx.dry):
        if T > 2048: break
        e, found = inputs(ctx, T, documents), []
        for f, dtype in ((document_attention, torch.bfloat16), (masked, torch.float32)):
            leaves = [e[n].to(dtype).requires_grad_() for n in 'qkv']
            out = f(*leaves, e['seq_idx'])
            found.append(torch.autograd.grad(out, leaves, e['v'].to(dtype)))
        largest = max(t.abs().max() for t in found[1])
        off = max(((a.float() - b).abs().max()/largest).item() for a, b in zip(*found))
        label = f'attention, T {T}, {documents} documents: gradients off, of the largest'
        yield check(label, off, 'of it', 2.**-5)

def attention(ctx):
    watch = Stopwatch(ctx)
    for T, documents in cases(ctx.dry):
        e, label = inputs(ctx, T, documents), f'attention, T {T}, {documents} documents'
        fs = dict(ours=document_attention)
        if T <= LONGEST_MASK: fs['torch, with a mask'] = masked
        for kind, way in WAYS.items():
            yield from race(ctx, watch, f'{label} {kind}', {n: way(f, e) for n, f in fs.items()}, .5)
        if not ctx.dry: yield from peaks(e, label)
        free()
    if ctx.absent: return
    # The processor waits once per tensor seq_idx: how long is the wait?
    e = inputs(ctx, *cases(ctx.dry)[0])
    def read(): return find_documents(e['seq_idx'].clone())
    for t in (yield from watch.rows(dict(find_documents=read), .2, '')).values():
        yield row('find_documents: once per micro-batch', max(t.ms, t.host), 'ms')

# ------------------------------------------------------------------ long rows

def scan_inputs(B, T, K, device, dtype=torch.bfloat16):
    "u as half of a projection's output, rates, documents"
    generator = torch.Generator().manual_seed(0)
    def between(low):
        return torch.empty(K).uniform_(math.log(low), math.log(32_768), generator=generator).exp()
    life, period = between(1), between(2)
    u = torch.randn(B, T, 4*K, generator=generator).to(device, dtype)[..., :2*K].unflatten(-1, (K, 2))
    log_rate, log_freq = (math.log(2)/life).log().to(device), (2*math.pi/period).log().to(device)
    return dict(u=u, log_rate=log_rate, log_freq=log_freq, seq_idx=documents_of(T, max(T//5, 30), B, device))

def exact_scan(ctx):
    "Worst error of the eigenstate scan's states and gradients, relative to the largest entry"
    e, found = scan_inputs(2, 70 if ctx.dry else 1000, 33, ctx.device, torch.float32), []
    ours = functools.partial(eigenstate_scan, backend='triton')
    for f, dtype in ((ours, torch.float32), (eigenstate_recurrent, torch.float64)):
        leaves = {k: v if k == 'seq_idx' else v.detach().to(dtype).requires_grad_() for k, v in e.items()}
        h = f(**leaves)
        wanted = [v for k, v in leaves.items() if k != 'seq_idx']
        found.append([h, *torch.autograd.grad(h.sin().sum(), wanted)])
    worst = max(((a.double() - b).abs().max()/b.abs().max()).item() for a, b in zip(*found))
    yield check('eigenstate scan', worst, 'relative error', 1e-5)

def long_rows(ctx):
    watch = Stopwatch(ctx)
    for case in [(1, 70, 5)] if ctx.dry else [(4, 32_768, 128), (16, 2048, 128), (1, 32_768, 64)]:
        e, n = scan_inputs(*case, ctx.device), 2*math.prod(case)
        names = dict(ours='triton', torch='torch')
        fs = {n: functools.partial(eigenstate_scan, backend=b) for n, b in names.items()}
        # u read and h written; g and h read, du written besides.
        for (kind, way), nbytes in zip(WAYS.items(), (6*n, 16*n)):
            label, subjects = f'eigenstate scan {kind} {case}', {b: way(f, e) for b, f in fs.items()}
            yield from race(ctx, watch, label, subjects, nbytes=nbytes)
        free()
    for T in (130,) if ctx.dry else (4096, 8192, 16_384, 32_768):
        e = {n: torch.randn(1, T, 4, 64).to(ctx.device, torch.bfloat16) for n in 'qkv'}
        e['seq_idx'] = torch.zeros(1, T, dtype=torch.long, device=ctx.device)
        fs = {'dense': document_attention}
        fs |= {f'density {d:g}': functools.partial(sparse_attention, density=d) for d in (.5, .25, .125)}
        shape = f'forward + backward, 1 × {T} × 4 heads of 64'
        good = yield from watch.rows({n: both_ways(f, e) for n, f in fs.items()}, 1., shape)
        for name, t in good.items(): yield row(f'attention, {name}, {shape}', t.ms, 'ms', **t.fields())
        free()
