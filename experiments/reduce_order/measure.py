#!/usr/bin/env python3
"""The price of parallelism.reduce_order = "fixed": tokens/s against "fast" at 1, 2, 4 and 8 ranks.

  measure.py [--build build/cpu-release] [--rounds 3] [--ranks 1 2 4 8] [--steps 25] [--out DIR]

Runs `train` on the benchmark model (experiments/train_speed_cpu/benchmark.toml), the two orders taking turns. Checks that
the fixed runs end with the same losses and state_sha256 at every number of ranks. Writes results.json, prints a table. The
price is the median over the rounds of each round's own ratio, and each round begins with the other order, so that what
drifts on the machine falls on both.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
WARM_UP_STEPS = 5
ORDERS = ("fast", "fixed")
MICRO_BATCH = 4  # the size of a virtual shard (32 sequences in 8): both orders run the same products


def run(args, folder, ranks, order):
    """(median tokens/s after the warm-up, median exposed ms, losses, state_sha256) of one run."""
    out = os.path.join(folder, "out")
    shutil.rmtree(out, ignore_errors=True)
    command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [os.path.join(args.build, "bin", "train"), os.path.join(folder, "benchmark.toml"), "--out", out]
    for assignment in (
        f"training.steps={args.steps}",
        f"training.micro_batch_size={MICRO_BATCH}",
        f"parallelism.reduce_order={order}",
    ):
        command += ["--set", assignment]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(os.path.join(out, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    with open(os.path.join(out, "summary.json")) as f:
        sha256 = json.load(f)["state_sha256"]
    timed = lines[WARM_UP_STEPS:]
    return {
        "tokens_per_second": statistics.median(line["throughput(tps)"] for line in timed),
        "exposed_ms": 1e3 * statistics.median(line["time_metrics/exposed_communication(s)"] for line in timed),
        "losses": [line["loss_metrics/global_avg_loss"] for line in lines],
        "state_sha256": sha256,
    }


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.processor())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cpu-release")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", default=".", help="folder for results.json")
    args = parser.parse_args()
    results = {"machine": f"{cpu_name()}, {os.cpu_count()} CPUs", "rounds": args.rounds, "steps": args.steps, "cases": []}
    load_before = os.getloadavg()[0]
    print(f"{results['machine']}, load {load_before:.1f}; tokens/s, median of {args.rounds} medians")
    print(f"{'ranks':>5}{'fast':>10}{'fixed':>10}{'price':>8}{'fast exposed ms':>18}{'fixed exposed ms':>18}")
    fixed_results = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(HERE, "..", "train_speed_cpu", "benchmark.toml"), folder)
        letters = random.Random(1)
        with open(os.path.join(folder, "random.txt"), "w") as f:
            f.write("".join(letters.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(1 << 20)))
        for ranks in args.ranks:
            rounds = [
                {order: run(args, folder, ranks, order) for order in (ORDERS if i % 2 == 0 else ORDERS[::-1])}
                for i in range(args.rounds)
            ]
            fixed_results += [(r["fixed"]["losses"], r["fixed"]["state_sha256"]) for r in rounds]
            median = {
                (order, key): statistics.median(r[order][key] for r in rounds)
                for order in ORDERS
                for key in ("tokens_per_second", "exposed_ms")
            }
            fast, fixed = median["fast", "tokens_per_second"], median["fixed", "tokens_per_second"]
            prices = [1 - r["fixed"]["tokens_per_second"] / r["fast"]["tokens_per_second"] for r in rounds]
            price = statistics.median(prices)
            print(
                f"{ranks:>5}{fast:>10.0f}{fixed:>10.0f}{price:>8.1%}"
                f"{median['fast', 'exposed_ms']:>18.1f}{median['fixed', 'exposed_ms']:>18.1f}",
                flush=True,
            )
            results["cases"].append({"ranks": ranks, "fast": fast, "fixed": fixed, "price": price, "prices": prices})
    results["load_before"], results["load_after"] = load_before, os.getloadavg()[0]
    if any(result != fixed_results[0] for result in fixed_results):
        raise SystemExit("fixed order: losses or state_sha256 differ between numbers of ranks")
    results["fixed_state_sha256"] = fixed_results[0][1]
    print(f"fixed order: the same losses and state_sha256 {fixed_results[0][1][:16]}... at {args.ranks} ranks")
    with open(os.path.join(args.out, "results.json"), "w") as f:
        json.dump(results, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
