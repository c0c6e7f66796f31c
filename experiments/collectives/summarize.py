"""Brings the rows of run.sh together: table.md on stdout, results.json in the folder. Standard library only."""
import glob
import json
import os
import platform
import statistics
import sys

PROGRAMS = [("kintsugi_symmetric", "Kintsugi, symmetric heap"), ("kintsugi_private", "Kintsugi, private memory"),
            ("open_mpi", "Open MPI"), ("gloo", "gloo")]


def size_name(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def time_name(us):
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.1f} ms" if us < 20000 else f"{us / 1000:.0f} ms"


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())


def main(folder):
    times = {}
    for path in glob.glob(os.path.join(folder, "*.json")):
        name = os.path.basename(path).split(".")
        if len(name) != 5:
            continue
        with open(path) as f:
            for row in json.load(f)["rows"]:
                times.setdefault((name[0], int(name[1]), row["size_bytes"]), []).append(row["time_us"])
    keys = sorted({(ranks, size) for _, ranks, size in times})
    machine = f"{cpu_name()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"Machine: {machine}. Median over iterations of the slowest rank; then the median of the rounds (and their range).\n")
    print("| ranks, size | " + " | ".join(title for _, title in PROGRAMS) + " |")
    print("|---|" + "---|" * len(PROGRAMS))
    rows = []
    for ranks, size in keys:
        cells = []
        for program, _ in PROGRAMS:
            rounds = sorted(times.get((program, ranks, size), []))
            if not rounds:
                cells.append("-")
                continue
            median = statistics.median(rounds)
            rows.append({"program": program, "ranks": ranks, "size_bytes": size, "time_us": median, "rounds_us": rounds})
            cells.append(f"{time_name(median)} ({time_name(rounds[0])} - {time_name(rounds[-1])})")
        print(f"| {ranks}, {size_name(size)} | " + " | ".join(cells) + " |")
    with open(os.path.join(folder, "results.json"), "w") as f:
        json.dump({"machine": machine, "rows": rows}, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
