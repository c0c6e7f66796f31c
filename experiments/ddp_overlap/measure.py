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
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "experiments/train_speed"))
import timed_run  # noqa: E402

CONFIG = ROOT / "experiments/train_speed/configs/124m.toml"


def size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def run(args: argparse.Namespace, bucket: int, overlap: bool) -> dict:
    sets = [f"comm.bucket_bytes={bucket}", f"comm.first_bucket_bytes={min(bucket, 1 << 20)}", f"comm.overlap={'true' if overlap else 'false'}"]
    out = pathlib.Path(args.out) / f"bucket_{bucket}_{'on' if overlap else 'off'}"
    result = timed_run.timed_run(CONFIG, out, ranks=args.ranks, steps=args.steps, warm_up=args.warm_up, build=args.build,
                                 sets=sets + args.set)
    return {"bucket_bytes": bucket, "overlap": overlap, **result}


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
            try:
                r = run(args, bucket, overlap)
            except timed_run.Failed as failure:
                raise SystemExit(f"a run failed: {failure}")
            results.append(r)
            print(f"{bucket:>12} {'on' if overlap else 'off':>8} {r['step_ms']:>10.1f} {r['tokens_per_second']:>10.0f} "
                  f"{r['nccl_ms']:>10.1f} {r['hidden_percent'] or 0:>9.0f} {r['exposed_ms']:>11.1f}", flush=True)
    if any(r["ranks_share_a_gpu"] for r in results):
        print(f"{args.ranks} ranks took turns on fewer GPUs: these numbers say nothing about ranks with a GPU each")
    (pathlib.Path(args.out) / "results.json").write_text(json.dumps({"ranks": args.ranks, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
