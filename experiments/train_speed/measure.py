#!/usr/bin/env python3
"""Training speed on one GPU: `train` against PyTorch, on the same shapes, in one call; run.sh builds and calls this.

  measure.py [--shape 124m 1b xl 8b_slice ...] [--bin build/cuda-release/bin] [--results DIR]
             [--ours deterministic fast] [--peer compile eager] [--skip-check]

Before anything is timed, check_gradients.py holds our gradients against PyTorch's. Then each shape of configs/ is
trained on random tokens by `train` itself, with its agent, metrics and all: 5 steps warm up, the median of 20 counts.
A step's time is that of metrics.jsonl, from the end of one step to the end of the next, the device included: its loss
is the device's. `train` is then ended by SIGKILL; nobody wants its checkpoint. PyTorch's side is pytorch_peer.py, by
the same rules. Every loss must be finite and the first that of fresh weights.
  MFU: the full-attention rule, 6 N' + 12 L C T FLOPs a token, over 989.4 TFLOP/s dense.
  floor: tokens/s of a step that is nothing but its matrix products at cuBLAS's rate, its attention at cuDNN's and the
  rest at the speed of a copy, as measured on one H200 (README.md). memory: of the whole device, while training.
  first: seconds from the start of the program to the end of the first step within 10 % of the median.
Prints a table, and writes one JSON file a shape.
"""

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
WARM_UP = 5
FLOOR = {"124m": 682e3, "1b": 69.6e3, "xl": 56.9e3, "8b_slice": 38.5e3}  # tokens/s, H200
SHAPES = ["124m", "1b", "xl", "8b_slice"]


