"The seconds of real steps against those that elleci.planning.step_time predicts from the machine's rates."
import statistics, time
from dataclasses import replace
import torch
from elleci.config import ModelConfig, TrainConfig
from elleci.core import seed_everything
from elleci.engine.layer_major import make_engine, make_model
from elleci.optim.optimizers import make_optimizer
from elleci.planning.account import account
from elleci.planning.step_time import TERMS, Machine, step_time
from gpu.bench import failed, free, note, row

MEDIUM = ModelConfig(vocab_size=32_128, d_model=1024, n_layers=12, d_ff=2816, n_attn_heads=8)
TOY = replace(
    MEDIUM,
    vocab_size=256,
    d_model=64,
    n_layers=4,
    d_ff=96,
    headdim=16,
    n_attn_heads=2,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    kv_lora_rank=32,
)
# lion-pytorch may not be there
TRAIN = TrainConfig(seq_len=1024, batch_size=8, grad_accum_steps=4, optimizer='adamw')
MAJOR = dict(
    engine='layer-major',
    clip_by='layer',
    optimizer='lion8',
    precision='bf16-weights',
    block_inputs_on='device',
)
# what a model of six rates may be off by
OFF = .25

def cases():
    streamed = MAJOR | dict(block_inputs_on='pinned', weights_on='host', states_on='host')
    return {
        'ordinary': (False, {}),
        'ordinary, ternary': (True, {}),
        'ordinary, ternary, checkpoints': (True, dict(checkpointing='block')),
        'ordinary, fp32': (False, dict(precision='fp32')),
        'layer-major': (False, MAJOR),
        'layer-major, ternary': (True, MAJOR),
        'layer-major, streamed': (False, streamed),
        'layer-major, streamed, few tokens': (False, streamed | dict(grad_accum_steps=1, batch_size=1)),
    }

def seconds(ctx, model, train):
    "(median, all) of a few steps, warm"
    if ctx.absent:
        account(model, train)
        return 1., []
    seed_everything(0)
    m = make_model(model, train, 'cpu' if train.weights_on == 'host' else ctx.device)
    optimizer = make_optimizer(m, train)
    engine = make_engine(m, optimizer, train, device=ctx.device)
    shape = train.batch_size, train.seq_len
    batches = [
        [
            torch.randint(model.vocab_size, shape, device=ctx.device),
            torch.randint(model.vocab_size, shape, device=ctx.device),
            (torch.arange(shape[1], device=ctx.device) // 99).expand(shape).contiguous(),
        ]
        for _ in range(train.grad_accum_steps)
    ]
    wait = (lambda: None) if ctx.dry else torch.cuda.synchronize
    taken = []
    for _ in range(3 if ctx.dry else 7):
        wait()
        began = time.perf_counter()
        engine.step(batches)
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:]), taken

def run(ctx):
    here = Machine(**ctx.machine['step_machine'])
    worst = []
    for name, (ternary, change) in cases().items():
        if ctx.left < 8:
            yield note(f'cut for time: {name} and what follows', cut=True)
            break
        if ctx.dry and change.get('block_inputs_on') == 'pinned':
            change = change | dict(block_inputs_on='pageable')
        model = replace(TOY if ctx.dry else MEDIUM, ternary=ternary)
        train = replace(
            replace(TRAIN, seq_len=48, batch_size=2, grad_accum_steps=2) if ctx.dry else TRAIN, **change
        )
        try:
            predicted = step_time(model, train, here)
            measured, taken = seconds(ctx, model, train)
        except Exception as e:
            yield failed(name, e)
            free()
            continue
        free()
        worst.append(abs(predicted['total']/measured - 1))
        yield row(
            name,
            measured,
            's',
            predicted=predicted['total'],
            binds=predicted['binds'],
            terms={k: predicted[k] for k in TERMS},
            seconds=taken,
            tokens_per_s=train.tokens_per_step / measured,
            shape=f'{train.grad_accum_steps} × {train.batch_size} × {train.seq_len}',
        )
        yield row(
            f'{name}: predicted {predicted["total"]:.3g} s, off by {predicted["total"] / measured - 1:+.0%}',
            worst[-1],
            'of it',
            None if ctx.dry else OFF,
            at_most=True,
        )
    if worst and not ctx.dry: yield row(f'worst of {len(worst)}', max(worst), 'of it', OFF, at_most=True)
