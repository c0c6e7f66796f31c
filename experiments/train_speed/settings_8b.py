#!/usr/bin/env python3
"""Llama 3 8B whole on one GPU, with settings that make it fit: tokens/s, and the memory planned and used.

  settings_8b.py [--bin build/cuda-release/bin] [--steps 5] [--warm-up 2] [--only NAME ...] [--json FILE]

`train` runs configs/8b_full.toml on random tokens (make_tokens.py) with each setting; the first steps warm up (the second
is recorded), the median of the others counts, from the end of one step to the end of the next. Then it is ended by
SIGKILL: nobody wants its state. planned: total of the plan that it prints; used: what the device's free memory has
fallen by, as in metrics.jsonl. start: from the start of the program to the end of its first step.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SETTINGS = {
    "bf16 moments": [],
    "bf16 moments, offloaded": ["optimizer.offload=true", 'training.recompute="none"'],
    "bf16 moments, block": ['training.recompute="block"'],
    "bf16 moments, offloaded, batch 1": ["optimizer.offload=true", 'training.recompute="none"', "training.global_batch_size=1"],
}


def read_steps(path):
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def await_free_device():
    """The worker ends after its agent, and tearing down what it holds takes seconds."""
    deadline = time.monotonic() + 60
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while time.monotonic() < deadline:
        used = subprocess.run(query, capture_output=True, text=True).stdout.split()
        if used and float(used[0]) < 4096:
            return
        time.sleep(0.5)


def run(args, name, folder):
    out, log = os.path.join(folder, "run"), os.path.join(folder, "output")
    command = [os.path.join(args.bin, "train"), os.path.join(HERE, "configs/8b_full.toml"), "--out", out, "--set", "device=cuda"]
    for assignment in [f"training.steps={args.steps + 1}", *SETTINGS[name]]:
        command += ["--set", assignment]
    began = time.monotonic()
    first = None
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            while process.poll() is None and time.monotonic() - began < args.limit:
                done = len(read_steps(os.path.join(out, "metrics.jsonl")))
                first = first or (time.monotonic() - began if done > 0 else None)
                if done >= args.steps:
                    break
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            await_free_device()
    text = open(log, errors="replace").read()
    steps = read_steps(os.path.join(out, "metrics.jsonl"))
    if len(steps) <= args.warm_up:
        return {"setting": name, "error": text.strip()[-600:] or "no step in time", "steps": len(steps)}
    # The agent prints what it knows first, the worker the whole plan.
    planned, host = (re.findall(rf"total, {place}\s+[\d.]+ MiB\s+(\d+) bytes", text) for place in ("GPU", "host"))
    timed = steps[args.warm_up:args.steps]
    return {
        "setting": name,
        "set": SETTINGS[name],
        "tokens_per_second": statistics.median(s["throughput(tps)"] for s in timed),
        "step_s": statistics.median(s["time_metrics/end_to_end(s)"] for s in timed),
        "mfu_percent": statistics.median(s.get("mfu(%)", 0) for s in timed),
        "planned_gib": int(planned[-1]) / 2**30 if planned else None,
        "used_gib": timed[-1]["memory/max_active(GiB)"],
        "host_gib": int(host[-1]) / 2**30 if host else None,
        "start_s": first,
        "losses": [s["loss_metrics/global_avg_loss"] for s in steps],
        "steps": len(steps),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.path.join(ROOT, "build/cuda-release/bin"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds of a setting")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--json")
    args = parser.parse_args()
    subprocess.run([sys.executable, os.path.join(HERE, "make_tokens.py"), "128256"], check=True, stdout=subprocess.DEVNULL)
    results = []
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(args, name, folder))
        r = results[-1]
        if "error" in r:
            print(f"{name}: FAILED after {r['steps']} steps: {r['error']}", flush=True)
            continue
        off = 100 * (r["used_gib"] / r["planned_gib"] - 1) if r["planned_gib"] else float("nan")
        print(f"{name:34s} {r['tokens_per_second']:8.0f} tok/s {r['step_s']:7.3f} s a step, MFU {r['mfu_percent']:4.1f} %, GPU "
              f"{r['used_gib']:6.2f} GiB used, {r['planned_gib'] or 0:6.2f} planned ({off:+.2f} %), host {r['host_gib'] or 0:5.1f} GiB, "
              f"start {r['start_s']:4.1f} s, loss {r['losses'][0]:.4f} ... {r['losses'][-1]:.4f}", flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(results, f, indent=1)
    sys.exit(any("error" in r for r in results))


if __name__ == "__main__":
    main()
