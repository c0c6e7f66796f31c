#!/usr/bin/env python3
"""The quick start's model for 200 steps on the CPU and on a GPU, and each beside a twin that differs in one bit.

  experiments/quick_start/compare_devices.py --cpu build/cpu-release/bin/train --gpu build/cuda-release/bin/train [--twins]

The same configuration on both: one rank, fp32, nobody dies. Two correct devices sum in different orders, and training
doubles such a difference every few steps; a twin shows how far that goes by itself: the same device and program again,
with the learning rate's last fp32 bit changed. So the devices agree as far as can be asked when they stay within 0.5 %
of each other, or no further apart than the twins are. Any side may be the metrics.jsonl of a run made before, elsewhere.
Prints for each pair how many steps differ by more than the limit, the worst and the mean difference of the loss, and
exits with 1 when the devices are further apart than the limit in more steps than the worse pair of twins is (without
twins: in any step), or differ by more than 1e-5 in the first ten steps.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import tomllib

HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = os.path.join(HERE, "quick_start.toml")
LOSS = "loss_metrics/global_avg_loss"
EARLY = 10  # steps


def next_float(x):
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", x))[0] + 1))[0]


def curve(source, device, args, folder, twin=False):
    path = source
    if not source.endswith(".jsonl"):
        out = os.path.join(folder, device + ("_twin" if twin else ""))
        command = [source, CONFIG, "--out", out]
        for setting in [f"device={device}", f"training.steps={args.steps}", "training.eval_every=0", "checkpoint.every=0",
                        "checkpoint.save_last=false", "recovery.spares=0", "fault.kill=[]", *args.set]:
            command += ["--set", setting]
        if twin:
            with open(CONFIG, "rb") as f:
                command += ["--set", f"optimizer.lr={next_float(tomllib.load(f)['optimizer']['lr']):.12g}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        path = os.path.join(out, "metrics.jsonl")
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return {line["step"]: line[LOSS] for line in lines if LOSS in line}


def compare(name, a, b, args):
    """Prints one row; returns the number of steps beyond the limit and the largest difference of the first steps."""
    steps = sorted(a.keys() & b.keys())
    assert len(steps) >= args.steps, f"{len(steps)} steps on both sides"
    differences = {s: abs(b[s] / a[s] - 1) for s in steps}
    beyond = sum(d > args.limit for d in differences.values())
    worst = max(steps, key=differences.get)
    early = max(differences[s] for s in steps[:EARLY])
    marks = "  ".join(f"{differences[s]:.0e}" for s in steps if s % 40 == 0)
    print(f"{name:<16}{beyond:>4} of {len(steps)} steps beyond {100 * args.limit:g} %   worst {100 * differences[worst]:.2f} % at {worst:<4}"
          f" mean {100 * sum(differences.values()) / len(steps):.3f} %   first {EARLY}: {early:.0e}   every 40th: {marks}")
    return beyond, early


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", required=True, help="train, or a metrics.jsonl")
    parser.add_argument("--gpu", required=True, help="train, or a metrics.jsonl")
    parser.add_argument("--twins", action="store_true", help="run each program again with the last bit changed")
    parser.add_argument("--cpu-twin", help="the CPU's twin, when it is a metrics.jsonl")
    parser.add_argument("--gpu-twin", help="the GPU's twin, when it is a metrics.jsonl")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=0.005)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all")
    args = parser.parse_args()
    twins = {}
    with tempfile.TemporaryDirectory() as folder:
        cpu, gpu = curve(args.cpu, "cpu", args, folder), curve(args.gpu, "cuda", args, folder)
        for device, program, given in (("cpu", args.cpu, args.cpu_twin), ("cuda", args.gpu, args.gpu_twin)):
            if given or (args.twins and not program.endswith(".jsonl")):
                twins[device] = curve(given or program, device, args, folder, twin=True)
    beyond, early = compare("CPU, GPU", cpu, gpu, args)
    alone = [compare(f"{name}, its twin", one, twins[device], args)[0]
             for device, name, one in (("cpu", "CPU", cpu), ("cuda", "GPU", gpu)) if device in twins]
    return 0 if beyond <= max(alone, default=0) and early <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
