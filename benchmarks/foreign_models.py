"""Models that others wrote, trained for two steps on the CPU, beside what the dry run predicts. See runner.py
for the command line.

The judge is torch's profiler, which records every malloc and free of the CPU's allocator. Each model is built
small, from its configuration alone; it trains with its own dropout, and with the optimizer, the precision and
the tricks that its row names. The peak includes weights and inputs. 'aligned' is the share of the events that
both lists have in the same order: twice the longest common subsequence over the sum of their lengths.
"""
import os, tempfile, time
from functools import partial

os.environ['KINETO_LOG_LEVEL'] = '99'  # the profiler's chatter
import torch
import torch.nn.functional as F
from torch import nn, optim
from elleci.core import UserError, require
from elleci.memory.toys import allocator_events, number_storages, peak_bytes, twice
from elleci.memory.trace import dry_run
from elleci.planning.foreign import hf_model_maker

V, D, L = 384, 64, 2  # vocabulary, width, layers
H, T, B = 4, 64, 2    # heads, tokens in a row, rows

# ------------------------------------------------------------------ what a model is called with

def tokens(rows=B, length=T): return torch.ones(rows, length, dtype=torch.long)
def text(): return dict(input_ids=tokens(), labels=tokens())
def image(): return dict(pixel_values=torch.ones(B, 3, 32, 32), labels=torch.ones(B, dtype=torch.long))
def spectrum(): return dict(input_features=torch.ones(B, 16, 2*T), labels=tokens(length=16))

# ------------------------------------------------------------------ models of transformers

LAYERS = dict(num_hidden_layers=L, num_attention_heads=H, intermediate_size=4*D, hidden_size=D)
WIDTHS = dict(LAYERS, vocab_size=V)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT = dict(vocab_size=V, n_embd=D, n_layer=L, n_head=H, n_positions=T, **IDS)
STATE = dict(vocab_size=V, hidden_size=D, num_hidden_layers=L, **IDS)
SEQ2SEQ = dict(vocab_size=V, d_model=D, encoder_layers=L, decoder_layers=L, encoder_attention_heads=H,
               decoder_attention_heads=H, encoder_ffn_dim=4*D, decoder_ffn_dim=4*D,
               decoder_start_token_id=1, **IDS)
T5 = dict(IDS, vocab_size=V, d_model=D, d_kv=16, d_ff=4*D, num_layers=L, num_heads=H,
          decoder_start_token_id=0)
IMAGE = dict(image_size=32, patch_size=8, num_labels=10)
STAGES = dict(hidden_sizes=[16, 32, 64], depths=[1, 1, 1], num_labels=10)
WHISPER = dict(SEQ2SEQ, num_mel_bins=16, max_source_positions=T)
KV2 = dict(num_key_value_heads=2)
SGD = dict(optimizer=partial(optim.SGD, momentum=.9))

def of_class(architecture, batch=text, family=None, **settings):
    "A model of transformers, by its class; the configuration's name begins like it"
    def build():
        transformers = require('transformers', 'build models that others wrote')
        config = getattr(transformers, f'{family or architecture.partition("For")[0]}Config')
        return getattr(transformers, architecture)(config(**settings)), batch()
    return build

def decoder(family, **settings): return of_class(f'{family}ForCausalLM', **{**WIDTHS, **IDS, **settings})

def seq2seq(family, batch=text, **settings):
    return of_class(f'{family}ForConditionalGeneration', batch, **settings)

def pictured(family, **settings): return of_class(f'{family}ForImageClassification', image, **settings)

# ------------------------------------------------------------------ models of plain torch, called with `x`

class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.body = nn.Transformer(D, H, L, L, 4*D, batch_first=True)
    def forward(self, x):
        e = self.embed(x)
        return self.head(self.body(e, e))

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        def mlp(d): return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4*d), nn.GELU(), nn.Linear(4*d, d))
        self.across, self.within = (nn.ModuleList(mlp(d) for _ in range(L)) for d in (T, D))
    def forward(self, x):
        for across, within in zip(self.across, self.within):
            x = x + across(x.mT).mT
            x = x + within(x)
        return x

