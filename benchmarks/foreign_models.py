"""Models that others wrote, trained for two steps on the CPU, beside what the dry run predicts. See runner.py
for the command line.

The judge is torch's profiler, which records every malloc and free of the CPU's allocator. Each model is built
small, from its configuration alone; it trains with its own dropout, and with the optimizer, the precision and
the tricks that its row names. The peak includes weights and inputs. 'aligned' is the share of the events that
both lists have in the same order: twice the longest common subsequence over the sum of their lengths.
"""
import contextlib, importlib.util, os, sys, tempfile, time
from functools import partial

os.environ['KINETO_LOG_LEVEL'] = '99'  # the profiler's chatter
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.overrides import TorchFunctionMode
from elleci.core import UserError, require
from elleci.memory.known import spread_tokens
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
def sound(): return dict(input_values=torch.ones(B, 4000), labels=torch.ones(B, dtype=torch.long))

def image_and_text():
    return dict(pixel_values=torch.ones(B, 3, 32, 32), input_ids=tokens(length=16), return_loss=True)

def segments():
    return dict(pixel_values=torch.ones(B, 3, 64, 64), labels=torch.ones(B, 64, 64, dtype=torch.long))

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
SWIN = dict(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4,
            drop_path_rate=0.)
STAGES = dict(hidden_sizes=[16, 32, 64], depths=[1, 1, 1], num_labels=10)
SEGFORMER = dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], strides=[4, 2],
                 patch_sizes=[7, 3], num_attention_heads=[1, 2], mlp_ratios=[4, 4], decoder_hidden_size=32,
                 drop_path_rate=0.)
WAVES = dict(WIDTHS, conv_dim=(32,)*3, conv_kernel=(10, 3, 2), conv_stride=(5, 2, 2), layerdrop=0,
             num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False)
WHISPER = dict(SEQ2SEQ, num_mel_bins=16, max_source_positions=T)
VISION = dict(LAYERS, image_size=32, patch_size=8)
CLIP = dict(text_config={**WIDTHS, **IDS}, vision_config=VISION)
KV2 = dict(num_key_value_heads=2)
MIXTRAL = dict(KV2, num_local_experts=4)
EXPERTS = dict(experts_implementation='eager', moe_intermediate_size=D, num_experts_per_tok=2)
DEEPSEEK = dict(EXPERTS, num_key_value_heads=H, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=32,
                kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
                first_k_dense_replace=1)
OPT = dict(vocab_size=V, hidden_size=D, ffn_dim=4*D, num_hidden_layers=L, num_attention_heads=H,
           max_position_embeddings=T, word_embed_proj_dim=D, **IDS)
BLOOM = dict(vocab_size=V, hidden_size=D, n_layer=L, n_head=H, **IDS)
XLNET = dict(vocab_size=V, d_model=D, n_layer=L, n_head=H, d_inner=4*D)
SGD = dict(optimizer=partial(optim.SGD, momentum=.9))
RMSPROP = dict(optimizer=optim.RMSprop)

def of_class(architecture, batch=text, family=None, **settings):
    "A model of transformers, by its class; the configuration's name begins like it"
    def build():
        transformers = require('transformers', 'build models that others wrote')
        config = getattr(transformers, f'{family or architecture.partition("For")[0]}Config')
        return getattr(transformers, architecture)(config(**settings)), batch()
    return build

def decoder(family, **settings): return of_class(f'{family}ForCausalLM', **{**WIDTHS, **IDS, **settings})

def masked(family, **settings):
    return of_class(f'{family}ForMaskedLM', **{**WIDTHS, 'pad_token_id': 0, **settings})

def seq2seq(family, batch=text, **settings):
    return of_class(f'{family}ForConditionalGeneration', batch, **settings)

def pictured(family, batch=image, **settings):
    return of_class(f'{family}ForImageClassification', batch, **settings)

# ------------------------------------------------------------------ models of plain torch, called with `x`

class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.body = nn.Transformer(D, H, L, L, 4*D, batch_first=True)
    def forward(self, x):
        e = self.embed(x)
        return self.head(self.body(e, e))

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        def block(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        self.down1, self.down2, self.middle = block(3, 16), block(16, 32), block(32, 64)
        self.up2, self.up1, self.head = block(96, 32), block(48, 16), nn.Conv2d(16, 3, 1)
    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2)], 1))
        return self.head(self.up1(torch.cat([a, F.interpolate(c, scale_factor=2)], 1)))