def nvidia_smi(*fields):
    """One line a device, or nothing without a driver."""
    try:
        out = subprocess.run(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return out.stdout.strip() if out.returncode == 0 else ""


def device_memory_gib():
    used = nvidia_smi("memory.used")
    return float(used.split()[0]) / 1024 if used else None


def first_loss(model):
    """Of fresh weights: normed activations times weights of deviation 0.02 make normal logits of variance C 0.02^2."""
    return math.log(model["vocab_size"]) + model["dim"] * 0.02**2 / 2


def read_steps(path):
    steps = []
    if os.path.exists(path):
        with open(path) as f:
            for line in f:
                try:
                    value = json.loads(line)
                except ValueError:
                    break  # the last line, still being written
                steps.append(value)
    return steps


def ours(args, name, config, deterministic, folder):
    out = os.path.join(folder, "run")
    wanted = WARM_UP + args.steps
    command = [os.path.join(args.bin, "train"), os.path.join(HERE, "configs", name + ".toml"), "--out", out,
               "--set", "device=cuda", "--set", f"training.steps={max(wanted + 20, 1000)}",
               "--set", f"training.deterministic={'true' if deterministic else 'false'}", "--set", "checkpoint.save_last=false"]
    for assignment in args.set:
        command += ["--set", assignment]
    metrics = os.path.join(out, "metrics.jsonl")
    log = open(os.path.join(folder, "train.log"), "w+")
    begin = time.monotonic()
    arrivals, memory = {}, None  # step: seconds after the start
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() - begin < args.limit:
            now = time.monotonic() - begin
            for value in read_steps(metrics)[len(arrivals):]:
                arrivals[value["step"]] = now
            if len(arrivals) >= WARM_UP and memory is None:
                memory = device_memory_gib()
            if len(arrivals) >= wanted:
                break
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    steps = read_steps(metrics)
    if len(steps) < wanted:
        log.seek(0)
        return {"failed": f"{len(steps)} steps of {wanted} in {time.monotonic() - begin:.0f} s; " + " | ".join(log.read().strip().splitlines()[-4:])}
    losses = [s["loss_metrics/global_avg_loss"] for s in steps[:wanted]]
    if not all(x is not None and math.isfinite(x) for x in losses) or abs(losses[0] - first_loss(config["model"])) > 0.1:
        return {"failed": f"losses {losses[:3]} ... {losses[-1]}"}
    times = [s["time_metrics/end_to_end(s)"] for s in steps[:wanted]]
    median = statistics.median(times[WARM_UP:])
    first = next(s["step"] for s, t in zip(steps, times) if t < 1.1 * median)
    tokens = config["training"]["global_batch_size"] * config["training"]["seq_len"]
    speed = tokens / median
    # The program's own count of FLOPs a token.
    flops_per_token = steps[-1]["tflops"] * 1e12 / steps[-1]["throughput(tps)"]
    return {"program": "kintsugi", "mode": "deterministic" if deterministic else "fast", "step_ms": median * 1e3,
            "fastest_ms": min(times[WARM_UP:]) * 1e3, "tokens_per_second": speed,
            "mfu_percent": 100 * speed * flops_per_token * 1e-12 / config["metrics"]["peak_tflops"],
            "device_memory_gib": memory, "first_full_speed_s": arrivals[first], "losses": [losses[0], losses[-1]]}


def peer(args, name, mode, folder):
    path = os.path.join(folder, "peer.json")
    command = [args.python, os.path.join(HERE, "pytorch_peer.py"), os.path.join(HERE, "configs", name + ".toml"), "--mode", mode,
               "--steps", str(args.steps), "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        return {"failed": " | ".join(done.stderr.strip().splitlines()[-3:])}
    with open(path) as f:
        return json.load(f)


def row(name, result, floor):
    if "failed" in result:
        return f"{name:<12}{result['failed'][:300]}"
    share = f"{100 * result['tokens_per_second'] / floor:6.1f} %" if floor else "       -"
    memory = result["device_memory_gib"]
    note = f"  (micro-batch {result['micro_batch']})" if result.get("micro_batch", 0) != result.get("batch", 0) else ""
    return (f"{name:<12}{result['program'] + ' ' + result['mode']:<26}{result['step_ms']:>9.2f} ms{result['tokens_per_second']:>12,.0f} tok/s"
            f"{result['mfu_percent']:>7.1f} %{share}{memory or 0:>9.1f} GiB{result['first_full_speed_s']:>8.1f} s{note}")


def machine():
    return {"gpu": nvidia_smi("name", "driver_version"), "cpus": os.cpu_count(), "system": platform.platform(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(f[:-5] for f in os.listdir(os.path.join(HERE, "configs")))
    parser.add_argument("--shape", nargs="+", default=SHAPES, choices=known)
    parser.add_argument("--bin", default=os.path.join(ROOT, "build/cuda-release/bin"))
    parser.add_argument("--results", default=os.path.join(HERE, "results"))
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--ours", nargs="*", default=["deterministic", "fast"], choices=["deterministic", "fast"])
    parser.add_argument("--peer", nargs="*", default=["compile", "eager"], choices=["compile", "eager"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=120, help="seconds that one training may take")
    parser.add_argument("--set", action="append", default=[], help="for train")
    parser.add_argument("--skip-check", action="store_true")
    args = parser.parse_args()
    if args.ours and not args.skip_check:
        check = [args.python, os.path.join(HERE, "check_gradients.py"), "--program", os.path.join(args.bin, "gradient_dump")]
        if subprocess.run(check).returncode != 0:
            sys.exit("the gradients are wrong; nothing was timed")
    here = machine()
    os.makedirs(args.results, exist_ok=True)
    print(f"{here['gpu']}; median of {args.steps} steps after {WARM_UP}; MFU by 6 N' + 12 L C T over 989.4 TFLOP/s")
    print(f"{'shape':<12}{'program':<26}{'step':>12}{'speed':>18}{'MFU':>9}{'floor':>8}{'memory':>13}{'first':>10}", flush=True)
    for name in args.shape:
        with open(os.path.join(HERE, "configs", name + ".toml"), "rb") as f:
            config = tomllib.load(f)
        subprocess.run([sys.executable, os.path.join(HERE, "make_tokens.py"), str(config["model"]["vocab_size"])], check=True,
                       stdout=subprocess.DEVNULL)
        results = []
        for kind in args.ours + args.peer:
            with tempfile.TemporaryDirectory() as folder:
                result = peer(args, name, kind, folder) if kind in ("compile", "eager") else ours(args, name, config, kind == "deterministic", folder)
            results.append(result)
            print(row(name, result, FLOOR.get(name)), flush=True)
        with open(os.path.join(args.results, name + ".json"), "w") as f:
            json.dump({"shape": name, "machine": here, "steps": args.steps, "floor_tokens_per_second": FLOOR.get(name),
                       "command": " ".join(sys.argv), "results": results}, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
