#!/usr/bin/env python3
"""The quick start's model for 200 steps on the CPU and on a GPU, and each beside twins that only add in another order.

  experiments/quick_start/compare_devices.py --cpu build/cpu-release/bin/train --gpu build/cuda-release/bin/train [--twins]

The same configuration on both: one rank, fp32, nobody dies. Prints how many steps differ by more than the limit, the
worst and the mean difference of the loss, and exits with 1 when any step is beyond the limit of 0.5 %, or when the devices
differ by more than 1e-5 in the first ten steps. Any side may be the metrics.jsonl of a run made before, elsewhere.
Two correct devices sum in different orders, and training doubles such a difference every few steps. Twins show how far
that goes by itself, as context, and decide nothing: the same program on the same device, once with its batch in two
micro-batches, which changes nothing but the order in which gradients are added, and once with the learning rate's last
fp32 bit changed.
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
    """Prints one row; returns how many steps are beyond the limit, the worst difference, and the worst of the first steps."""
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
    return beyond, differences[worst], early


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
    beyond, _, early = compare("CPU, GPU", cpu, gpu, args)
    missed = beyond > 0 or early > 1e-5
    print(f"{'MISSED' if missed else 'met'}: every step within {100 * args.limit:g} %")
    if pairs:
        print("twins on the same device, as context:")
        alone = [compare(name, one, twin, args) for name, one, twin in pairs]
        print(f"the worst of {len(alone)} differs by {100 * max(worst for _, worst, _ in alone):.2f} %, "
              f"and {sum(count > 0 for count, _, _ in alone)} of them leave the limit")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
