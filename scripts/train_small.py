"""Train a small language model, from text to weights, on one page. Read it from top to bottom.

    python scripts/train_small.py     320 steps, some minutes on two CPU cores; weights go to runs/small.pt

The model is `elleci-tiny`: three Mamba-2 layers and one of latent attention with ternary weights, 4.1 million
parameters. The step is the one that fits a 1.5B model onto a 12 GB card: it is done with one layer, all its
micro-batches and its update, before it touches the next, so there is never more than one layer's gradient.
Kernels and layers come from `elleci`, all else is here. `tokenizers` cuts text into pieces: a loss is in nats
per piece, so to compare ours with that of `make train`, the pieces must be the same 2,048.
"""
import ast, json, random, re, sysconfig, time, zlib
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from elleci.kernels.linear_cross_entropy import linear_cross_entropy
from elleci.layers.ffn import BitLinear, SwiGLU
from elleci.layers.mamba2 import Mamba2
from elleci.layers.mla import MLA
from elleci.layers.norm import RMSNorm

ROOT = Path(__file__).resolve().parents[1]

# The sizes of the model ...
cfg = SimpleNamespace(
    vocab_size=2048, d_model=256, d_ff=704, bias=False, pattern='MMMA',
    # Mamba-2: 8 heads of 64 channels, and for each channel a state of 16 numbers
    d_inner=512, headdim=64, n_ssm_heads=8, d_state=16, ngroups=1, d_conv=4, conv_dim=512 + 2*16,
    chunk_size=64,
    # attention: 4 heads; of each token 64 numbers are kept, from which its keys and values are made
    n_attn_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, kv_lora_rank=64,
    attention_density=1., rope_theta=1e5, rope_scaling='none', rope_factor=1., rope_original_len=0,
)
# ... and of the training: a step reads 2 micro-batches of 2 rows of 256 tokens
steps, T = 320, 256
n_micro, batch_size = 2, 2
max_lr, weight_decay, max_grad_norm = 1e-3, .1, 1.
shares = dict(english=68, italian=18, instructions=14)     # percent of the rows

# ------------------------------------------------------------------ text

SPECIAL = ['<|pad|>', '<|bos|>', '<|endoftext|>', '<|im_start|>', '<|im_end|>']
BOS, EOT = 1, 2
UNREAD = set('test tests idlelib lib2to3 site-packages dist-packages pydoc_data __pycache__'.split())

def docstrings(path):
    "All docstrings of a Python file, as one text"
    try: nodes = ast.walk(ast.parse(path.read_text(encoding='utf-8')))
    except (SyntaxError, UnicodeDecodeError): return ''
    scopes = (node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    return '\n\n'.join(filter(None, map(ast.get_docstring, scopes)))

def documents():
    "(source, name, text) of every document: Python's own manual, a little Italian, and conversations"
    for title, text in sorted(topics.items()): yield 'english', f'topic {title}', text
    stdlib = Path(sysconfig.get_path('stdlib'))
    for path in sorted(stdlib.rglob('*.py')):
        name = path.relative_to(stdlib)
        text = docstrings(path) if UNREAD.isdisjoint(name.parts) else ''
        if len(text) >= 500: yield 'english', str(name), text
    for path in sorted((ROOT/'data/corpus/italiano').glob('*.txt')):
        yield 'italian', path.name, path.read_text(encoding='utf-8')
    chats = (ROOT/'data/corpus/istruzioni.jsonl').read_text(encoding='utf-8').splitlines()
    for i, chat in enumerate(map(json.loads, chats), 1):
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat['messages'])
        yield 'instructions', f'istruzioni.jsonl line {i}', ''.join(turns)