def generator():
    def block(a, b): return [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*block(32, 64), *block(64, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())

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
    "Mean square, or cross entropy of the logits with the labels, which are the input where none are given"
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x, labels=None):
        out = self.net(x)
        if labels is not None: return F.cross_entropy(out['out'] if isinstance(out, dict) else out, labels)
        if x.is_floating_point(): return out.square().mean()
        return F.cross_entropy(out.flatten(0, 1), x.flatten())

def plain(kind, *shape): return lambda: (WithLoss(kind()), dict(x=torch.ones(shape) if shape else tokens()))

# ------------------------------------------------------------------ models of torchvision and timm

def import_pictures(name):
    "torchvision or timm, where they are installed; None elsewhere"
    if any(importlib.util.find_spec(n) is None for n in (name, 'torchvision')): return None
    if 'torchvision' not in sys.modules:
        # torchvision's own kernels are built for one build of torch; with any other its import stops at
        # the first one that is missing. None of them is needed here.
        global _kernels
        _kernels = torch.library.Library('torchvision', 'FRAGMENT')
        for kernel in ('nms', 'qnms'):
            with contextlib.suppress(RuntimeError):
                _kernels.define(f'{kernel}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    import torchvision.models  # noqa: F401
    return importlib.import_module(name)

def pictures(library, kind, dense=False, **options):
    "A model of torchvision (a name or a class of `torchvision.models`) or of timm (a name)"
    def build():
        found = import_pictures(library)
        if found is None: raise ModuleNotFoundError(f"{library} isn't installed")
        if library == 'timm': net = found.create_model(kind, num_classes=10, **options)
        else:
            module = found.models.segmentation if dense else found.models
            net = getattr(module, kind)(num_classes=10, **options)
        labels = torch.ones((B, 64, 64) if dense else (B,), dtype=torch.long)
        return WithLoss(net), dict(x=torch.ones(B, 3, 64, 64), labels=labels)
    return build

TORCHVISION = 'resnet18 mobilenet_v3_small shufflenet_v2_x0_5 regnet_y_400mf efficientnet_b0'
TIMM = 'convnextv2_atto ghostnet_050 edgenext_xx_small mobilevit_xxs poolformer_s12'
DENSENET = dict(growth_rate=8, block_config=(2, 3, 2), num_init_features=16)

# ------------------------------------------------------------------ the table

# {family: {name: what builds model and batch, or that and the options of `make_step`}}
TABLE = {
    'language': {
        'llama': decoder('Llama', **KV2),
        'llama, checkpointed': (decoder('Llama'), dict(checkpointing=True)),
        'llama, autocast': (decoder('Llama'), dict(bf16=True)),
        'llama, most frozen': (decoder('Llama'), dict(trained='q_proj')),
        'gpt2': (of_class('GPT2LMHeadModel', family='GPT2', **GPT), dict(clip=True)),
        'gptj': of_class('GPTJForCausalLM', **GPT, rotary_dim=8),
        'bert': masked('Bert'),
        'bert, autocast': (masked('Bert'), dict(bf16=True, clip=True, optimizer=optim.Adam)),
        'albert': (masked('Albert', embedding_size=32), dict(optimizer=optim.Adamax)),
        'deberta': (masked('DebertaV2', relative_attention=True, pos_att_type=['p2c', 'c2p']), RMSPROP),
        'xlnet': of_class('XLNetLMHeadModel', family='XLNet', **XLNET),
        'mistral': (decoder('Mistral', **KV2), dict(clip=True)),
        'qwen3': (decoder('Qwen3', **KV2, head_dim=16), dict(optimizer=optim.NAdam)),
        'gemma2': decoder('Gemma2', **KV2, head_dim=16),
        'phi3': (decoder('Phi3'), SGD),
        'opt': of_class('OPTForCausalLM', **OPT),
        'gpt_neox': decoder('GPTNeoX'),
        'falcon': decoder('Falcon'),
        'bloom': (of_class('BloomForCausalLM', **BLOOM), dict(optimizer=optim.Adagrad)),
        'olmo': (decoder('Olmo'), dict(optimizer=partial(optim.AdamW, amsgrad=True))),
        'mixtral, loop': (decoder('Mixtral', **MIXTRAL, experts_implementation='eager'), dict(even=True)),
        'qwen2_moe, loop': (decoder('Qwen2Moe', **KV2, **EXPERTS, num_experts=8,
                                    shared_expert_intermediate_size=D), dict(even=True)),
        'deepseek_v3, loop': (decoder('DeepseekV3', **DEEPSEEK), dict(even=True)),
        'mixtral, batched': decoder('Mixtral', **MIXTRAL, experts_implementation='batched_mm'),
        'mamba': of_class('MambaForCausalLM', **STATE, state_size=8),
        'mamba2': of_class('Mamba2ForCausalLM', **STATE, state_size=16, num_heads=8, head_dim=16, n_groups=1,
                           chunk_size=32),
        'rwkv': of_class('RwkvForCausalLM', **STATE, context_length=T),
        't5, Adafactor': (seq2seq('T5', **T5), dict(optimizer=optim.Adafactor)),
        'bart': seq2seq('Bart', **SEQ2SEQ),
    },
    'sound': {
        'whisper': seq2seq('Whisper', spectrum, **WHISPER),
        'wav2vec2': of_class('Wav2Vec2ForSequenceClassification', sound, **WAVES),
    },
    'image': {
        'vit': pictured('ViT', **LAYERS, **IMAGE),
        'clip': of_class('CLIPModel', image_and_text, family='CLIP', **CLIP),
        'swin': pictured('Swin', **SWIN, num_labels=10),
        'convnext': pictured('ConvNext', num_stages=3, **STAGES),
        'resnet': (pictured('ResNet', embedding_size=16, **STAGES), SGD),
        'segformer': of_class('SegformerForSemanticSegmentation', segments, **SEGFORMER),
    },
    'torchvision': {
        **{f'tv {kind}': pictures('torchvision', kind) for kind in TORCHVISION.split()},
        'tv lraspp': pictures('torchvision', 'lraspp_mobilenet_v3_large', True, weights_backbone=None),
        'tv DenseNet': (pictures('torchvision', 'DenseNet', **DENSENET), SGD),
    },
    'timm': {
        **{f'timm {kind}': pictures('timm', kind) for kind in TIMM.split()},
        'timm vit_tiny': pictures('timm', 'vit_tiny_patch16_224', img_size=64, depth=2),
        'timm xcit_nano': pictures('timm', 'xcit_nano_12_p16_224', img_size=64),
    },
    'plain torch': {
        'nn.Transformer': plain(Translator),
        'U-Net': plain(UNet, 4, 3, 32, 32),
        'DCGAN': (plain(generator, 8, 32, 4, 4), dict(optimizer=optim.Adam)),
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

class EvenRouter(TorchFunctionMode):
    "The judge's router sends each expert the same share of the tokens, as the dry run assumes"
    def __init__(self):
        super().__init__()
        self.spread = {}
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            key = *out.indices.flatten(0, -2).shape, args[0].shape[-1]
            if key not in self.spread: self.spread[key] = spread_tokens(*key)
            out.indices.data.copy_(self.spread[key].view(out.indices.shape))
        return out

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
    even = options.get('even') and device == 'cpu'
    router = EvenRouter() if even else contextlib.nullcontext()
    if even:  # a first pass, so that the judge doesn't see how the even choice is made
        with torch.no_grad(), router: model(**batch)

    def step():
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=options.get('bf16', False)), router:
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
    return events, trace.peak, trace.warnings()

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

def versions(*names): return {name: importlib.import_module(name).__version__ for name in names}

def foreign_models(cases=(), dry=False):
    """Training steps of models that others wrote: peaks and events, predicted and recorded. What a record of
    this commit has is not measured again"""
    # Before transformers, which would look for torchvision itself.
    found = {name: import_pictures(name) for name in ('torchvision', 'timm')}
    libraries = ['transformers', *(name for name, module in found.items() if module)]
    rows = [] if dry else begun('foreign_models').get('rows', [])
    done = {row['case'] for row in rows}
    for name in SAMPLE[-1:] if dry else cases or CASES:
        if name in done or found.get(CASES[name][0], True) is None: continue
        try: row = compare(name)
        except Exception as e:
            row = dict(case=name, family=CASES[name][0], failed=f'{type(e).__name__}: {e}'[:300])
        rows.append(row)
        print({k: v for k, v in row.items() if k != 'family'}, flush=True)
        yield dict(versions(*libraries), rows=rows)

if __name__ == '__main__':
    from runner import begun, main
    main(foreign_models)
