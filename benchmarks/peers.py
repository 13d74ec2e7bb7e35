"""The dry run beside its peers: error of the peak and seconds, on models of benchmarks/foreign_models.py:
data/results/peers-<commit>.json.

    python benchmarks/peers.py [--cases NAME ...]

The judge is the CPU's allocator (torch's profiler), two training steps of each model. The peers:
torch's MemTracker under FakeTensorMode, which runs the step on tensors without bytes, too; what `accelerate
estimate-memory` computes for AdamW in fp32 (its functions, given the model, offline); and the rule of 16
bytes for each parameter. The last two don't look at a batch. Seconds include building the model. A peer that
fails on a model has its error in the row.
"""

import argparse, datetime, json, time

import foreign_models as zoo
import torch
from elleci.core import atomic_write, require
from elleci.memory.trace import dry_run

CASES = ("llama", "gpt2", "bert", "t5", "vit", "llama, checkpointed", "nn.Transformer", "U-Net", "perceptron")


def ours(name):
    model, there, step = zoo.make_step(name, "meta")
    return dry_run(step, model, there, target="cpu").peak


def mem_tracker(name):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, there, step = zoo.make_step(name, "cpu")
        tracker = MemTracker()
        tracker.track_external(model, *there)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
    return max(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


def accelerate_estimate(name):
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    model, _, _ = zoo.make_step(name, "meta")
    total, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(total, "float32").values())


def sixteen_bytes(name):
    model, _, _ = zoo.make_step(name, "meta")
    return 16 * sum(p.numel() for p in model.parameters())


PEERS = {
    "dry_run": ours,
    "MemTracker": mem_tracker,
    "accelerate estimate-memory": accelerate_estimate,
    "16 bytes per parameter": sixteen_bytes,
}


def compare(name):
    "One row: the machine's peak, and each peer's error and seconds"
    row = dict(case=name, peak=zoo.record(name)[1])
    for peer, predict in PEERS.items():
        began = time.perf_counter()
        try:
            predicted = predict(name)
        except Exception as e:
            row[peer] = dict(failed=f"{type(e).__name__}: {e}"[:200])
            continue
        seconds = round(time.perf_counter() - began, 2)
        row[peer] = dict(predicted=predicted, error=round(predicted / row["peak"] - 1, 5), seconds=seconds)
    return row


def main():
    from tiny import ROOT, commit, hardware

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", choices=zoo.CASES, default=list(CASES))
    a = p.parse_args()
    transformers = require("transformers", "build models that others wrote")
    accelerate = require("accelerate", "ask its estimate")
    result = dict(
        hardware=hardware(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        accelerate=accelerate.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        rows=[],
    )
    path = ROOT / "data" / "results" / f"peers-{result['commit']}.json"
    for name in ("perceptron", *a.cases):  # the first one warms up, and is measured again
        row = compare(name)
        result["rows"] = [r for r in result["rows"] if r["case"] != name] + [row]
        print(json.dumps(row), flush=True)
    atomic_write(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
