#!/usr/bin/env python3
"""The quick start's model for 200 steps on the CPU and on a GPU: the loss curves must agree within 0.5 %.

  experiments/quick_start/compare_devices.py --cpu build/cpu-release/bin/train --gpu build/cuda-release/bin/train

Either side may be the metrics.jsonl of a run made before, elsewhere. The same configuration on both: one rank, fp32,
nobody dies. Prints the largest relative difference of the loss and of the gradient norm; exit code 1 beyond the limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
LOSS, NORM = "loss_metrics/global_avg_loss", "grad_norm"


def curve(source, device, args, folder):
    if source.endswith(".jsonl"):
        path = source
    else:
        out = os.path.join(folder, device)
        command = [source, os.path.join(HERE, "quick_start.toml"), "--out", out]
        for setting in [f"device={device}", f"training.steps={args.steps}", "training.eval_every=0", "checkpoint.every=0",
                        "checkpoint.save_last=false", "recovery.spares=0", "fault.kill=[]", *args.set]:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        path = os.path.join(out, "metrics.jsonl")
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return {line["step"]: line for line in lines if LOSS in line}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", required=True, help="train, or a metrics.jsonl")
    parser.add_argument("--gpu", required=True, help="train, or a metrics.jsonl")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=0.005)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for both")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cpu, gpu = (curve(s, d, args, folder) for s, d in ((args.cpu, "cpu"), (args.gpu, "cuda")))
    steps = sorted(cpu.keys() & gpu.keys())
    assert len(steps) >= args.steps, f"{len(steps)} steps on both sides"
    worst = {}
    for key in (LOSS, NORM):
        worst[key] = max((abs(gpu[s][key] / cpu[s][key] - 1), s) for s in steps)
    last = steps[-1]
    print(f"{len(steps)} steps, loss {cpu[steps[0]][LOSS]:.4f} ... {cpu[last][LOSS]:.6f} on the CPU, {gpu[last][LOSS]:.6f} on the GPU")
    for key, (difference, step) in worst.items():
        print(f"{key}: largest relative difference {difference:.2e}, at step {step}")
    return 0 if worst[LOSS][0] <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