def load_text():
    "A tokenizer, and {source: token lists} to train on and to validate with"
    train, val = {s: [] for s in shares}, {s: [] for s in shares}
    for source, name, text in documents():
        # A document in twenty is held out, by a hash of its name, but never the first.
        is_val = zlib.crc32(name.encode()) < .05*2**32 and train[source]
        (val if is_val else train)[source].append(text)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size, min_frequency=2, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for docs in train.values() for text in docs)
    tok.train_from_iterator((re.sub(r'<.im_start.>\w+|<.im_end.>', '', t) for t in texts), trainer)
    def encoded(docs): return [[BOS, *tok.encode(text).ids, EOT] for text in docs]
    return tok, *({s: encoded(docs) for s, docs in side.items()} for side in (train, val))

def cut_into_rows(docs, rng=None):
    """(tokens, labels, document numbers), each (T,), of documents end to end, in random order with an rng. A
    label is the next token, and where that belongs to another document -100, which doesn't count"""
    if rng: docs = rng.sample(docs, len(docs))
    tokens = torch.tensor([i for doc in docs for i in doc])
    owner = torch.repeat_interleave(torch.arange(len(docs)), torch.tensor(list(map(len, docs))))
    labels = tokens.roll(-1).masked_fill(owner != owner.roll(-1), -100)
    rows = list(zip(*(t[:len(t)//T*T].split(T) for t in (tokens, labels, owner))))
    return rng.sample(rows, len(rows)) if rng else rows

def batches(train, seed=0):
    "For each step its micro-batches, of (tokens, labels, document numbers), each (batch_size, T)"
    rng, rows, owed = random.Random(seed), {source: [] for source in train}, dict.fromkeys(train, 0)
    def next_row():
        # From the source that is furthest behind its share, so that every step reads of all of them.
        for source in owed: owed[source] += shares[source]
        source = max(owed, key=owed.get)
        owed[source] -= 100
        # A source that has been read to its end begins again, in another order.
        rows[source] = rows[source] or cut_into_rows(train[source], rng)
        return rows[source].pop()
    while True:
        drawn = [torch.stack(part) for part in zip(*(next_row() for _ in range(n_micro*batch_size)))]
        yield list(zip(*(part.split(batch_size) for part in drawn)))

# ------------------------------------------------------------------ model

class Block(nn.Module):
    "x + mixer(norm(x)), then x + ffn(norm(x)); a ternary layer takes the norm in front of it along"
    def __init__(self, kind):
        super().__init__()
        self.mixer_norm, self.mixer = RMSNorm(cfg.d_model), {'M': Mamba2, 'A': MLA}[kind](cfg, BitLinear)
        self.ffn_norm, self.ffn = RMSNorm(cfg.d_model), SwiGLU(cfg, BitLinear)
    def forward(self, x, docs):
        x = x + self.mixer(x, docs, None, self.mixer_norm)
        return x + self.ffn(x, self.ffn_norm)

class Model(nn.Module):
    "Embedding, blocks, norm; the head is the embedding's matrix"
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(map(Block, cfg.pattern))
        self.norm = RMSNorm(cfg.d_model)
        nn.init.normal_(self.embedding.weight, 0, (.1/cfg.d_model)**.5)
        for name, m in self.named_modules():
            if not isinstance(m, BitLinear): continue
            # Layers that end a branch start smaller, so that the sum of all branches doesn't start larger.
            ends_branch = name.rpartition('.')[2] in ('out_proj', 'o_proj', 'down')
            branches = 2*len(self.blocks) if ends_branch else 1
            nn.init.normal_(m.weight, 0, (m.weight.shape[1]*branches)**-.5)
    def loss(self, h, labels):
        "Nats of all labels together, from what the last block gives; logits are never there as a whole"
        return linear_cross_entropy(self.norm(h), self.embedding.weight, labels, reduction='sum')

@torch.no_grad()
def evaluate(model, rows):
    "Nats per token on rows that were held out"
    nats = 0.
    for some in zip(*(torch.stack(part).split(8) for part in zip(*rows))):
        x = model.embedding(some[0])
        for block in model.blocks: x = block(x, some[2])
        nats += float(model.loss(x, some[1]))
    return nats/sum(int((labels >= 0).sum()) for _, labels, _ in rows)

# ------------------------------------------------------------------ step

class Lion:
    "Every weight moves by the learning rate, up or down: by the sign of gradient and momentum"
    def __init__(self): self.momentum, self.lr = {}, 0.
    @torch.no_grad()
    def update(self, module, decay=weight_decay):
        "Clip a module's gradient, use it, and free it; gives its norm"
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        for name, p in module.named_parameters():
            m = self.momentum.setdefault(p, torch.zeros_like(p))
            # Matrices shrink a little in each step; norms, rates and filters don't.
            if name.endswith('.weight') and p.ndim == 2: p.mul_(1 - self.lr*decay)
            p.add_(m.clone().mul_(.9).add_(p.grad, alpha=.1).sign_(), alpha=-self.lr)
            m.mul_(.99).add_(p.grad, alpha=.01)
            p.grad = None
        return norm

def layer_major_step(model, micro_batches, optimizer):
    "One optimizer step, layer by layer; its loss in nats per token"
    n_labels = sum(int((labels >= 0).sum()) for _, labels, _ in micro_batches)
    # Forwards without a graph: of each layer we only keep what went into it.
    inputs = []
    with torch.no_grad():
        x = [model.embedding(tokens) for tokens, _, _ in micro_batches]
        for block in model.blocks:
            inputs.append(x)
            x = [block(h, docs) for h, (_, _, docs) in zip(x, micro_batches)]
    # The loss, and its gradient with respect to what the last layer gave.
    loss, grads = 0., []
    for h, (_, labels, _) in zip(x, micro_batches):
        h.requires_grad_()
        part = model.loss(h, labels)/n_labels
        part.backward()
        loss += float(part.detach())
        grads.append(h.grad)
    optimizer.update(model.norm)
    # Backwards: a layer is computed once more, now with a graph. When all micro-batches have added to its
    # gradient we use it, and it's gone before that of the layer below is made.
    for block in reversed(model.blocks):
        for m, (h, (_, _, docs)) in enumerate(zip(inputs.pop(), micro_batches)):
            h.requires_grad_()
            block(h, docs).backward(grads[m])
            grads[m] = h.grad
        optimizer.update(block)
    # The embedding comes last: its matrix is the head's too, and has waited with the head's gradient.
    for grad, (tokens, _, _) in zip(grads, micro_batches): model.embedding(tokens).backward(grad)
    optimizer.update(model.embedding, decay=0.)
    return loss

def lr_at(step, warmup=16, decay=96):
    "Rising at first, falling in the last steps, the same in between"
    return max_lr*min(1, step/warmup, (steps - step + 1)/(decay + 1))

# ------------------------------------------------------------------ all together

def main():
    torch.manual_seed(0)
    tok, train, val = load_text()
    # As many rows of each source as `make train` reads, and from the same documents.
    held_out = [row for docs in val.values() for row in cut_into_rows(docs)[:16]]
    model, optimizer, began = Model(), Lion(), time.time()
    print(f'{sum(p.numel() for p in model.parameters()):,} parameters, {len(held_out)} rows held out')
    for step, micro_batches in zip(range(1, steps + 1), batches(train)):
        optimizer.lr = lr_at(step)
        loss = layer_major_step(model, micro_batches, optimizer)
        if step % 20 == 0: print(f'step {step:3}: loss {loss:.3f}, {time.time() - began:.0f} s', flush=True)
        if step % 160 == 0: print(f'held-out text: {evaluate(model, held_out):.3f} nats a token', flush=True)
    (ROOT/'runs').mkdir(exist_ok=True)
    torch.save(model.state_dict(), ROOT/'runs/small.pt')
    tok.save(str(ROOT/'runs/small-tokenizer.json'))

if __name__ == '__main__': main()
