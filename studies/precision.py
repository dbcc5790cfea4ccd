"""Does bfloat16 move the final accuracy? Runs in float32 and in bfloat16, same seeds, on a GPU.

    python studies/precision.py --data mnist --rounds 30 --json results/speed/precision.json

Prints the accuracy of every run, the spread over seeds in float32, and the difference that bfloat16
makes with the same seed: the claim is that the second is smaller than the first. Without a GPU it says
so and ends.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import fedcsd


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this needs a CUDA device and a PyTorch that was built for it (docs/gpu.md)")
        return
    values: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("data", "model", "method", "beta", "lr", "rounds", "epochs")
    }
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    found: dict[str, list[Any]] = {"fp32": [], "bf16": []}
    for seed in seeds:
        for precision, runs in found.items():
            began = time.perf_counter()
            run = fedcsd.run(**values, seed=seed, device="cuda", precision=precision)
            curve = [100 * record["test_accuracy"] for record in run.history]
            runs.append({"seed": seed, "accuracy": curve, "seconds": time.perf_counter() - began})
            print(f"seed {seed} {precision}: {curve[-1]:.2f} % in {runs[-1]['seconds']:.1f} s", flush=True)
    last = {precision: [run["accuracy"][-1] for run in runs] for precision, runs in found.items()}
    moved = [half - full for full, half in zip(last["fp32"], last["bf16"], strict=True)]
    spread = statistics.stdev(last["fp32"])
    print(
        f"fp32 {statistics.mean(last['fp32']):.2f} ± {spread:.2f}, bf16 {statistics.mean(last['bf16']):.2f}"
    )
    print(
        f"bf16 − fp32, seed by seed: {', '.join(f'{m:+.2f}' for m in moved)}; spread over seeds {spread:.2f}"
    )
    if arguments.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **values}
        figures = {"facts": facts, "runs": found, "moved": moved, "spread": spread}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
