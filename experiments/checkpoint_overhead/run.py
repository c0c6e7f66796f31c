#!/usr/bin/env python3
"""What a durable checkpoint every 10 steps costs: tokens/s with `checkpoint.every = 10` against 0.

    experiments/checkpoint_overhead/run.py [--steps 60] [--pairs 3] [--ranks 8] [--config FILE] [--every 10]

Both settings train the quick start's model and end with the same state; they alternate, and each pair begins with the other
one, so that what drifts on the machine falls on both. Of each run the steps from --warm-up + 1 on count: all their tokens over all their
time, by metrics.jsonl. The window holds as many checkpoints as it has multiples of --every; the last step's save is left out
of both. Prints a table and the medians; writes results.json beside this file.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = ROOT / "build/cpu-release/bin/train"


def train(args: argparse.Namespace, out: pathlib.Path, every: int) -> dict:
    command = ["mpirun", "-np", str(args.ranks), "--oversubscribe"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [str(TRAIN), str(args.config), "--out", str(out)]
    for setting in [f"training.steps={args.steps}", "training.eval_every=0", "fault.kill=[]", f"checkpoint.every={every}",
                    "checkpoint.save_last=false"]:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    window = [s for s in steps if s["step"] > args.warm_up]
    seconds = sum(s["time_metrics/end_to_end(s)"] for s in window)
    tokens = window[-1]["tokens_seen"] - steps[args.warm_up - 1]["tokens_seen"]
    events = [json.loads(line) for line in (out / "recovery.jsonl").read_text().splitlines()]
    return {
        "every": every,
        "tokens_per_s": tokens / seconds,
        "snapshot_ms": [1e3 * s["time_metrics/snapshot(s)"] for s in window if s["time_metrics/snapshot(s)"] > 0],
        "save_s": [e["seconds"] for e in events if e["event"] == "checkpoint"],
        "sha256": json.loads((out / "summary.json").read_text())["state_sha256"],
    }


def bytes_of_a_checkpoint(out: pathlib.Path) -> int:
    newest = max((out / "checkpoint").glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
    return sum(f.stat().st_size for f in newest.iterdir())


def cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5, help="steps that do not count")
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "experiments/quick_start/quick_start.toml")
    args = parser.parse_args()
    if not TRAIN.exists():
        sys.exit(f"{TRAIN} is missing: cmake --preset cpu-release && cmake --build --preset cpu-release --target train")

    load_before = os.getloadavg()[0]
    runs = []
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        for pair in range(args.pairs):
            for every in (args.every, 0) if pair % 2 == 0 else (0, args.every):
                out = pathlib.Path(folder) / f"{pair}-{every}"
                runs.append(train(args, out, every))
                if every:
                    size = bytes_of_a_checkpoint(out)
                shutil.rmtree(out)
    if len({run["sha256"] for run in runs}) != 1:
        sys.exit("the runs do not end with the same state: nothing was compared")

    saving = [r for r in runs if r["every"]]
    plain = [r for r in runs if not r["every"]]
    overheads = [100 * (p["tokens_per_s"] / s["tokens_per_s"] - 1) for s, p in zip(saving, plain)]
    print(f"{'pair':>4}  {'tokens/s, every ' + str(args.every):>20}  {'tokens/s, never':>16}  {'overhead %':>10}")
    for i, (s, p) in enumerate(zip(saving, plain)):
        print(f"{i:4}  {s['tokens_per_s']:20,.0f}  {p['tokens_per_s']:16,.0f}  {overheads[i]:10.2f}")
    snapshots = [ms for s in saving for ms in s["snapshot_ms"]]
    saves = [seconds for s in saving for seconds in s["save_s"]]
    result = {
        "overhead_percent_median": statistics.median(overheads),
        "overhead_percent_all": overheads,
        "tokens_per_s_saving": [s["tokens_per_s"] for s in saving],
        "tokens_per_s_plain": [p["tokens_per_s"] for p in plain],
        "snapshot_ms_median": statistics.median(snapshots) if snapshots else None,
        "handover_to_durable_s_median": statistics.median(saves) if saves else None,
        "checkpoint_bytes": size,
        "steps": args.steps,
        "warm_up_steps": args.warm_up,
        "every": args.every,
        "ranks": args.ranks,
        "config": str(args.config),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],  # about the number of ranks where nothing else ran
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "command": " ".join(sys.argv),
    }
    print(f"overhead: median {result['overhead_percent_median']:.2f} % of {args.pairs} pairs; {size / 1e6:.1f} MB a checkpoint")
    if snapshots:
        print(f"a rank stands still for its snapshot: median {result['snapshot_ms_median']:.2f} ms (rank 0)")
    if saves:
        print(f"handed over to durable: median {1e3 * result['handover_to_durable_s_median']:.0f} ms, training meanwhile")
    print(f"{result['cpus']} x {result['cpu']}; load average before: {load_before:.1f}")
    pathlib.Path(__file__).with_name("results.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
