#!/usr/bin/env python3
"""The quick start's model for 200 steps on the CPU and on a GPU, and each beside twins that only add in another order.

  experiments/quick_start/compare_devices.py --cpu build/cpu-release/bin/train --gpu build/cuda-release/bin/train [--twins]

The same configuration on both: one rank, fp32, nobody dies. Two correct devices sum in different orders, and training
doubles such a difference every few steps; twins show how far that goes by itself: the same program on the same device,
once with its batch in two micro-batches, which changes nothing but the order in which gradients are added, and once with
the learning rate's last fp32 bit changed. So the devices agree as far as can be asked when they stay within 0.5 % of each
other, or no further apart than twins are. Any side may be the metrics.jsonl of a run made before, elsewhere.
Prints for each pair how many steps differ by more than the limit, the worst and the mean difference of the loss, and
exits with 1 when the devices' worst or mean difference is beyond the limit and beyond that of the worst twins by half, or
when they differ by more than 1e-5 in the first ten steps.
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


def twin_settings(kind):
    with open(CONFIG, "rb") as f:
        config = tomllib.load(f)
    if kind == "order":
        return [f"training.micro_batch_size={config['training']['global_batch_size'] // 2}"]
    return [f"optimizer.lr={next_float(config['optimizer']['lr']):.12g}"]


def curve(source, device, args, folder, twin=""):
    path = source
    if not source.endswith(".jsonl"):
        out = os.path.join(folder, device + twin)
        command = [source, CONFIG, "--out", out]
        settings = twin_settings(twin) if twin else []
        for setting in [*settings, f"device={device}", f"training.steps={args.steps}", "training.eval_every=0", "checkpoint.every=0",
                        "checkpoint.save_last=false", "recovery.spares=0", "fault.kill=[]", *args.set]:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        path = os.path.join(out, "metrics.jsonl")
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return {line["step"]: line[LOSS] for line in lines if LOSS in line}


def compare(name, a, b, args):
    """Prints one row; returns the worst and the mean difference, and the largest of the first steps."""
    steps = sorted(a.keys() & b.keys())
    assert len(steps) >= args.steps, f"{len(steps)} steps on both sides"
    differences = {s: abs(b[s] / a[s] - 1) for s in steps}
    beyond = sum(d > args.limit for d in differences.values())
    worst = max(steps, key=differences.get)
    early = max(differences[s] for s in steps[:EARLY])
    marks = "  ".join(f"{differences[s]:.0e}" for s in steps if s % 40 == 0)
    mean = sum(differences.values()) / len(steps)
    print(f"{name:<20}{beyond:>4} of {len(steps)} steps beyond {100 * args.limit:g} %   worst {100 * differences[worst]:.2f} % at {worst:<4}"
          f" mean {100 * mean:.3f} %   first {EARLY}: {early:.0e}   every 40th: {marks}")
    return differences[worst], mean, early


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", required=True, help="train, or a metrics.jsonl")
    parser.add_argument("--gpu", required=True, help="train, or a metrics.jsonl")
    parser.add_argument("--twins", action="store_true", help="run each program again with the last bit changed")
    parser.add_argument("--cpu-twins", nargs="*", default=[], metavar="JSONL", help="the CPU's twins, made before")
    parser.add_argument("--gpu-twins", nargs="*", default=[], metavar="JSONL", help="the GPU's twins, made before")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=0.005)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all")
    args = parser.parse_args()
    pairs = []  # name, curve, its twin's
    with tempfile.TemporaryDirectory() as folder:
        cpu, gpu = curve(args.cpu, "cpu", args, folder), curve(args.gpu, "cuda", args, folder)
        for name, device, program, one, given in (("CPU", "cpu", args.cpu, cpu, args.cpu_twins), ("GPU", "cuda", args.gpu, gpu, args.gpu_twins)):
            pairs += [(f"{name}, {os.path.basename(path)[:-6]}", one, curve(path, device, args, folder)) for path in given]
            if args.twins and not program.endswith(".jsonl"):
                pairs += [(f"{name}, {kind}", one, curve(program, device, args, folder, kind)) for kind in ("order", "bit")]
    worst, mean, early = compare("CPU, GPU", cpu, gpu, args)
    alone = [compare(name, one, twin, args) for name, one, twin in pairs]
    far = any(value > args.limit and value > 1.5 * max((a[i] for a in alone), default=0) for i, value in enumerate((worst, mean)))
    return 1 if far or early > 1e-5 else 0


if __name__ == "__main__":
    sys.exit(main())
