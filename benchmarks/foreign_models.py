"""Models that others wrote, trained for two steps on the CPU, beside what the dry run predicts:
data/results/foreign_models-<commit>.json. With --configs, models as `elleci_memory --hf-config` makes them: a
config.json, the class that it names, the batch that this wants: data/results/foreign_configs-<commit>.json.

    python benchmarks/foreign_models.py [--configs] [--cases NAME ...]

The judge is torch's profiler, which records every malloc and free of the CPU's allocator. Each model is built
small, from its configuration alone; it trains with its own dropout, and with the optimizer, the precision and
the tricks that its row names. The peak includes weights and inputs. 'aligned' is the share of the events
that both lists have in the same order: twice the longest common subsequence over the sum of their lengths,
where an event is a malloc or a free with its bytes (those under 16 bytes are left out, as `08_toys` does).
A run that was interrupted goes on where it was, as long as the commit is the same. Figures are of one seed:
nothing that is compared here depends on values.
"""

import argparse, contextlib, datetime, importlib.util, json, os, sys, tempfile, time
from functools import partial

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's chatter
import torch
import torch.nn.functional as F
from torch import nn, optim
from elleci.core import UserError, atomic_write, require
from torch.overrides import TorchFunctionMode
from elleci.memory.known import spread_tokens
from elleci.memory.toys import allocator_events, number_storages, peak_bytes, twice
from elleci.memory.trace import dry_run
from elleci.planning.foreign import hf_model_maker

V, D, L = 384, 64, 2  # vocabulary, width, layers
H, T, B = 4, 64, 2  # heads, tokens in a row, rows


def tokens(rows=B, length=T):
    return torch.ones(rows, length, dtype=torch.long)


# Batches: what the model is called with.
def text():
    return dict(input_ids=tokens(), labels=tokens())


def image(size=32):
    return dict(pixel_values=torch.ones(B, 3, size, size), labels=torch.ones(B, dtype=torch.long))


def image_and_text():
    return dict(pixel_values=torch.ones(B, 3, 32, 32), input_ids=tokens(length=16), return_loss=True)


def segments():
    return dict(pixel_values=torch.ones(B, 3, 64, 64), labels=torch.ones(B, 64, 64, dtype=torch.long))


def spectrum():
    return dict(input_features=torch.ones(B, 16, 2 * T), labels=tokens(length=16))


def sound():
    return dict(input_values=torch.ones(B, 4000), labels=torch.ones(B, dtype=torch.long))


WIDTHS = dict(
    vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, intermediate_size=4 * D
)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT = dict(vocab_size=V, n_embd=D, n_layer=L, n_head=H, n_positions=T, **IDS)
SEQ2SEQ = dict(
    vocab_size=V,
    d_model=D,
    encoder_layers=L,
    decoder_layers=L,
    encoder_attention_heads=H,
    decoder_attention_heads=H,
    encoder_ffn_dim=4 * D,
    decoder_ffn_dim=4 * D,
    decoder_start_token_id=1,
    **IDS,
)
T5 = dict(
    vocab_size=V, d_model=D, d_kv=16, d_ff=4 * D, num_layers=L, num_heads=H, decoder_start_token_id=0, **IDS
)
IMAGE = dict(image_size=32, patch_size=8, num_labels=10)
STAGES = dict(hidden_sizes=[16, 32, 64], depths=[1, 1, 1], num_labels=10)


def foreign(architecture, config, batch=text, **options):
    "A model of transformers, by the names of its class and of its configuration"

    def build():
        transformers = require("transformers", "build models that others wrote")
        return getattr(transformers, architecture)(getattr(transformers, config)(**options)), batch()

    return build


def decoder(family, **options):
    return foreign(f"{family}ForCausalLM", f"{family}Config", **{**WIDTHS, **IDS, **options})


def masked(family, **options):
    return foreign(f"{family}ForMaskedLM", f"{family}Config", **{**WIDTHS, "pad_token_id": 0, **options})


# Models of plain torch, each called with `x`.
class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.body = nn.Transformer(D, H, L, L, 4 * D, batch_first=True)

    def forward(self, x):
        e = self.embed(x)
        return self.head(self.body(e, e))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

        self.down1, self.down2, self.middle = block(3, 16), block(16, 32), block(32, 64)
        self.up2, self.up1 = block(96, 32), block(48, 16)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2)], 1))
        return self.head(self.up1(torch.cat([a, F.interpolate(c, scale_factor=2)], 1)))


