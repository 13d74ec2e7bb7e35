"""Tokens per second of cached decoding on this CPU, against transformers' `generate` on the same weights. See
runner.py for the command line.
"""
import dataclasses, itertools, os, time

os.environ['HF_HUB_OFFLINE'] = '1'
import torch
from elleci.config import preset
from elleci.core import assert_close, optional, seed_everything
from elleci.kernels.pointwise import EPS
from elleci.layers.ffn import pack_model
from elleci.model import Elleci
from runner import main, median_ratio
from statistics import median

# Ours, and what DeepseekV3 calls it, below model.layers.<i>.
LAYER_NAMES = {
    'mixer_norm.weight': 'input_layernorm.weight',
    'mixer.q_proj.weight': 'self_attn.q_proj.weight',
    'mixer.kv_down.weight': 'self_attn.kv_a_proj_with_mqa.weight',
    'mixer.norm.weight': 'self_attn.kv_a_layernorm.weight',
    'mixer.kv_up.weight': 'self_attn.kv_b_proj.weight',
    'mixer.o_proj.weight': 'self_attn.o_proj.weight',
    'ffn_norm.weight': 'post_attention_layernorm.weight',
    'ffn.down.weight': 'mlp.down_proj.weight',
}

def deepseek_state(model):
    "The state dict of `DeepseekV3ForCausalLM` with our weights"
    state = {'model.embed_tokens.weight': model.embedding.weight, 'model.norm.weight': model.norm.weight,
             'lm_head.weight': model.head.weight}
    for i, block in enumerate(model.blocks):
        ours = dict(block.named_parameters())
        gate, up = ours.pop('ffn.gate_up.weight').chunk(2)
        layer = {LAYER_NAMES[name]: t for name, t in ours.items()}
        layer |= {'mlp.gate_proj.weight': gate, 'mlp.up_proj.weight': up}
        state |= {f'model.layers.{i}.{name}': t for name, t in layer.items()}
    return state

def deepseek(model):
    "`DeepseekV3ForCausalLM` with our weights; None where transformers is not installed"
    if optional('transformers') is None: return None
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    c = model.cfg
    config = DeepseekV3Config(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers, first_k_dense_replace=c.n_layers, num_attention_heads=c.n_attn_heads,
        num_key_value_heads=c.n_attn_heads, q_lora_rank=None, kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim, qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim,
        rope_interleave=False, rope_parameters=dict(rope_type='default', rope_theta=c.rope_theta),
        rms_norm_eps=EPS, tie_word_embeddings=c.tie_embeddings, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    theirs = DeepseekV3ForCausalLM(config).eval()
    theirs.load_state_dict(deepseek_state(model))
    # The norm of the latents does not read rms_norm_eps.
    for layer in theirs.model.layers: layer.self_attn.kv_a_layernorm.variance_epsilon = EPS
    return theirs

@torch.inference_mode()
def ours(model, prompts, n):
    "n tokens behind each prompt (B, T), greedily"
    cache, token = model.new_cache(len(prompts), prompts.shape[1] + n), prompts
    tokens = []
    for _ in range(n):
        token = model(token, cache=cache)[:, -1:].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, 1)

@torch.inference_mode()
def theirs(model, prompts, n):
    "The same by transformers' `generate`"
    mask = torch.ones_like(prompts)
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False)
    return out[:, prompts.shape[1]:]

def subjects(cfg):
    "{name: (function, model)}; transformers' model only where its logits are ours"
    def built(pattern, ternary):
        seed_everything(0)
        return Elleci(dataclasses.replace(cfg, pattern=pattern, ternary=ternary)).eval()
    attention = built('A', False)
    found = {'A': (ours, attention)}
    if (peer := deepseek(attention)) is not None:
        tokens = torch.randint(cfg.vocab_size, (2, 50))
        with torch.inference_mode(): assert_close(peer(tokens).logits, attention(tokens), atol=1e-5)
        found['transformers'] = theirs, peer
    found['A, ternary, packed'] = ours, pack_model(built('A', True))
    found['MMMA'] = ours, built('MMMA', False)
    found['MMMA, ternary, packed'] = ours, pack_model(built('MMMA', True))
    return found

def seconds(f, model, prompts, n):
    "CPU seconds of n − 1 steps, without those of a text of one token, and the text"
    began = time.process_time()
    f(model, prompts, 1)
    prefilled = time.process_time()
    text = f(model, prompts, n)
    return (time.process_time() - prefilled) - (prefilled - began), text

def measure(name, todo, batch, prompt, n, rounds):
    "CPU seconds of every subject, round by round, and whether the texts of the two are the same"
    first = todo['A'][1]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(first.cfg.vocab_size, (batch, prompt), generator=generator)
    taken, texts = {subject: [] for subject in todo}, {}
    for i in range(rounds + 1):
        for subject, (f, model) in todo.items():
            s, texts[subject] = seconds(f, model, prompts, n)
            if i: taken[subject].append(round(s, 4))    # the first round warms up
    speeds = {k: round(batch*(n - 1)/median(s), 1) for k, s in taken.items()}
    n_parameters = sum(p.numel() for p in first.parameters())
    found = dict(model=name, parameters=n_parameters, batch=batch, prompt=prompt, tokens=n, seconds=taken,
                 tokens_per_second=speeds)
    if 'transformers' in todo:
        found['same_text'] = bool(torch.equal(texts['A'], texts['transformers']))
        found['faster'] = median_ratio(taken['transformers'], taken['A'], 2)
    print(name, batch, prompt, speeds, flush=True)
    return found

def decode(tokens=48, rounds=3, presets=('elleci-tiny', 'elleci-30m'), dry=False):
    """Pattern 'A' (MLA and SwiGLU) is copied into `DeepseekV3ForCausalLM` with dense layers, logits are
    compared, and both continue the same prompts greedily, in turn, on one thread (wanted: 1.5 times as fast);
    packed ternary weights and pattern MMMA beside it"""
    torch.set_num_threads(1)
    cases, transformers = [], optional('transformers')
    for name in presets[:1] if dry else presets:
        todo = subjects(preset(name).model)
        for prompt, batch in itertools.product((16,) if dry else (16, 512), (1, 8)):
            cases.append(measure(name, todo, batch, prompt, *((4, 1) if dry else (tokens, rounds))))
            yield dict(transformers=getattr(transformers, '__version__', None), cases=cases)

if __name__ == '__main__': main(decode)
