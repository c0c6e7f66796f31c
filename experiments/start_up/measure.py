#!/usr/bin/env python3
"""Seconds from the start of `mpirun` to the first step of the quick start's job.

    experiments/start_up/measure.py [--runs 10] [--ranks 8] [--build build/cpu-release]

t0 is CLOCK_MONOTONIC just before mpirun is started. `done` is the moment at which the line of step 1 arrives in this
process's pipe; `begun` is that less the step's own duration by metrics.jsonl, so that all of mpirun, agents, workers, the
exchange of addresses, the memory and the weights lies before it, and printing and the pipe count, too. A run makes two
steps and saves nothing; one run that is not counted warms the page cache. Prints a table; writes results.json beside
this file, with the machine's load before and after.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def start(args: argparse.Namespace, out: pathlib.Path) -> dict:
    command = ["mpirun", "-np", str(args.ranks), "--oversubscribe"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [str(ROOT / args.build / "bin/train"), str(ROOT / args.config), "--out", str(out)]
    for setting in ["training.steps=2", "training.eval_every=0", "lr_scheduler.warmup_steps=1", "fault.kill=[]",
                    "checkpoint.every=0", "checkpoint.save_last=false"]:
        command += ["--set", setting]
    t0 = time.monotonic()
    done = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            if done is None and line.startswith("step: 1/"):
                done = time.monotonic() - t0
    if job.returncode != 0 or done is None:
        sys.exit(f"{' '.join(command)} ended with {job.returncode}")
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    return {"begun_s": done - first["time_metrics/end_to_end(s)"], "done_s": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--config", default="experiments/quick_start/quick_start.toml", help="from the root")
    parser.add_argument("--build", default="build/cpu-release")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        runs = [start(args, pathlib.Path(scratch) / f"run-{i}") for i in range(args.runs + 1)][1:]
    print(f"{args.ranks} ranks, {len(runs)} runs   median      max")
    for key, what in (("begun_s", "first step begun"), ("done_s", "first step done")):
        values = [run[key] for run in runs]
        print(f"  {what:<18} {statistics.median(values):8.2f} s {max(values):6.2f} s")
    result = {"command": "experiments/start_up/measure.py", "ranks": args.ranks, "cores": os.cpu_count(), "runs": runs,
              "load_before": load_before, "load_after": os.getloadavg()[0]}
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
