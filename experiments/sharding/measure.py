#!/usr/bin/env python3
"""Every parallel mode at every world size: memory by kind, tokens/s, traffic and overlap, beside PyTorch over gloo.

    measure.py [--python PYTHON_WITH_TORCH] [--build build/cpu-release] [--out outputs/sharding] [--worlds 1 2 3 4 6 8]
               [--rounds 2] [--steps 8] [--budget 400]

Runs sharding_bench (see its head for what it measures) for ddp, zero1, zero2, zero3 and hybrid zero3 at each world size, each with and
without overlap of communication and computation. At the largest ddp, zero3, PyTorch's DistributedDataParallel and its FSDP2 take turns, --rounds times, and the
medians of the rounds are compared, so that whatever else the machine does falls on all of them. Writes results.json, table.md and
plots (speed.svg, memory.svg, traffic.svg). --budget: seconds after which no further run starts; what was left out is said.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import plots

HERE = pathlib.Path(__file__).resolve().parent
PEER = HERE.parent / "train_speed_cpu/pytorch_bench.py"
KINDS = ["weights", "gathered weights", "gradients", "moments", "activations", "vote"]


def read_json(command, path):
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return json.loads(path.read_text())


class Runner:
    def __init__(self, args):
        self.args, self.out, self.began, self.left_out = args, pathlib.Path(args.out), time.monotonic(), []
        self.out.mkdir(parents=True, exist_ok=True)

    def late(self, what):
        if time.monotonic() - self.began < self.args.budget:
            return False
        self.left_out.append(what)
        return True

    def ours(self, name, ranks, steps=None, flags=()):
        mode, _, shard = name.partition(" ")
        path = self.out / "run.json"
        command = [pathlib.Path(self.args.build) / "bin/sharding_bench", "--mode", mode, "--ranks", str(ranks), "--json", path,
                   "--steps", str(steps or self.args.steps)]
        if shard.startswith("hybrid"):
            command += ["--shard", str(ranks // 2)]
        return read_json(command + list(flags), path)

    def peer(self, fsdp, ranks):
        path = self.out / "peer.json"
        command = [self.args.python, PEER, "--ranks", str(ranks), "--steps", str(self.args.peer_steps), "--json", path]
        return read_json(command + (["--fsdp"] if fsdp else []), path)


def check(runs):
    """The same training everywhere: losses of one world size agree to what another order of summation changes."""
    for ranks in {r["ranks"] for r in runs}:
        losses = [r["last_loss"] for r in runs if r["ranks"] == ranks]
        if max(losses) - min(losses) > 1e-3 * max(losses):
            raise SystemExit(f"{ranks} ranks: modes end with losses {losses}")


def head_to_head(runner, ranks):
    """The largest world, in turns: tokens/s by case."""
    cases = {"Kintsugi ddp": lambda: runner.ours("ddp", ranks), "Kintsugi zero3": lambda: runner.ours("zero3", ranks)}
    if runner.args.python:
        cases["PyTorch DDP, gloo"] = lambda: runner.peer(False, ranks)
        cases["PyTorch FSDP2, gloo"] = lambda: runner.peer(True, ranks)
    speeds = {name: [] for name in cases}
    for round_number in range(runner.args.rounds):
        for name, run in cases.items():
            if not runner.late(f"{name}, round {round_number + 1}"):
                speeds[name].append(run()["tokens_per_second"])
    return speeds


def table(runs, speeds, ranks):
    lines = [f"| mode | ranks | tokens/s | step ms | in communication ms | update ms | without overlap: step ms | in communication ms "
             f"| {' | '.join(k + ' MB' for k in KINDS[:4])} | sent a step and rank MB |", "|---|---|---|---|---|---|---|---|" + "---|" * 5]
    for r in runs:
        sent = sum(v for k, v in r["traffic"].items() if k.endswith("_bytes"))
        memory = " | ".join(f"{r['memory_bytes'][k] / 1e6:.2f}" for k in KINDS[:4])
        plain = r.get("without_overlap")
        without = f"{plain['step_ms']:.1f} | {plain['communication_ms']:.1f}" if plain else "- | -"
        lines.append(f"| {r['name']} | {r['ranks']} | {r['tokens_per_second']:,.0f} | {r['step_ms']:.1f} | {r['communication_ms']:.1f} | {r['update_ms']:.1f} "
                     f"| {without} | {memory} | {sent / 1e6:.2f} |")
    lines += ["", f"{ranks} ranks, in turns:", "", "| | tokens/s, median | of all rounds |", "|---|---|---|"]
    medians = {name: statistics.median(values) for name, values in speeds.items() if values}
    for name, median in medians.items():
        lines.append(f"| {name} | {median:,.0f} | {', '.join(f'{v:,.0f}' for v in speeds[name])} |")
    ratios = [("zero3 / ddp", "Kintsugi zero3", "Kintsugi ddp", 0.85), ("zero3 / PyTorch FSDP2", "Kintsugi zero3", "PyTorch FSDP2, gloo", 2.0)]
    lines.append("")
    for what, a, b, target in ratios:
        if a in medians and b in medians:
            ratio = medians[a] / medians[b]
            lines.append(f"{what}: {ratio:.2f} (to reach: {target}{'' if ratio >= target else ', MISSED'})")
    return "\n".join(lines) + "\n"


def draw(runner, runs):
    worlds = sorted({r["ranks"] for r in runs})
    names = list(dict.fromkeys(r["name"] for r in runs))
    at = {(r["name"], r["ranks"]): r for r in runs}
    series = {n: [at[n, w]["tokens_per_second"] if (n, w) in at else None for w in worlds] for n in names}
    plots.grouped_bars(runner.out / "speed.svg", "Tokens a second", [f"{w} ranks" for w in worlds], series, "tokens/s")
    labels = [f"{n}, {worlds[-1]}" for n in names if (n, worlds[-1]) in at]
    chosen = [at[n, worlds[-1]] for n in names if (n, worlds[-1]) in at]
    memory = {k: [r["memory_bytes"][k] / 1e6 for r in chosen] for k in KINDS[:4]}
    plots.stacked_bars(runner.out / "memory.svg", f"Memory of a rank, {worlds[-1]} ranks, without activations", labels, memory, "MB")
    kinds = ["all_gather_bytes", "reduce_scatter_bytes", "all_reduce_bytes", "all_to_all_bytes"]
    traffic = {k[:-6].replace("_", "-"): [r["traffic"][k] / 1e6 for r in chosen] for k in kinds}
    plots.stacked_bars(runner.out / "traffic.svg", f"Given to collectives by a rank in a step, {worlds[-1]} ranks", labels, traffic, "MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python with torch; without it there are no peers")
    parser.add_argument("--build", default="build/cpu-release")
    parser.add_argument("--out", default="outputs/sharding")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--budget", type=float, default=400)
    args = parser.parse_args()
    runner = Runner(args)
    largest = max(args.worlds)
    load = os.getloadavg()[0]
    # First what has a target.
    speeds = head_to_head(runner, largest)
    runs = []
    for ranks in sorted(args.worlds, reverse=True):
        names = ["ddp", "zero1", "zero2", "zero3"] + (["zero3 hybrid"] if ranks >= 4 else [])
        for name in names:
            if runner.late(f"{name} at {ranks} ranks"):
                continue
            steps = max(3, args.steps // 2)
            runs.append({"name": name, **runner.ours(name, ranks, steps)})
            if ranks > 1 and not runner.late(f"{name} without overlap at {ranks} ranks"):
                runs[-1]["without_overlap"] = runner.ours(name, ranks, steps, ["--no_overlap"])
    runs.reverse()
    check(runs)
    text = table(runs, speeds, largest)
    if runner.left_out:
        text += "\nLeft out for time: " + "; ".join(runner.left_out) + "\n"
    text = f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f} before; 4 sequences of 256 tokens a rank, fp32\n\n" + text
    print(text)
    (runner.out / "table.md").write_text(text)
    (runner.out / "results.json").write_text(json.dumps({"load_before": load, "head_to_head": speeds, "runs": runs, "left_out": runner.left_out}, indent=1) + "\n")
    draw(runner, runs)
    for name in ("run.json", "peer.json"):
        (runner.out / name).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
