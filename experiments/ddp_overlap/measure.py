#!/usr/bin/env python3
"""Tokens a second of data-parallel training with gradient buckets reduced while backward runs, and without.

    measure.py [--ranks 2] [--buckets 4M 16M 64M] [--steps N] [--build build/cuda-release] [--json FILE] [--seconds S]
    measure.py --table FILE                        prints the table of results that are there

The job is the 124M shape of experiments/train_speed on `--ranks` GPUs. For each comm.bucket_bytes, comm.overlap on and off: `train`
makes --steps steps; shown is the median of those after the first --warm-up. One more step is traced: the time of NCCL's kernels on
rank 0's GPU, how much of it other kernels hide, and what is exposed. A bucket's two runs must end with the same loss.
Where ranks share a GPU they take turns on it and talk over the loopback device: few steps are made then, and the table says that it
says nothing about real links. Results are written after each run; exit code 1 if a run is missing or two losses differ.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "experiments/train_speed"))
import timed_run  # noqa: E402

CONFIG = ROOT / "experiments/train_speed/configs/124m.toml"
KEPT = ("step_ms", "least_step_ms", "most_step_ms", "tokens_per_second", "nccl_ms", "hidden_percent", "exposed_ms", "loss")


def size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    value = int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def run(args: argparse.Namespace, bucket: int, overlap: bool, seconds: float) -> dict:
    # As where ranks have a GPU each: with fewer sums in the queue the host would wait in the middle of backward.
    sets = ["comm.max_queued=8", f"comm.bucket_bytes={bucket}", f"comm.first_bucket_bytes={min(bucket, 1 << 20)}",
            f"comm.overlap={'true' if overlap else 'false'}"]
    out = pathlib.Path(args.out) / f"bucket_{bucket}_{'on' if overlap else 'off'}"
    result = timed_run.timed_run(CONFIG, out, ranks=args.ranks, steps=args.steps, warm_up=args.warm_up, build=args.build,
                                 sets=sets + args.set, batch=args.batch, seconds=seconds)
    row = {name: round(result[name], 2) if name != "loss" and result[name] is not None else result[name] for name in KEPT}
    return {"bucket_bytes": bucket, "overlap": overlap, **row, "ranks_share_a_gpu": result["ranks_share_a_gpu"]}


def unequal_losses(rows: list[dict]) -> list[str]:
    """When a bucket is summed may not change what the sum is."""
    losses = {}
    for row in rows:
        losses.setdefault(row["bucket_bytes"], set()).add(row["loss"])
    return [f"buckets of {bucket} B: losses {' and '.join(map(repr, sorted(found)))}" for bucket, found in losses.items() if len(found) > 1]


def table(results: dict) -> str:
    lines = ["| bucket | overlap | step ms | least to most | tokens/s | NCCL ms | hidden % | exposed ms |", "|---|---|---|---|---|---|---|---|"]
    for r in sorted(results["rows"], key=lambda r: (r["bucket_bytes"], not r["overlap"])):
        bucket = f"{r['bucket_bytes'] / (1 << 20):g} MiB"
        hidden = "" if r["hidden_percent"] is None else f"{r['hidden_percent']:.0f}"
        lines.append(f"| {bucket} | {'on' if r['overlap'] else 'off'} | {r['step_ms']:.1f} | {r['least_step_ms']:.1f} to {r['most_step_ms']:.1f} | "
                     f"{r['tokens_per_second']:,.0f} | {r['nccl_ms']:.1f} | {hidden} | {r['exposed_ms']:.1f} |")
    text = "\n".join(lines) + "\n"
    if any(r["ranks_share_a_gpu"] for r in results["rows"]):
        text += f"\n{results['ranks']} ranks took turns on fewer GPUs: these numbers say nothing about ranks with a GPU each.\n"
    for what in results["left_out"]:
        text += f"\nLeft out: {what}\n"
    for what in unequal_losses(results["rows"]):
        text += f"\nWRONG: {what}\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--buckets", type=size, nargs="+", default=[4 << 20, 16 << 20, 64 << 20])
    parser.add_argument("--steps", type=int, default=0, help="0: 25, and 6 where ranks share a GPU")
    parser.add_argument("--warm-up", type=int, default=0, help="of them, not timed; 0: 5, and 2 where ranks share a GPU")
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    parser.add_argument("--seconds", type=float, default=600, help="of all runs together; what has no time left is left out")
    parser.add_argument("--build", default="build/cuda-release")
    parser.add_argument("--out", default="outputs/ddp_overlap", help="folder of the runs")
    parser.add_argument("--json", help="results; default: results/RANKS_ranks_GPUS_gpus.json beside this program")
    parser.add_argument("--set", action="append", default=[], help="key=value for all runs")
    parser.add_argument("--table", metavar="FILE", help="print this file's table, run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(pathlib.Path(args.table).read_text())), end="")
        return 0
    found = timed_run.gpus()
    if not found:
        print("nvidia-smi names no GPU", file=sys.stderr)
        return 2
    shared = args.ranks > len(found)
    args.steps = args.steps or (6 if shared else 25)
    args.warm_up = args.warm_up or (2 if shared else 5)
    if args.ranks < 2 or args.warm_up >= args.steps:
        print("at least 2 ranks, and more --steps than --warm-up", file=sys.stderr)
        return 2
    used = min(args.ranks, len(found))
    path = pathlib.Path(args.json or HERE / f"results/{args.ranks}_ranks_{used}_gpu{'s' if used > 1 else ''}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "experiments/train_speed/make_tokens.py"), "50304"], check=True, stdout=subprocess.DEVNULL)
    results = {"machine": found[:used], "ranks": args.ranks, "batch": args.batch, "steps": args.steps, "warm_up": args.warm_up,
               "set": args.set, "rows": [], "left_out": []}
    for i, bucket in enumerate(args.buckets):
        # By turns, so that what changes with time meets both.
        for overlap in (True, False) if i % 2 == 0 else (False, True):
            name = f"{bucket} B, overlap {'on' if overlap else 'off'}"
            left = args.seconds - (time.monotonic() - began)
            try:
                if left < 5:
                    raise timed_run.Failed("no time left")
                row = run(args, bucket, overlap, left)
                results["rows"].append(row)
                print(f"{name}: {row['step_ms']:.1f} ms, {row['tokens_per_second']:,.0f} tokens/s", flush=True)
            except timed_run.Failed as failure:
                results["left_out"].append(f"{name}: {failure}".split(" (see ")[0].replace(f"{ROOT}/", ""))
                print(f"{name}: {failure}", flush=True)
            results["seconds"] = round(time.monotonic() - began, 1)
            path.write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + table(json.loads(path.read_text())), end="")
    return 1 if results["left_out"] or unequal_losses(results["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