class Flow(nn.Module):
    "dx/dt = f(x) by the midpoint rule"
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(D, 4*D), nn.Tanh(), nn.Linear(4*D, D))
    def forward(self, x):
        for _ in range(8): x = x + .1*self.f(x + .05*self.f(x))
        return x

def perceptron():
    def layer(): return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.SiLU(), nn.Dropout(.1))
    return nn.Sequential(*(layer() for _ in range(4)), nn.Linear(D, 10))

class WithLoss(nn.Module):
    "Mean square, or cross entropy of the logits with the tokens that went in"
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x):
        out = self.net(x)
        if x.is_floating_point(): return out.square().mean()
        return F.cross_entropy(out.flatten(0, 1), x.flatten())

def plain(kind, *shape): return lambda: (WithLoss(kind()), dict(x=torch.ones(shape) if shape else tokens()))

# ------------------------------------------------------------------ the table

# {family: {name: what builds model and batch, or that and the options of `make_step`}}
TABLE = {
    'language': {
        'llama': decoder('Llama', **KV2),
        'llama, checkpointed': (decoder('Llama'), dict(checkpointing=True)),
        'llama, autocast': (decoder('Llama'), dict(bf16=True)),
        'llama, most frozen': (decoder('Llama'), dict(trained='q_proj')),
        'gpt2': (of_class('GPT2LMHeadModel', family='GPT2', **GPT), dict(clip=True)),
        'bert': of_class('BertForMaskedLM', **WIDTHS, pad_token_id=0),
        'qwen3': (decoder('Qwen3', **KV2, head_dim=16), dict(optimizer=optim.NAdam)),
        'olmo': (decoder('Olmo'), dict(optimizer=partial(optim.AdamW, amsgrad=True))),
        'mixtral, batched': decoder('Mixtral', **KV2, num_local_experts=4,
                                    experts_implementation='batched_mm'),
        'mamba2': of_class('Mamba2ForCausalLM', **STATE, state_size=16, num_heads=8, head_dim=16, n_groups=1,
                           chunk_size=32),
        't5, Adafactor': (seq2seq('T5', **T5), dict(optimizer=optim.Adafactor)),
    },
    'sound': {'whisper': seq2seq('Whisper', spectrum, **WHISPER)},
    'image': {
        'vit': pictured('ViT', **LAYERS, **IMAGE),
        'convnext': pictured('ConvNext', num_stages=3, **STAGES),
        'resnet': (pictured('ResNet', embedding_size=16, **STAGES), SGD),
    },
    'plain torch': {
        'nn.Transformer': plain(Translator),
        'MLP-Mixer': plain(Mixer, 8, T, D),
        'midpoint rule': (plain(Flow, 64, D), dict(optimizer=optim.RAdam)),
        'perceptron': (plain(perceptron, 256, D), dict(optimizer=optim.Rprop)),
    },
}

def by_file(architecture, seq=None, family=None, **settings):
    "A model and its batch as `elleci_memory --hf-config` makes them of a configuration's file"
    def build():
        transformers = require('transformers', 'build models that others wrote')
        config = getattr(transformers, f'{family or architecture.partition("For")[0]}Config')
        with tempfile.TemporaryDirectory() as folder:
            config(**settings, architectures=[architecture]).save_pretrained(folder)
            make_model, make_batch, _ = hf_model_maker(folder)
        return make_model(), make_batch(B, seq)
    return build

# None of these was looked at when the rules of the dry run were written.
UNSEEN = {
    'language': {'helium': by_file('HeliumForCausalLM', T, **{**WIDTHS, **IDS, **KV2}, head_dim=16)},
    'encoder-decoder': {'m2m_100': by_file('M2M100ForConditionalGeneration', T, **SEQ2SEQ)},
    'image': {'ijepa': by_file('IJepaForImageClassification', **LAYERS, **IMAGE)},
}

def rows_of(table):
    "{name: (family, what builds it, options)}"
    def row(family, found): return family, *(found if isinstance(found, tuple) else (found, {}))
    return {name: row(family, found) for family, models in table.items() for name, found in models.items()}

CASES, CONFIGS = rows_of(TABLE), rows_of(UNSEEN)
SAMPLE = ('nn.Transformer', 'MLP-Mixer', 'midpoint rule', 'perceptron')  # these need torch alone

# ------------------------------------------------------------------ predicted and recorded