class Generator(nn.Sequential):
    def __init__(self):
        def block(a, b):
            return [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

        super().__init__(*block(32, 64), *block(64, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()

        def mlp(d):
            return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

        self.across = nn.ModuleList(mlp(T) for _ in range(L))
        self.within = nn.ModuleList(mlp(D) for _ in range(L))

    def forward(self, x):
        for across, within in zip(self.across, self.within):
            x = x + across(x.mT).mT
            x = x + within(x)
        return x


class Flow(nn.Module):
    "dx/dt = f(x) by the midpoint rule"

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(D, 4 * D), nn.Tanh(), nn.Linear(4 * D, D))

    def forward(self, x):
        for _ in range(8):
            x = x + 0.1 * self.f(x + 0.05 * self.f(x))
        return x


class Perceptron(nn.Sequential):
    def __init__(self):
        layers = [
            nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.SiLU(), nn.Dropout(0.1)) for _ in range(4)
        ]
        super().__init__(*layers, nn.Linear(D, 10))


class WithLoss(nn.Module):
    "A model whose loss is the mean square, or the cross entropy of its logits with its input"

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        out = self.net(x)
        if x.is_floating_point():
            return out.square().mean()
        return F.cross_entropy(out.flatten(0, 1), x.flatten())


def plain(kind, *shape):
    return lambda: (WithLoss(kind()), dict(x=torch.ones(shape) if shape else tokens()))


class Classifier(nn.Module):
    "A network for pictures, and its loss"

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        out = self.net(x)
        return F.cross_entropy(out["out"] if isinstance(out, dict) else out, labels)


def import_pictures(name):
    "torchvision or timm, where they are installed; None elsewhere"
    if importlib.util.find_spec(name) is None or importlib.util.find_spec("torchvision") is None:
        return None
    if "torchvision" not in sys.modules:
        # torchvision's own kernels are built for one build of torch; with any other its import stops at
        # the first one that is missing. None of them is needed here.
        global _kernels
        _kernels = torch.library.Library("torchvision", "FRAGMENT")
        for kernel in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                _kernels.define(f"{kernel}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.models  # noqa: F401

    return importlib.import_module(name)


def pictures(library, kind, size=64, classes=10, dense=False, **options):
    "A model of torchvision (a name or a class of `torchvision.models`) or of timm (a name)"

    def build():
        found = import_pictures(library)
        if found is None:
            raise ModuleNotFoundError(f"{library} isn't installed")
        if library == "timm":
            net = found.create_model(kind, num_classes=classes, **options)
        else:
            module = found.models.segmentation if dense else found.models
            net = getattr(module, kind)(num_classes=classes, **options)
        shape = (B, size, size) if dense else (B,)
        labels = torch.ones(shape, dtype=torch.long)
        return Classifier(net), dict(x=torch.ones(B, 3, size, size), labels=labels)

    return build


MIXTURE = dict(experts_implementation="eager", moe_intermediate_size=D)

# name: (family, what builds model and batch, options of `make_step`)
CASES = {
    "llama": ("language", decoder("Llama", num_key_value_heads=2), {}),
    "llama, checkpointed": ("language", decoder("Llama"), dict(checkpointing=True)),
    "llama, autocast": ("language", decoder("Llama"), dict(bf16=True)),
    "llama, most frozen": ("language", decoder("Llama"), dict(trained="q_proj")),
    "gpt2": ("language", foreign("GPT2LMHeadModel", "GPT2Config", **GPT), dict(clip=True)),
    "gpt2, checkpointed": (
        "language",
        foreign("GPT2LMHeadModel", "GPT2Config", **GPT),
        dict(checkpointing=True),
    ),
    "gptj": ("language", foreign("GPTJForCausalLM", "GPTJConfig", **GPT, rotary_dim=8), {}),
    "bert": ("language", masked("Bert"), {}),
    "bert, autocast": ("language", masked("Bert"), dict(bf16=True, clip=True)),
    "roberta": ("language", masked("Roberta"), dict(optimizer=optim.Adam)),
    "electra": ("language", masked("Electra", embedding_size=32), {}),
    "albert": ("language", masked("Albert", embedding_size=32), dict(optimizer=optim.Adamax)),
    "deberta": ("language", masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]), {}),
    "distilbert": (
        "language",
        foreign(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            vocab_size=V,
            dim=D,
            n_layers=L,
            n_heads=H,
            hidden_dim=4 * D,
        ),
        dict(optimizer=optim.RMSprop),
    ),
    "xlnet": (
        "language",
        foreign(
            "XLNetLMHeadModel", "XLNetConfig", vocab_size=V, d_model=D, n_layer=L, n_head=H, d_inner=4 * D
        ),
        {},
    ),
    "mistral": ("language", decoder("Mistral", num_key_value_heads=2), dict(clip=True)),
    "qwen2": ("language", decoder("Qwen2", num_key_value_heads=2), {}),
    "qwen3": ("language", decoder("Qwen3", num_key_value_heads=2, head_dim=16), dict(optimizer=optim.NAdam)),
    "gemma": ("language", decoder("Gemma", num_key_value_heads=1, head_dim=16), {}),
    "gemma2": ("language", decoder("Gemma2", num_key_value_heads=2, head_dim=16), {}),
    "phi": ("language", decoder("Phi"), {}),
    "phi3": ("language", decoder("Phi3"), dict(optimizer=partial(optim.SGD, momentum=0.9))),
    "opt": (
        "language",
        foreign(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=V,
            hidden_size=D,
            ffn_dim=4 * D,
            num_hidden_layers=L,
            num_attention_heads=H,
            max_position_embeddings=T,
            word_embed_proj_dim=D,
            **IDS,
        ),
        {},
    ),
    "gpt_neox": ("language", decoder("GPTNeoX"), {}),
    "gpt_neo": (
        "language",
        foreign(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            vocab_size=V,
            hidden_size=D,
            num_layers=L,
            num_heads=H,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=T,
            **IDS,
        ),
        {},
    ),
    "falcon": ("language", decoder("Falcon"), {}),
    "bloom": (
        "language",
        foreign("BloomForCausalLM", "BloomConfig", vocab_size=V, hidden_size=D, n_layer=L, n_head=H, **IDS),
        dict(optimizer=optim.Adagrad),
    ),
    "stablelm": ("language", decoder("StableLm", num_key_value_heads=2), {}),
    "olmo": ("language", decoder("Olmo"), dict(optimizer=partial(optim.AdamW, amsgrad=True))),
    "cohere": ("language", decoder("Cohere", num_key_value_heads=2), {}),
    "starcoder2": ("language", decoder("Starcoder2", num_key_value_heads=2), {}),
    "granite": ("language", decoder("Granite", num_key_value_heads=2), {}),
    "mixtral": ("language", decoder("Mixtral", num_key_value_heads=2, num_local_experts=4), {}),
    "mixtral, loop": (
        "language",
        decoder("Mixtral", num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"),
        dict(even=True),
    ),
    "qwen2_moe, loop": (
        "language",
        decoder(
            "Qwen2Moe",
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=D,
            **MIXTURE,
        ),
        dict(even=True),
    ),
    "deepseek_v3, loop": (
        "language",
        decoder(
            "DeepseekV3",
            num_key_value_heads=H,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
            **MIXTURE,
        ),
        dict(even=True),
    ),
    "mixtral, batched": (
        "language",
        decoder("Mixtral", num_key_value_heads=2, num_local_experts=4, experts_implementation="batched_mm"),
        {},
    ),
    "mamba": (
        "language",
        foreign(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=L,
            state_size=8,
            **IDS,
        ),
        {},
    ),
    "mamba2": (
        "language",
        foreign(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=L,
            state_size=16,
            num_heads=8,
            head_dim=16,
            n_groups=1,
            chunk_size=32,
            **IDS,
        ),
        {},
    ),
    "rwkv": (
        "language",
        foreign(
            "RwkvForCausalLM",
            "RwkvConfig",
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=L,
            context_length=T,
            **IDS,
        ),
        {},
    ),
    "t5": ("language", foreign("T5ForConditionalGeneration", "T5Config", **T5), {}),
    "t5, Adafactor": (
        "language",
        foreign("T5ForConditionalGeneration", "T5Config", **T5),
        dict(optimizer=optim.Adafactor),
    ),
    "mt5": ("language", foreign("MT5ForConditionalGeneration", "MT5Config", **T5), {}),
    "bart": ("language", foreign("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ), {}),
    "pegasus": ("language", foreign("PegasusForConditionalGeneration", "PegasusConfig", **SEQ2SEQ), {}),
    "whisper": (
        "sound",
        foreign(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            spectrum,
            num_mel_bins=16,
            max_source_positions=T,
            **SEQ2SEQ,
        ),
        {},
    ),
    "wav2vec2": (
        "sound",
        foreign(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            sound,
            **{
                **WIDTHS,
                "conv_dim": (32,) * 3,
                "conv_kernel": (10, 3, 2),
                "conv_stride": (5, 2, 2),
                "layerdrop": 0,
                "num_conv_pos_embeddings": 16,
                "num_conv_pos_embedding_groups": 4,
                "apply_spec_augment": False,
            },
        ),
        {},
    ),
    "vit": ("image", foreign("ViTForImageClassification", "ViTConfig", image, **{**WIDTHS, **IMAGE}), {}),
    "deit": ("image", foreign("DeiTForImageClassification", "DeiTConfig", image, **{**WIDTHS, **IMAGE}), {}),
    "beit": ("image", foreign("BeitForImageClassification", "BeitConfig", image, **{**WIDTHS, **IMAGE}), {}),
    "dinov2": (
        "image",
        foreign("Dinov2ForImageClassification", "Dinov2Config", image, **{**WIDTHS, **IMAGE}),
        {},
    ),
    "clip": (
        "image",
        lambda: foreign(
            "CLIPModel",
            "CLIPConfig",
            image_and_text,
            text_config={**WIDTHS, **IDS},
            vision_config={**WIDTHS, "image_size": 32, "patch_size": 8},
        )(),
        {},
    ),
    "swin": (
        "image",
        foreign(
            "SwinForImageClassification",
            "SwinConfig",
            image,
            image_size=32,
            patch_size=2,
            embed_dim=32,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.0,
            num_labels=10,
        ),
        {},
    ),
    "convnext": (
        "image",
        foreign("ConvNextForImageClassification", "ConvNextConfig", image, num_stages=3, **STAGES),
        {},
    ),
    "resnet": (
        "image",
        foreign("ResNetForImageClassification", "ResNetConfig", image, embedding_size=16, **STAGES),
        dict(optimizer=partial(optim.SGD, momentum=0.9)),
    ),
    "segformer": (
        "image",
        foreign(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            segments,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[4, 4],
            decoder_hidden_size=32,
            drop_path_rate=0.0,
        ),
        {},
    ),
    **{
        f"tv {kind}": ("torchvision", pictures("torchvision", kind), {})
        for kind in (
            "resnet18 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 mnasnet0_5 regnet_y_400mf "
            "efficientnet_b0"
        ).split()
    },
    "tv lraspp": (
        "torchvision",
        pictures("torchvision", "lraspp_mobilenet_v3_large", dense=True, weights_backbone=None),
        {},
    ),
    "tv DenseNet": (
        "torchvision",
        pictures("torchvision", "DenseNet", growth_rate=8, block_config=(2, 3, 2), num_init_features=16),
        dict(optimizer=partial(optim.SGD, momentum=0.9)),
    ),
    "tv VisionTransformer": (
        "torchvision",
        pictures(
            "torchvision",
            "VisionTransformer",
            image_size=64,
            patch_size=8,
            num_layers=L,
            num_heads=H,
            hidden_dim=D,
            mlp_dim=4 * D,
        ),
        {},
    ),
    "tv SwinTransformer": (
        "torchvision",
        pictures(
            "torchvision",
            "SwinTransformer",
            patch_size=[4, 4],
            embed_dim=32,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
        ),
        {},
    ),
    **{
        f"timm {kind}": ("timm", pictures("timm", kind), {})
        for kind in (
            "resnet10t mobilenetv3_small_050 convnextv2_atto efficientnet_lite0 ghostnet_050 lcnet_035 "
            "tinynet_e edgenext_xx_small mobilevit_xxs poolformer_s12"
        ).split()
    },
    "timm vit_tiny": ("timm", pictures("timm", "vit_tiny_patch16_224", img_size=64, depth=2), {}),
    "timm xcit_nano": ("timm", pictures("timm", "xcit_nano_12_p16_224", img_size=64), {}),
    "nn.Transformer": ("plain torch", plain(Translator), {}),
    "U-Net": ("plain torch", plain(UNet, 4, 3, 32, 32), {}),
    "DCGAN": ("plain torch", plain(Generator, 8, 32, 4, 4), dict(optimizer=optim.Adam)),
    "MLP-Mixer": ("plain torch", plain(Mixer, 8, T, D), {}),
    "midpoint rule": ("plain torch", plain(Flow, 64, D), dict(optimizer=optim.RAdam)),
    "perceptron": ("plain torch", plain(Perceptron, 256, D), dict(optimizer=optim.Rprop)),
}


def configured(architecture, config, seq=None, **options):
    "A model and its batch as `--hf-config` makes them of a configuration's file"

    def build():
        transformers = require("transformers", "build models that others wrote")
        with tempfile.TemporaryDirectory() as folder:
            settings = getattr(transformers, config)(**options, architectures=[architecture])
            settings.save_pretrained(folder)
            make_model, make_batch, _ = hf_model_maker(folder)
        return make_model(), make_batch(B, seq)

    return build


def causal(family, **options):
    return configured(f"{family}ForCausalLM", f"{family}Config", T, **{**WIDTHS, **IDS, **options})


LAYERS = dict(num_hidden_layers=L, num_attention_heads=H, intermediate_size=4 * D, hidden_size=D)
TWO_TOWERS = dict(text_config=dict(WIDTHS, **IDS), vision_config=dict(LAYERS, image_size=32, patch_size=8))
WAVES = dict(
    conv_dim=(32,) * 3,
    conv_kernel=(10, 3, 2),
    conv_stride=(5, 2, 2),
    layerdrop=0,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    apply_spec_augment=False,
)
# None of these was looked at when the rules of the dry run were written.
CONFIGS = {
    "olmo2": ("language", causal("Olmo2", num_key_value_heads=2), {}),
    "smollm3": ("language", causal("SmolLM3", num_key_value_heads=2), {}),
    "helium": ("language", causal("Helium", num_key_value_heads=2, head_dim=16), {}),
    "modernbert": (
        "language",
        configured(
            "ModernBertForMaskedLM", "ModernBertConfig", T, **WIDTHS, **IDS, cls_token_id=1, sep_token_id=2
        ),
        {},
    ),
    "mpnet": ("language", configured("MPNetForTokenClassification", "MPNetConfig", T, **WIDTHS), {}),
    "granitemoe": (
        "language",
        causal("GraniteMoe", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
        dict(even=True),
    ),
    "falcon_mamba": (
        "language",
        configured(
            "FalconMambaForCausalLM",
            "FalconMambaConfig",
            T,
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=L,
            state_size=8,
            **IDS,
        ),
        {},
    ),
    "recurrent_gemma": (
        "language",
        causal(
            "RecurrentGemma", num_key_value_heads=1, num_hidden_layers=3, lru_width=D, attention_window_size=T
        ),
        {},
    ),
    "led": (
        "encoder-decoder",
        configured(
            "LEDForConditionalGeneration",
            "LEDConfig",
            T,
            **SEQ2SEQ,
            attention_window=16,
            max_encoder_position_embeddings=T,
            max_decoder_position_embeddings=T,
        ),
        {},
    ),
    "m2m_100": (
        "encoder-decoder",
        configured("M2M100ForConditionalGeneration", "M2M100Config", T, **SEQ2SEQ),
        {},
    ),
    "longt5": ("encoder-decoder", configured("LongT5ForConditionalGeneration", "LongT5Config", T, **T5), {}),
    "blenderbot": (
        "encoder-decoder",
        configured("BlenderbotForConditionalGeneration", "BlenderbotConfig", T, **SEQ2SEQ),
        {},
    ),
    "marian": ("encoder-decoder", configured("MarianMTModel", "MarianConfig", T, **SEQ2SEQ), {}),
    "hiera": (
        "image",
        configured(
            "HieraForImageClassification",
            "HieraConfig",
            image_size=[64, 64],
            embed_dim=32,
            depths=[1, 1],
            num_heads=[1, 2],
            embed_dim_multiplier=2.0,
            num_query_pool=1,
            masked_unit_size=[8, 8],
        ),
        {},
    ),
    "swinv2": (
        "image",
        configured(
            "Swinv2ForImageClassification",
            "Swinv2Config",
            image_size=32,
            patch_size=2,
            embed_dim=32,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.0,
        ),
        {},
    ),
    "ijepa": ("image", configured("IJepaForImageClassification", "IJepaConfig", **{**LAYERS, **IMAGE}), {}),
    "focalnet": (
        "image",
        configured(
            "FocalNetForImageClassification",
            "FocalNetConfig",
            image_size=32,
            embed_dim=32,
            depths=[1, 1],
            hidden_sizes=[32, 64],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
            drop_path_rate=0.0,
        ),
        {},
    ),
    "timesformer": (
        "video",
        configured(
            "TimesformerForVideoClassification",
            "TimesformerConfig",
            **{**LAYERS, **IMAGE},
            num_frames=4,
        ),
        {},
    ),
    "audio spectrogram": (
        "sound",
        configured(
            "ASTForAudioClassification",
            "ASTConfig",
            **LAYERS,
            max_length=128,
            num_mel_bins=32,
            frequency_stride=8,
            time_stride=8,
        ),
        {},
    ),
    "speech_to_text": (
        "sound",
        configured(
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            16,
            **SEQ2SEQ,
            max_source_positions=2 * T,
            max_target_positions=T,
            input_feat_per_channel=16,
            conv_channels=D,
        ),
        {},
    ),
    "moonshine": (
        "sound",
        configured(
            "MoonshineForConditionalGeneration",
            "MoonshineConfig",
            16,
            vocab_size=V,
            hidden_size=D,
            intermediate_size=4 * D,
            encoder_num_hidden_layers=L,
            decoder_num_hidden_layers=L,
            encoder_num_attention_heads=H,
            decoder_num_attention_heads=H,
            **IDS,
            decoder_start_token_id=1,
        ),
        {},
    ),
    "hubert": (
        "sound",
        configured("HubertForSequenceClassification", "HubertConfig", 4000, **WIDTHS, **WAVES),
        {},
    ),
    "wav2vec2_bert, CTC": (
        "sound",
        configured(
            "Wav2Vec2BertForCTC",
            "Wav2Vec2BertConfig",
            T,
            **WIDTHS,
            **IDS,
            apply_spec_augment=False,
            layerdrop=0,
        ),
        {},
    ),
    "siglip": ("image and text", configured("SiglipModel", "SiglipConfig", 16, **TWO_TOWERS), {}),
    "chinese_clip": (
        "image and text",
        configured("ChineseCLIPModel", "ChineseCLIPConfig", 16, **TWO_TOWERS),
        {},
    ),
    "git": (
        "image and text",
        configured(
            "GitForCausalLM",
            "GitConfig",
            T,
            **WIDTHS,
            **IDS,
            vision_config=dict(LAYERS, image_size=32, patch_size=8),
        ),
        {},
    ),
    "gemma3": (
        "image and text",
        configured(
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            T,
            text_config=dict(WIDTHS, num_key_value_heads=2, head_dim=16, **IDS),
            vision_config=dict(LAYERS, image_size=32, patch_size=8),
            mm_tokens_per_image=4,
        ),
        {},
    ),
}
SAMPLE = ("nn.Transformer", "MLP-Mixer", "midpoint rule", "perceptron")  # these need torch alone


class EvenRouter(TorchFunctionMode):
    "The judge's router sends each expert the same share of the tokens, as the dry run assumes"

    def __init__(self):
        super().__init__()
        self.spread = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            n, k = out.indices.flatten(0, -2).shape
            key = n, k, args[0].shape[-1]
            if key not in self.spread:
                self.spread[key] = spread_tokens(*key)
            out.indices.data.copy_(self.spread[key].view(out.indices.shape))
        return out


def make_step(name, device):
    "A model, the tensors beside its own that are there before the first step, and its training step"
    _, build, options = (CASES | CONFIGS)[name]
    torch.manual_seed(0)
    with torch.device(device):
        model, batch = build()
    if any(t.device.type != device for t in [*model.parameters(), *model.buffers()]):
        model.to(device)  # some make weights on the CPU, whatever the device
    model.train()
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable()
    if trained := options.get("trained"):
        for n, p in model.named_parameters():
            p.requires_grad_(trained in n)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = options.get("optimizer", optim.AdamW)(weights, lr=1e-3)

    even = options.get("even") and device == "cpu"
    router = EvenRouter() if even else contextlib.nullcontext()
    if even:  # a first pass, so that the judge doesn't see how the even choice is made
        with torch.no_grad(), router:
            model(**batch)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("bf16", False)), router:
            out = model(**batch)
            loss = out if isinstance(out, torch.Tensor) else out.loss
            del out
        loss.backward()
        if options.get("clip"):
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    # Some optimizers make their states before the first step, their counters always on the CPU.
    there = [t for values in [batch, *optimizer.state.values()] for t in values.values()]
    return model, [t for t in there if isinstance(t, torch.Tensor) and t.device.type == device], step


def common_length(a, b, most=4000):
    "Length of the longest common subsequence, by Myers' method; None where more than `most` edits are needed"
    reached = {1: 0}
    for edits in range(most + 1):
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or k != edits and reached[k - 1] < reached[k + 1]
            x = reached[k + 1] if down else reached[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            reached[k] = x
            if x >= len(a) and x - k >= len(b):
                return (len(a) + len(b) - edits) // 2


def aligned(predicted, recorded):
    "Share of the events that both lists have in the same order; None where it is under about a half"
    a, b = ([(sign, n) for sign, _, n in events] for events in (predicted, recorded))
    same = common_length(a, b)
    return None if same is None else 2 * same / (len(a) + len(b))


def predict(name):
    "The dry run's events (from the first step on), its peak, and what it says of itself"
    model, there, step = make_step(name, "meta")
    trace = dry_run(step, model, there, target="cpu")
    made = [(1 if e >= 0 else -1, max(e, ~e), trace.allocation_at(k)) for k, e in enumerate(trace.events)]
    events = number_storages((s, i, a.nbytes) for s, i, a in made if a.phase != "build")
    return events, trace.peak, trace.warnings()


def record(name):
    "The events and the peak that the CPU's allocator reports"
    model, there, step = make_step(name, "cpu")
    storages = [t.untyped_storage() for t in [*model.parameters(), *model.buffers(), *there]]
    before = sum({s._cdata: s.nbytes() for s in storages}.values())
    events = allocator_events(lambda: twice(step))
    return number_storages(events), before + peak_bytes(number_storages(events, min_bytes=0))


def compare(name):
    "One row: the machine's events and peak, and what the dry run says of them"
    row = dict(case=name, family=(CASES | CONFIGS)[name][0])
    truth, peak = record(name)
    row.update(events=len(truth), peak=peak)
    began = time.perf_counter()
    try:
        events, row["predicted_peak"], said = predict(name)
        if said:
            row["warnings"] = said
    except UserError as e:
        return dict(row, refused=str(e))
    share = aligned(events, truth)
    return dict(
        row,
        seconds=round(time.perf_counter() - began, 2),
        predicted_events=len(events),
        error=round(row["predicted_peak"] / peak - 1, 6),
        aligned=share if share is None else round(share, 5),
    )


def main():
    from tiny import ROOT, commit, hardware

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--configs", action="store_true", help="models by their config.json")
    p.add_argument("--cases", nargs="+", choices=[*CASES, *CONFIGS])
    a = p.parse_args()
    cases, kind = (CONFIGS, "foreign_configs") if a.configs else (CASES, "foreign_models")
    # Before transformers, which would look for torchvision itself.
    found = {name: import_pictures(name) for name in ("torchvision", "timm")}
    for name, module in found.items():
        if module is None:
            print(f"{name} isn't installed (or torchvision isn't): its models are left out")
    transformers = require("transformers", "build models that others wrote")
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        **{name: module.__version__ for name, module in found.items() if module is not None},
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = ROOT / "data" / "results" / f"{kind}-{result['commit']}.json"
    result["rows"] = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {row["case"] for row in result["rows"]}
    for name in a.cases or cases:
        if name in done or found.get(cases[name][0], True) is None:
            continue
        try:
            row = compare(name)
        except Exception as e:
            row = dict(case=name, family=cases[name][0], failed=f"{type(e).__name__}: {e}"[:300])
        result["rows"].append(row)
        print({k: v for k, v in row.items() if k != "family"}, flush=True)
        atomic_write(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
