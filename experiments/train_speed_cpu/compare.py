#!/usr/bin/env python3
"""Kintsugi against PyTorch on this machine's CPU: tokens/s of one process with one thread, and of 8 ranks.

  compare.py --python PYTHON_WITH_TORCH [--build build/cpu-release] [--rounds 3] [--ranks 8] [--out DIR]

The two take turns, --rounds times each, so that whatever else the machine does falls on both; the medians of the
rounds are compared. Each program checks its losses, warms up and reports a median itself (see their heads). The many
ranks run as `mpirun train benchmark.toml` with its whole machinery (agents, votes, metrics), and as
DistributedDataParallel over gloo. Writes results.json and prints a table. --cpu_time compares the CPU time of one
process instead of the wall's: on a busy machine it is the fairer figure.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
WARM_UP_STEPS = 5


def read_json(command, path):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with open(path) as f:
        return json.load(f)


def ours_alone(args, folder):
    path = os.path.join(folder, "step.json")
    command = [os.path.join(args.build, "bin", "step_bench"), "--json", path]
    return read_json(command + args.clock, path)["tokens_per_second"]


def pytorch(args, folder, ranks):
    path = os.path.join(folder, "pytorch.json")
    bench = os.path.join(HERE, "pytorch_bench.py")
    command = [args.python, bench, "--ranks", str(ranks), "--json", path]
    return read_json(command + args.clock, path)["tokens_per_second"]


def ours_many(args, folder):
    """Median tokens/s of the steps after the warm-up, from metrics.jsonl."""
    config = os.path.join(folder, "benchmark.toml")
    shutil.copy(os.path.join(HERE, "benchmark.toml"), config)
    letters = random.Random(1)
    with open(os.path.join(folder, "random.txt"), "w") as f:
        f.write("".join(letters.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(1 << 20)))
    out = os.path.join(folder, "out")
    shutil.rmtree(out, ignore_errors=True)
    command = ["mpirun", "-np", str(args.ranks), "--oversubscribe"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [os.path.join(args.build, "bin", "train"), config, "--out", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    speeds = []
    with open(os.path.join(out, "metrics.jsonl")) as f:
        for line in f:
            value = json.loads(line)
            if value.get("throughput(tps)") is not None:
                speeds.append(value["throughput(tps)"])
    return statistics.median(speeds[WARM_UP_STEPS:])


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.processor())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--build", default="build/cpu-release")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", choices=["one", "many"], help="half of the comparison")
    parser.add_argument("--out", default=".", help="folder for results.json")
    parser.add_argument("--cpu_time", action="store_true")
    args = parser.parse_args()
    args.clock = ["--cpu_time"] if args.cpu_time else []
    cases = []
    if args.only != "many":
        cases.append(("1 process, 1 thread", ours_alone, lambda a, f: pytorch(a, f, 1)))
    if args.only != "one" and not args.cpu_time:
        cases.append((f"{args.ranks} ranks", ours_many, lambda a, f: pytorch(a, f, a.ranks)))
    results = {"machine": f"{cpu_name()}, {os.cpu_count()} CPUs", "rounds": args.rounds, "clock": "CPU time" if args.cpu_time else "wall", "cases": []}
    print(f"{'case':<22}{'Kintsugi tok/s':>16}{'PyTorch tok/s':>16}{'ratio':>8}   ({results['machine']}, load {os.getloadavg()[0]:.1f})")
    with tempfile.TemporaryDirectory() as folder:
        for name, ours, theirs in cases:
            runs = [(ours(args, folder), theirs(args, folder)) for _ in range(args.rounds)]
            ours_median, theirs_median = (statistics.median(column) for column in zip(*runs))
            print(f"{name:<22}{ours_median:>16.0f}{theirs_median:>16.0f}{ours_median / theirs_median:>8.2f}", flush=True)
            results["cases"].append({"case": name, "kintsugi": ours_median, "pytorch": theirs_median, "runs": runs})
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "results.json"), "w") as f:
        json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
