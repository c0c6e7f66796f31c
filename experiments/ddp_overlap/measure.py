#!/usr/bin/env python3
"""Tokens a second of data-parallel training with gradient buckets reduced while backward runs, and without.

    measure.py [--ranks 2] [--buckets 1M 4M 16M 64M] [--steps 25] [--build build/cuda-release] [--out outputs/ddp_overlap]

The job is the 124M shape of experiments/train_speed on `--ranks` GPUs. For each comm.bucket_bytes, comm.overlap on and off: `train`
makes --steps steps; shown is the median tokens/s of those after the first --warm-up. One more step is traced: the time of NCCL's
kernels on rank 0's GPU, how much of it other kernels hide, and what is exposed. Where ranks share a GPU they take turns on it and
talk over the loopback device: the table then says nothing about real links, and says so.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "experiments/train_speed/configs/124m.toml"


def size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def run(args: argparse.Namespace, bucket: int, overlap: bool) -> dict:
    out = pathlib.Path(args.out) / f"bucket_{bucket}_{'on' if overlap else 'off'}"
    shutil.rmtree(out, ignore_errors=True)
    command = ["mpirun", "-np", str(args.ranks), "--oversubscribe"] + (["--allow-run-as-root"] if os.getuid() == 0 else [])
    command += [str(ROOT / args.build / "bin/train"), str(CONFIG), "--out", str(out), "--set", "device=cuda"]
    # The last step is traced, and not among those that are timed.
    for s in [f"training.steps={args.steps + 1}", f"metrics.trace_steps=[{args.steps + 1}]", f"comm.bucket_bytes={bucket}", f"comm.first_bucket_bytes={min(bucket, 1 << 20)}",
              f"comm.overlap={'true' if overlap else 'false'}", *args.set]:
        command += ["--set", s]
    with open(f"{out}.output", "w") as output:
        if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
            raise SystemExit(f"a run failed: see {out}.output")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][args.warm_up:args.steps]
    seconds = statistics.median(l["time_metrics/end_to_end(s)"] for l in lines)
    shared = "ranks share" in pathlib.Path(f"{out}.output").read_text()
    profile = json.loads((out / "trace/rank-0-profile.json").read_text())
    nccl_ms, exposed_ms = profile["nccl_ms"], profile["nccl_exposed_ms"]
    return {"bucket_bytes": bucket, "overlap": overlap, "tokens_per_second": 64 * 1024 / seconds, "step_ms": seconds * 1e3,
            "nccl_ms": nccl_ms, "exposed_ms": exposed_ms, "hidden_percent": 100 * (1 - exposed_ms / nccl_ms) if nccl_ms else None,
            "ranks_share_a_gpu": shared, "command": command}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--buckets", type=size, nargs="+", default=[1 << 20, 4 << 20, 16 << 20, 64 << 20])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=5, help="of them, not timed")
    parser.add_argument("--build", default="build/cuda-release")
    parser.add_argument("--out", default="outputs/ddp_overlap")
    parser.add_argument("--set", action="append", default=[], help="key=value for all runs")
    args = parser.parse_args()
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "experiments/train_speed/make_tokens.py"), "50304"], check=True)
    results = []
    print(f"{'bucket':>12} {'overlap':>8} {'step ms':>10} {'tokens/s':>10} {'NCCL ms':>10} {'hidden %':>9} {'exposed ms':>11}", flush=True)
    for bucket in args.buckets:
        for overlap in (True, False):
            r = run(args, bucket, overlap)
            results.append(r)
            print(f"{bucket:>12} {'on' if overlap else 'off':>8} {r['step_ms']:>10.1f} {r['tokens_per_second']:>10.0f} "
                  f"{r['nccl_ms']:>10.1f} {r['hidden_percent'] or 0:>9.0f} {r['exposed_ms']:>11.1f}", flush=True)
    if any(r["ranks_share_a_gpu"] for r in results):
        print(f"{args.ranks} ranks took turns on fewer GPUs: these numbers say nothing about ranks with a GPU each")
    (pathlib.Path(args.out) / "results.json").write_text(json.dumps({"ranks": args.ranks, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