def make_step(name, device):
    "A model, the tensors beside its own that are there before the first step, and its training step"
    _, build, options = (CASES | CONFIGS)[name]
    torch.manual_seed(0)
    with torch.device(device): model, batch = build()
    # Some make weights on the CPU, whatever the device.
    if any(t.device.type != device for t in [*model.parameters(), *model.buffers()]): model.to(device)
    model.train()
    if options.get('checkpointing'): model.gradient_checkpointing_enable()
    if trained := options.get('trained'):
        for n, p in model.named_parameters(): p.requires_grad_(trained in n)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = options.get('optimizer', optim.AdamW)(weights, lr=1e-3)

    def step():
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=options.get('bf16', False)):
            out = model(**batch)
            loss = out if isinstance(out, torch.Tensor) else out.loss
            del out
        loss.backward()
        if options.get('clip'): nn.utils.clip_grad_norm_(weights, 1.)
        optimizer.step()

    # Some optimizers make their states before the first step, their counters always on the CPU.
    there = [t for values in [batch, *optimizer.state.values()] for t in values.values()]
    return model, [t for t in there if isinstance(t, torch.Tensor) and t.device.type == device], step

def common_length(a, b, largest=4000):
    "Length of the longest common subsequence, by Myers' method; None beyond so many edits"
    reached = {1: 0}
    for edits in range(largest + 1):
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or k != edits and reached[k - 1] < reached[k + 1]
            x = reached[k + 1] if down else reached[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]: x += 1
            reached[k] = x
            if x >= len(a) and x - k >= len(b): return (len(a) + len(b) - edits)//2

def aligned(predicted, recorded):
    "Share of the events that both lists have in the same order; None where it is under about a half"
    a, b = ([(sign, n) for sign, _, n in events] for events in (predicted, recorded))
    same = common_length(a, b)
    return None if same is None else 2*same/(len(a) + len(b))

def predict(name):
    "The dry run's events (from the first step on), its peak, and its warnings"
    model, there, step = make_step(name, 'meta')
    trace = dry_run(step, model, there, target='cpu')
    made = [(1 if e >= 0 else -1, max(e, ~e), trace.allocation_at(k)) for k, e in enumerate(trace.events)]
    events = number_storages((s, i, a.nbytes) for s, i, a in made if a.phase != 'build')
    return events, trace.peak, trace.warnings

def record(name):
    "The events and the peak that the CPU's allocator reports"
    model, there, step = make_step(name, 'cpu')
    storages = [t.untyped_storage() for t in [*model.parameters(), *model.buffers(), *there]]
    before = sum({s._cdata: s.nbytes() for s in storages}.values())
    events = allocator_events(lambda: twice(step))
    return number_storages(events), before + peak_bytes(number_storages(events, min_bytes=0))

def compare(name):
    "One row: the machine's events and peak, and what the dry run says of them"
    truth, peak = record(name)
    row = dict(case=name, family=(CASES | CONFIGS)[name][0], events=len(truth), peak=peak)
    began = time.perf_counter()
    try: events, predicted, warnings = predict(name)
    except UserError as e: return dict(row, refused=str(e))
    if warnings: row['warnings'] = warnings
    share = aligned(events, truth)
    return dict(row, predicted_peak=predicted, seconds=round(time.perf_counter() - began, 2),
                predicted_events=len(events), error=round(predicted/peak - 1, 6),
                aligned=share if share is None else round(share, 5))

def foreign_models(cases=(), dry=False):
    """Training steps of models that others wrote: peaks and events, predicted and recorded. What a record of
    this commit has is not measured again"""
    transformers = require('transformers', 'build models that others wrote')
    rows = [] if dry else begun('foreign_models').get('rows', [])
    done = {row['case'] for row in rows}
    for name in SAMPLE[-1:] if dry else cases or CASES:
        if name in done: continue
        try: row = compare(name)
        except Exception as e:
            row = dict(case=name, family=CASES[name][0], failed=f'{type(e).__name__}: {e}'[:300])
        rows.append(row)
        print({k: v for k, v in row.items() if k != 'family'}, flush=True)
        yield dict(transformers=transformers.__version__, rows=rows)

if __name__ == '__main__':
    from runner import begun, main
    main(foreign_models)
