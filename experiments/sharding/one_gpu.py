#!/usr/bin/env python3
"""One rank on one GPU in every mode: what the machinery of sharding costs where there is nobody to share with.

    one_gpu.py [--bin build/cuda-release/bin] [--out outputs/sharding] [--shapes 124m 1b] [--modes ddp zero1 zero2 zero3]
               [--rounds 2] [--steps 24]

Trains the shapes of experiments/train_speed by `train` itself, the modes as they are listed, --rounds times. A run's speed is that of the
median of its steps after the first 5, by metrics.jsonl; a mode's is the median of its runs. Memory is what the program planned and
what it used of the device. The modes must end with the same bits of weights and moments. Writes one_gpu.json and one_gpu.md.
To reach: zero3 at least 0.98 of ddp's tokens/s.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
SPEED = HERE.parent / "train_speed"
WARM_UP, TARGET = 5, 0.98


def train(args, shape, mode, folder):
    out = pathlib.Path(folder) / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [str(pathlib.Path(args.bin) / "train"), str(SPEED / "configs" / f"{shape}.toml"), "--out", str(out)]
    for assignment in [f"training.steps={args.steps}", f"parallelism.mode={mode}", "checkpoint.every=0",
                       "checkpoint.save_last=false", "device=cuda"]:
        command += ["--set", assignment]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    summary = json.loads((out / "summary.json").read_text())
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    step_s = statistics.median(s["time_metrics/end_to_end(s)"] for s in steps[WARM_UP:])
    config = tomllib.loads((SPEED / "configs" / f"{shape}.toml").read_text())["training"]
    return {"step_ms": step_s * 1e3, "tokens_per_second": config["global_batch_size"] * config["seq_len"] / step_s,
            "planned_bytes": summary["planned_device_bytes"], "used_bytes": summary["used_device_bytes"],
            "state_sha256": summary["state_sha256"]}


def row(mode, runs, base):
    speed = statistics.median(r["tokens_per_second"] for r in runs)
    share = "" if base is None else f"{speed / base:.3f}"
    return (f"| {mode} | {speed:,.0f} | {share} | {', '.join(format(r['tokens_per_second'], ',.0f') for r in runs)} "
            f"| {runs[0]['used_bytes'] / 2**20:,.0f} | {runs[0]['planned_bytes'] / 2**20:,.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/cuda-release/bin")
    parser.add_argument("--out", default="outputs/sharding")
    parser.add_argument("--shapes", nargs="+", default=["124m", "1b"])
    parser.add_argument("--modes", nargs="+", default=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results, text, missed = {}, f"{gpu}, one rank; bf16, fp32 master weights and moments\n", False
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            vocabulary = tomllib.loads((SPEED / "configs" / f"{shape}.toml").read_text())["model"]["vocab_size"]
            subprocess.run([sys.executable, SPEED / "make_tokens.py", str(vocabulary)], check=True, stdout=subprocess.DEVNULL)
            runs = results[shape] = {mode: [] for mode in args.modes}
            for _ in range(args.rounds):
                for mode in args.modes:
                    runs[mode].append(train(args, shape, mode, folder))
            digests = {r["state_sha256"] for of_mode in runs.values() for r in of_mode}
            text += f"\n{shape}:\n\n| mode | tokens/s | of {args.modes[0]} | each run | used MiB | planned MiB |\n|---|---|---|---|---|---|\n"
            base = statistics.median(r["tokens_per_second"] for r in runs[args.modes[0]])
            for mode in runs:
                text += row(mode, runs[mode], base) + "\n"
                slow = statistics.median(r["tokens_per_second"] for r in runs[mode]) < TARGET * base
                missed |= slow and mode == "zero3" and args.modes[0] == "ddp"
            text += f"\nThe state after {args.steps} steps: {'the same bits in all runs' if len(digests) == 1 else 'DIFFERS: ' + ', '.join(sorted(digests))}\n"
            (out / "one_gpu.json").write_text(json.dumps({"gpu": gpu, "steps": args.steps, "runs": results}, indent=1) + "\n")
            (out / "one_gpu.md").write_text(text)
    print(text + ("zero3 below 0.98 of ddp: MISSED\n" if missed else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
