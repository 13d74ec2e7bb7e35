"""Attention within documents by `cu_seqlens` against the same with a mask: time forward and backward, peak
memory, both against T; what the operator allocates against what it declares.
"""
import torch
import torch.nn.functional as F
from elleci.kernels.document_attention import document_attention, find_documents
from elleci.layers.attention import document_mask
from elleci.memory.emulate import emulate, find_temporaries
from gpu.bench import Stopwatch, both_ways, failed, free, no_grad, peak, row

HEADS, WIDTH = 16, 128  # of the 1.5B preset

def cases(dry): # T, documents in a row
    if dry: return [(40, 3), (40, 40)]
    return [(T, documents) for T in (1024, 2048, 4096, 8192, 16_384, 32_768) for documents in (1, 20, T//64)]

# the longest row for which a mask is tried: the mask and its bf16 copy are 3·T² bytes, the scores none
LONGEST_MASK = 16_384

def masked(q, k, v, seq_idx):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(seq_idx)).transpose(1, 2)

def inputs(T, documents, device, dtype=torch.bfloat16, H=HEADS, P=WIDTH):
    gen = torch.Generator(device).manual_seed(0)
    e = {name: torch.randn(1, T, H, P, generator=gen, device=device).to(dtype) for name in 'qkv'}
    return e | dict(seq_idx=(torch.arange(T, device=device)*documents//T)[None].contiguous())

def temporaries(e):
    "Bytes that the backward pass declares for itself on a GPU, for these inputs"
    q = torch.empty_like(e['q'], device='meta')
    op = torch.ops.elleci.document_attention_backward.default
    with emulate('cuda'):
        found = find_temporaries('cuda', op, (q, q, q, q, q, q, q, 1.), {})
    return sum(found.before) + sum(found.after)

def compared(watch, e, label):
    "Rows of one case: milliseconds, and how many times those of the mask"
    fs = dict(ours=document_attention)
    if e['q'].shape[1] <= LONGEST_MASK: fs['torch, with a mask'] = masked
    for kind, way in (('forward', no_grad), ('forward + backward', both_ways)):
        times = watch({n: way(f, e) for n, f in fs.items()}, .5)
        for n, t in times.items():
            if isinstance(t, Exception): yield failed(f'{n}, {label} {kind}', t)
        good = {n: t for n, t in times.items() if not isinstance(t, Exception)}
        if 'ours' not in good: continue
        mine = good.pop('ours')
        yield row(f'{label} {kind}', mine.ms, 'ms', **mine.fields())
        for n, t in good.items():
            yield row(f'{label} {kind}: faster than {n}', t.ms/mine.ms, '×', **t.fields())

def peaks(e, label):
    "Rows of one case: what is allocated at most beyond the inputs"
    mine = peak(both_ways(document_attention, e))
    n = e['q'].nbytes
    outputs = 5*n + n*4//(e['q'].itemsize*e['q'].shape[3])  # output, its gradient, three gradients; sums
    yield row(f'{label}: peak', mine/2**20, 'MiB')
    at_most = outputs + temporaries(e)
    yield row(f'{label}: peak, of what is declared', mine/at_most, 'of it', 1.01, at_most=True)
    if e['q'].shape[1] > LONGEST_MASK: return
    try: yield row(f'{label}: peak with a mask', peak(both_ways(masked, e))/2**20, 'MiB')
    except torch.OutOfMemoryError as error: yield failed(f'torch, with a mask, {label}', error)

def gradients(f, e, dtype):
    "Of q, k and v, where that of the output is the values themselves"
    inputs = [e[n].to(dtype).requires_grad_() for n in 'qkv']
    return torch.autograd.grad(f(*inputs, e['seq_idx']), inputs, e['v'].to(dtype))

def exact(e, label):
    "Rows of one case: how far from the mask's results in fp32"
    ours, others = gradients(document_attention, e, torch.bfloat16), gradients(masked, e, torch.float32)
    largest = max(t.abs().max() for t in others)
    off = max(((a.float() - b).abs().max()/largest).item() for a, b in zip(ours, others))
    yield row(f'{label}: gradients off, of the largest', off, 'of it', 2.**-5, at_most=True, must=True)

def run(ctx):
    watch = Stopwatch(ctx)
    shape = dict(H=2, P=16) if ctx.dry else {}
    for T, documents in cases(ctx.dry):
        e = inputs(T, documents, ctx.device, **shape)
        label = f'attention, T {T}, {documents} documents'
        yield from compared(watch, e, label)
        if not ctx.dry: yield from peaks(e, label)
        free()
    if ctx.absent: return
    # The processor waits once per tensor seq_idx: how long is the wait?
    e = inputs(*cases(ctx.dry)[0], ctx.device, **shape)
    def read(): return find_documents(e['seq_idx'].clone())
    times = watch(dict(read=read), .2)['read']
    if isinstance(times, Exception): yield failed('find_documents', times)
    else: yield row('find_documents: once per micro-batch', max(times.ms, times.host), 'ms')
