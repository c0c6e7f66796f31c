#!/usr/bin/env python3
"""What a finished run of austen_25m.toml leaves in results/: loss_curve.csv, loss_curve.svg and summary.json.

  report.py RUN_FOLDER --results DIR --seconds S      prints the name of the best checkpoint that is left, for run.sh
"""

import argparse
import csv
import json
import math
import os
import sys


def read_metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def write_curve(path, steps):
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["step", "train_loss", "validation_loss", "lr", "grad_norm", "seconds"])
        seconds = 0.0
        for s in steps:
            seconds += s.get("time_metrics/end_to_end(s)") or 0
            validation = s.get("loss_metrics/validation_loss")
            out.writerow([s["step"], f"{s['loss_metrics/global_avg_loss']:.5f}", "" if validation is None else f"{validation:.5f}",
                          f"{s['lr']:.3e}", f"{s['grad_norm']:.4f}", f"{seconds:.3f}"])


def write_svg(path, steps, best):
    """Both losses over the steps; the vertical axis ends a little above the start of the second tenth."""
    W, H, left, bottom = 720, 400, 50, 40
    validation = [(s["step"], s["loss_metrics/validation_loss"]) for s in steps if s.get("loss_metrics/validation_loss") is not None]
    train = [(s["step"], s["loss_metrics/global_avg_loss"]) for s in steps]
    last = train[-1][0]
    low = math.floor(10 * min(v for _, v in train + validation)) / 10
    high = math.ceil(10 * max(v for step, v in train if step >= last // 20)) / 10
    def x(step):
        return left + (W - left - 20) * step / last
    def y(value):
        return H - bottom - (H - bottom - 20) * (min(value, high) - low) / (high - low)
    def line(points, colour, width):
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="' + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points) + '"/>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{W}" height="{H}" font-family="sans-serif" font-size="12">',
             f'<rect width="{W}" height="{H}" fill="white"/>']
    ticks = 5
    for i in range(ticks + 1):
        value, step = low + (high - low) * i / ticks, last * i / ticks
        parts.append(f'<line x1="{left}" x2="{W - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{H - bottom + 18}" text-anchor="middle">{step:.0f}</text>')
    parts.append(line([p for p in train if p[0] >= last // 20], "#7aa6d8", 1))
    parts.append(line(validation, "#c0392b", 2))
    parts.append(f'<circle cx="{x(best[0]):.1f}" cy="{y(best[1]):.1f}" r="4" fill="#c0392b"/>')
    parts.append(f'<text x="{W - 24}" y="34" text-anchor="end" fill="#c0392b">validation, best {best[1]:.4f} at step {best[0]}</text>')
    parts.append(f'<text x="{W - 24}" y="50" text-anchor="end" fill="#7aa6d8">training</text>')
    parts.append(f'<text x="{W / 2}" y="{H - 6}" text-anchor="middle">step</text><text x="8" y="14">loss, nats a byte</text></svg>')
    with open(path, "w") as f:
        f.write("\n".join(parts) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--results", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    steps = read_metrics(args.run)
    validation = [(s["step"], s["loss_metrics/validation_loss"]) for s in steps if s.get("loss_metrics/validation_loss") is not None]
    best = min(validation, key=lambda v: v[1])
    left = [int(name.split("-")[1]) for name in os.listdir(os.path.join(args.run, "checkpoint")) if name.startswith("step-")]
    kept = min(left, key=lambda step: dict(validation).get(step, math.inf))
    if kept != best[0]:
        print(f"the best step's checkpoint is gone; step {kept} is the best left", file=sys.stderr)
    write_curve(os.path.join(args.results, "loss_curve.csv"), steps)
    write_svg(os.path.join(args.results, "loss_curve.svg"), steps, best)
    speeds = sorted(s["throughput(tps)"] for s in steps if s.get("throughput(tps)"))
    summary = {"best_validation_loss": best[1], "best_step": best[0], "bits_per_byte": best[1] / math.log(2), "last_validation_loss": validation[-1][1],
               "steps": steps[-1]["step"], "seconds": args.seconds, "training_seconds": sum(s.get("time_metrics/end_to_end(s)") or 0 for s in steps),
               "median_tokens_per_second": speeds[len(speeds) // 2], "bytes_seen": steps[-1]["tokens_seen"]}
    with open(os.path.join(args.results, "summary.json"), "w") as f:
        json.dump(summary, f, indent=1)
        f.write("\n")
    print(f"best validation loss {best[1]:.4f} nats a byte ({summary['bits_per_byte']:.3f} bits) at step {best[0]}; {args.seconds:.1f} s in all", file=sys.stderr)
    print(f"step-{kept}")


if __name__ == "__main__":
    main()
