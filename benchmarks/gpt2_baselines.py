"""A GPT-2 shape trained on the embedded corpus: data/results/gpt2_baselines-<commit>.json, which
`92_gpt2_baselines` draws.

    python benchmarks/gpt2_baselines.py [--steps N] [--data wikitext-2]

`gpt-tiny` with a vocabulary that the text fills (2,048 entries instead of 50,257), by the ordinary command:
loss and learning rate of every optimizer step, of two micro-batches each; perplexity of held-out text; the
probability of end-of-text where a document ends, and elsewhere, before and after. Another text is an
explicit choice: the WikiText recipes go to the network.
"""
import argparse, datetime, json, math, tempfile, time
from dataclasses import replace
from pathlib import Path
import torch
from elleci.config import Config, preset
from elleci.core import atomic_write, seed_everything
from elleci.data.tokenizer import EOT
from elleci.inference.evaluate import validation_documents, validation_sources
from elleci.model import Elleci
from elleci.training.load import load_run
from elleci.training.loop import token_byte_counts
from elleci.training.run import elleci_train
from elleci.training.telemetry import read_metrics
from tiny import ROOT, commit, hardware

TRAIN = dict(batch_size=2, grad_accum_steps=2, precision='fp32', val_every=50, val_rows=16, save_every=10**6)


def configuration(steps):
    config = preset('gpt-tiny')
    train = replace(config.train, steps=steps, **TRAIN, allow_unused_vocab=False)
    return Config('gpt-tiny, 2,048 entries', replace(config.model, vocab_size=2048), train)


@torch.no_grad()
def end_of_text(model, documents, context):
    "Mean probability of end-of-text behind a document's last word, and behind its other words"
    at_end, elsewhere = [], []
    for document in documents:
        ids = torch.from_numpy(document.ids[-context:])
        prob = model(ids[None, :-1])[0].float().softmax(-1)[:, EOT]
        at_end.append(float(prob[-1]))
        elsewhere.append(float(prob[:-1].mean()))
    return dict(at_end=sum(at_end)/len(at_end), elsewhere=sum(elsewhere)/len(elsewhere))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=250)
    p.add_argument('--data')
    a = p.parse_args()
    config = configuration(a.steps)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)/'run'
        elleci_train(config=config, out=str(out), **(dict(data=a.data) if a.data else {}))
        seconds, rows = time.perf_counter() - began, read_metrics(out)
        config, tokenizer, model = load_run(out)
        with validation_sources(out, config, tokenizer) as sources:
            documents = [
                document
                for rows_of in sources.values()
                for document in validation_documents(rows_of, token_byte_counts(tokenizer), 50)
                if len(document.ids) > 3
            ]
        seed_everything(config.train.seed)
        untrained = end_of_text(Elleci(config.model).eval(), documents, config.train.seq_len)
        trained = end_of_text(model.eval(), documents, config.train.seq_len)
    validations = [r for r in rows if 'val_loss' in r]
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        data=a.data or 'embedded',
        parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=config.model.vocab_size,
        tokens_per_step=config.train.tokens_per_step,
        warmup_steps=config.train.warmup_steps,
        lr=config.train.lr,
        steps=[dict(step=r['step'], loss=r['loss'], lr=r['lr']) for r in rows if 'loss' in r],
        validations=[
            dict(step=r['step'], perplexity=math.exp(r['val_loss']), bits_per_byte=r['val_bpb'])
            for r in validations
        ],
        end_of_text=dict(documents=len(documents), untrained=untrained, trained=trained),
        seconds=round(seconds, 1),
    )
    path = ROOT/'data'/'results'/f"gpt2_baselines-{result['commit']}.json"
    atomic_write(path, json.dumps(result) + '\n')
    print(json.dumps(result['validations'][-1]), json.dumps(result['end_of_text']), f'{seconds:.0f} s')
    print(f'written to {path.relative_to(ROOT)}')


if __name__ == '__main__': main()
