#!/usr/bin/env python3
"""Kills GPU workers of a running job at random moments and measures how long the job takes to mend.

    measure.py [--ranks 4 8] [--kills 20] [--without-spare 3] [--seed 1] [--out outputs/recovery_gpu]

The job is the 124M shape of experiments/train_speed (12 layers, C 768, V 50304; T 1024, global batch 64, bf16, fp32 master
weights and moments, training.deterministic), one rank a GPU, or all ranks on the GPUs there are. For each number of ranks:
communicators alone first (nccl_probe, the same number of ranks), then the job with a spare an agent, then, with
--without-spare, a few kills with none. Each job's steps are run once more undisturbed, and the two state_sha256 are compared;
--undisturbed-ranks 1 runs them on one rank, ten times as fast, which takes --set parallelism.reduce_order=fixed.
This process, not the job, sends each SIGKILL; experiments/recovery/kill_bench.py says what is measured.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "experiments/recovery"))
import kill_bench  # noqa: E402

CONFIG = "experiments/train_speed/configs/124m.toml"
REACH_MS = {(4, 1): 900, (8, 1): 1400, (4, 0): 3000, (8, 0): 3000}


def probe(build: str, ranks: int, kills: int, seed: int, out: pathlib.Path) -> dict:
    path = out / f"probe_{ranks}.json"
    subprocess.run([str(ROOT / build / "bin/nccl_probe"), "--ranks", str(ranks), "--kills", str(kills), "--seed",
                    str(seed), "--json", str(path)], check=True)
    return json.loads(path.read_text())


def kill_job(args: argparse.Namespace, ranks: int, kills: int, spares: int) -> dict:
    command = ["--ranks", str(ranks), "--kills", str(kills), "--spares", str(spares), "--config", CONFIG, "--build", args.build,
               "--seed", str(args.seed), "--window", str(args.window), "--pace-steps", str(args.pace_steps), "--mend", str(args.mend),
               "--settle", str(args.settle), "--steps", str(args.steps),
               "--undisturbed-ranks", str(args.undisturbed_ranks), *(["--eager"] if args.eager else []),
               "--out", str(pathlib.Path(args.out) / f"{ranks}_ranks_{spares}_spares")]
    for s in ["device=cuda", *args.set]:
        command += ["--set", s]
    print(f"\n== {ranks} ranks, {kills} kills, {spares or 'no'} spare{'s' if spares > 1 else ''}", flush=True)
    return kill_bench.measure(kill_bench.arguments(None).parse_args(command))


def table(results: list[dict]) -> str:
    lines = ["| ranks | spare | kills | begun, median ms | p95 | max | reach | committed, median ms | step ms | communicators alone | "
             "states equal |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        b, alone = r["begun_ms"], r.get("probe")
        lines.append(f"| {r['ranks']} | {'yes' if r['spares'] else 'no'} | {r['kills']} | {b['median']:.0f} | {b['p95']:.0f} | {b['max']:.0f} | "
                     f"{REACH_MS.get((r['ranks'], r['spares']), '')} | {r['committed_ms']['median']:.0f} | {r['step_ms']:.0f} | "
                     f"{'' if alone is None else format(alone['sum_ms']['median'], '.0f')} | {'yes' if r['digests_equal'] else 'NO'} |")
    names = list(results[0]["phases_median_ms"])
    lines += ["", "Median phases, ms:", "", "| ranks | spare | " + " | ".join(n[:-3] for n in names) + " |",
              "|---|---|" + "---|" * len(names)]
    for r in results:
        values = [r["phases_median_ms"].get(n) for n in names]
        lines.append(f"| {r['ranks']} | {'yes' if r['spares'] else 'no'} | " + " | ".join("" if v is None else f"{v:.1f}" for v in values) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--without-spare", type=int, default=3, help="kills of a job that keeps no spares; 0: none")
    parser.add_argument("--probe-kills", type=int, default=10, help="0: no probe")
    parser.add_argument("--undisturbed-ranks", type=int, default=0, help="of the runs that are left alone; 0: as many as are killed")
    parser.add_argument("--steps", type=int, default=0, help="of a job; 0: enough for its kills")
    parser.add_argument("--eager", action="store_true", help="do not wait until every rank's spare is ready again")
    parser.add_argument("--window", type=float, default=1.0, help="seconds in which a kill falls")
    parser.add_argument("--pace-steps", type=int, default=8)
    parser.add_argument("--mend", type=float, default=8.0, help="seconds from a kill until the next may come, at most")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds that the first spares take to be ready")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", default="build/cuda-release")
    parser.add_argument("--out", default="outputs/recovery_gpu")
    parser.add_argument("--set", action="append", default=[], help="key=value for all jobs")
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "experiments/train_speed/make_tokens.py"), "50304"], check=True)

    results = []
    for ranks in args.ranks:
        alone = probe(args.build, ranks, args.probe_kills, args.seed, out) if args.probe_kills else None
        for spares, kills in [(1, args.kills), (0, args.without_spare)]:
            if kills == 0:
                continue
            result = kill_job(args, ranks, kills, spares)
            results.append(dict(result, spares=spares, probe=alone))
            # After each job, so that an interrupted measurement is not lost.
            (out / "results.json").write_text(json.dumps({"command": sys.argv, "cpus": os.cpu_count(), "results": results}, indent=1) + "\n")
    text = table(results)
    (out / "table.md").write_text(text)
    print("\n" + text)
    good = all(r["digests_equal"] and r["steps_lost"] == 0 for r in results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
