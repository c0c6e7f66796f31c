#!/usr/bin/env python3
"""What N GPUs of one host do together: collectives, training speed, overlap, recovery; run.sh builds and calls this.

  measure.py N [--budget 470] [--sections tests collectives scaling peers overlap kills] [--shapes 124m 1b 8b] [--quick]
             [--build build/cuda-release] [--python PYTHON_WITH_TORCH] [--out outputs/multi_gpu]

tests        ctest -L cuda, then -L fault (those labelled slow left out); with two GPUs or more the tests of one GPU run on others
             than the first, beside those of several ranks
collectives  comm_bench --backend nccl: all-reduce, all-gather, reduce-scatter; NCCL's own choice, ring and tree (all-reduce),
             buffer sizes, which are four times the pieces on the wire; bus bandwidth beside NVLink's 450 GB/s a direction
scaling      `train`, ddp and zero3, on 1 and on N GPUs with the same batch a rank: median step after warm-up; of one more step,
             traced, the time of NCCL's kernels on rank 0's GPU, how much of it other kernels hide, and what is exposed
peers        PyTorch on the same N GPUs: DistributedDataParallel and FSDP2, compiled (pytorch_peer.py)
overlap      the 124M shape, ddp: comm.overlap on and off by comm.bucket_bytes, then comm.max_ctas
kills        SIGKILLs at random moments of the 124M shape (experiments/recovery_gpu/measure.py): phases, digest
Each section has its share of --budget, seconds from the start of run.sh, build included; what no longer fits is left out, with its
reason, in the table and in results.json. Both are written anew after each section.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import tomllib

import report

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "experiments/train_speed"))
from timed_run import Failed, gpus, run_limited, timed_run  # noqa: E402

CONFIGS = {"124m": "experiments/train_speed/configs/124m.toml", "1b": "experiments/train_speed/configs/1b.toml",
           "8b": "experiments/train_speed/configs/8b_full.toml"}
BATCH = {"8b": 1}  # sequences a rank; else those of the file
STEPS = {"124m": (24, 8), "1b": (14, 5), "8b": (8, 3)}  # warm-up included, and how many it has
QUICK_STEPS = (6, 2)                                    # with --quick
PEERS = [("1b", "fsdp2"), ("8b", "fsdp2"), ("1b", "ddp"), ("124m", "ddp")]
# Shares of the time that the sections still to come have; what one leaves, the next ones get.
SHARES = {"tests": 110, "collectives": 35, "scaling": 95, "peers": 105, "overlap": 50, "kills": 90}
QUICK_SHARES = SHARES | {"collectives": 70}  # what quick makes shorter is not the starting of programs
# Tests of one GPU that neither compare its free memory nor start ranks, in lanes about as long as each other.
ONE_GPU_TESTS = ["kernels_cuda_attention_test", "kernels_cuda_(rowwise|gemm|decode)_test|device_model_test|decode_cuda_test"]
MIB = 1 << 20


class Clock:
    """The time of the whole run, and of the section in hand."""

    def __init__(self, budget: float, spent: float, shares: dict[str, int]):
        self.end = self.section_end = time.monotonic() + budget - spent
        self.shares = shares
        self.skipped: list[dict] = []

    def begin(self, name: str, remaining: list[str]) -> None:
        now = time.monotonic()
        self.name = name
        self.section_end = now + max(0.0, self.end - now) * self.shares[name] / sum(self.shares[n] for n in remaining)

    def left(self) -> float:
        return self.section_end - time.monotonic()

    def skip(self, what: str, why: str) -> None:
        print(f"left out: {self.name}, {what}: {why}", flush=True)
        self.skipped.append({"section": self.name, "what": what, "why": why})

    def room(self, what: str, seconds: float) -> bool:
        """Whether `seconds` are left; says so otherwise."""
        if self.left() >= seconds:
            return True
        self.skip(what, f"{max(0.0, self.left()):.0f} s of this section are left, about {seconds:.0f} s wanted")
        return False


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, pathlib.Path(args.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.clock = Clock(args.budget, args.spent, QUICK_SHARES if args.quick else SHARES)
        self.steps = {shape: QUICK_STEPS if args.quick else steps for shape, steps in STEPS.items()}
        # Fewer than two ranks have nothing to say to each other: with one GPU two share it.
        self.ranks = max(2, args.gpus)

    def tests(self) -> list[dict]:
        rows = []
        for label, share in [("cuda", 0.8), ("fault", 1.0)]:
            seconds = self.clock.left() * share
            if not self.clock.room(f"ctest -L {label}", 5):
                continue
            lanes = [([], {})]
            others = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[1:]
            if label == "cuda" and others:
                lanes = [(["-E", "|".join(ONE_GPU_TESTS)], {})]
                lanes += [(["-R", pattern], {"CUDA_VISIBLE_DEVICES": others[-1 - i % len(others)]}) for i, pattern in enumerate(ONE_GPU_TESTS)]
            with concurrent.futures.ThreadPoolExecutor(len(lanes)) as pool:
                counts = list(pool.map(lambda i: self.ctest(label, i, *lanes[i], seconds), range(len(lanes))))
            row = {"label": label, **report.add_up(counts)}
            rows.append(row)
            print(f"ctest -L {label}: {row['passed']} passed, {row['failed']} failed of {row['found']}", flush=True)
            if missing := row["found"] - row["passed"] - row["failed"]:
                self.clock.skip(f"{missing} tests of -L {label}", "their programs are not there, or the section's time was over")
        return rows

    def ctest(self, label: str, lane: int, which: list[str], environment: dict[str, str], seconds: float) -> dict:
        """One ctest in a folder of its own: it writes logs beside the list of tests, and holds locks only against itself."""
        build, folder = (ROOT / self.args.build).resolve(), self.out / f"ctest_{label}_{lane}"
        shutil.rmtree(folder, ignore_errors=True)
        for path in build.rglob("CTestTestfile.cmake"):
            copy = folder / path.relative_to(build)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        # No test begins after the section's time; one that has begun may end.
        stop = (datetime.datetime.now() + datetime.timedelta(seconds=seconds)).strftime("%H:%M:%S")
        log = self.out / f"ctest_{label}_{lane}.txt"
        command = ["ctest", "--test-dir", folder, "-L", label, "-LE", "slow" if label == "cuda" else "slow|cuda", *which, "--output-on-failure",
                   "--stop-time", stop]
        try:
            run_limited(command, seconds + 5, log, environment)
        except Failed as failure:
            print(f"ctest -L {label}: {failure}", flush=True)
        return report.count_tests(log.read_text())

    def collectives(self) -> list[dict]:
        rows = []
        for op, algorithms in [("all_reduce", "auto,ring,tree"), ("all_gather", "auto"), ("reduce_scatter", "auto")]:
            if not self.clock.room(op, 3 if self.args.quick else 6):
                continue
            path = self.out / f"comm_bench_{op}.json"
            path.unlink(missing_ok=True)
            buffsizes = ",".join(str(b) for b in ([0] if self.args.gpus == 1 else [0, MIB, 16 * MIB]))
            largest = (1 if self.args.quick else 16 if self.args.gpus == 1 else 256) * MIB
            command = [ROOT / self.args.build / "bin/comm_bench", "--backend", "nccl", "--ranks", self.ranks, "-o", op, "-a", algorithms, "-p", "auto",
                       "-b", 64 << 10, "-e", largest, "-f", 16, "-n", 5 if self.args.gpus == 1 else 20, "-w", 3, "--buffsize", buffsizes,
                       "-J", path]
            try:
                run_limited(command, self.clock.left(), self.out / f"comm_bench_{op}.txt")
            except Failed as failure:
                self.clock.skip(op, str(failure))
                continue
            rows += [{"op": op, **row} for row in json.loads(path.read_text())["rows"]]
        print(report.collectives(rows), flush=True)
        return rows

    def train(self, shape: str, ranks: int, sets: list[str], name: str, steps: tuple[int, int]) -> dict:
        config = ROOT / CONFIGS[shape]
        with open(config, "rb") as f:
            batch = BATCH.get(shape, tomllib.load(f)["training"]["global_batch_size"])
        return timed_run(config, self.out / name, ranks=ranks, steps=steps[0], warm_up=steps[1], build=self.args.build,
                         sets=sets + self.args.set, batch=batch * ranks, seconds=self.clock.left())

    def try_train(self, what: str, *args) -> dict | None:
        if not self.clock.room(what, self.args.least):
            return None
        try:
            row = self.train(*args)
        except Failed as failure:
            self.clock.skip(what, str(failure))
            return None
        print(f"{what}: {row['tokens_per_second']:,.0f} tokens/s, {row['step_ms']:.1f} ms, exposed {row['exposed_ms']:.1f} ms", flush=True)
        return row

    def scaling(self) -> list[dict]:
        rows = []
        # The figures that are asked for first: 1B in ddp, 8B in zero3.
        wanted = [("1b", "ddp"), ("8b", "zero3"), ("124m", "ddp"), ("1b", "zero3"), ("124m", "zero3")]
        for shape, mode in [w for w in wanted if w[0] in self.args.shapes]:
            for ranks in sorted({1, self.args.gpus}):
                row = self.try_train(f"{shape} {mode} on {ranks}", shape, ranks, [f"parallelism.mode={mode}"], f"{shape}_{mode}_{ranks}",
                                     self.steps[shape])
                if row:
                    rows.append({"shape": shape, "mode": mode, **row})
        return rows

    def peers(self) -> list[dict]:
        rows = []
        for shape, mode in [p for p in PEERS if p[0] in self.args.shapes]:
            what = f"PyTorch {mode}, {shape}, on {self.args.gpus}"
            if shape == "8b" and self.args.gpus == 1:
                self.clock.skip(what, "fp32 weights, gradients and moments of 8B are 128 GB, and PyTorch's AdamW keeps no others")
                continue
            if not self.clock.room(what, 25):
                continue
            path = self.out / f"peer_{shape}_{mode}.json"
            path.unlink(missing_ok=True)
            command = [self.args.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", self.args.gpus,
                       HERE / "pytorch_peer.py", ROOT / CONFIGS[shape], "--mode", mode, "--steps", self.steps[shape][0] - self.steps[shape][1],
                       "--warm-up", self.steps[shape][1], "--json", path]
            if shape in BATCH:
                command += ["--batch", BATCH[shape]]
            try:
                run_limited(command, self.clock.left(), self.out / f"peer_{shape}_{mode}.output")
            except Failed as failure:
                self.clock.skip(what, str(failure))
                continue
            rows.append({"shape": shape, "mode": mode, **json.loads(path.read_text())})
            print(f"{what}: {rows[-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
        return rows

    def overlap(self) -> list[dict]:
        rows = []
        cases = [(bucket, overlap, 0) for bucket in (16 * MIB, 4 * MIB, 64 * MIB) for overlap in (True, False)]
        cases += [(16 * MIB, True, ctas) for ctas in (4, 8, 16)]
        for bucket, overlap, ctas in cases:
            name = f"bucket_{bucket // MIB}_{'on' if overlap else 'off'}_ctas_{ctas}"
            sets = [f"comm.bucket_bytes={bucket}", f"comm.first_bucket_bytes={MIB}", f"comm.overlap={str(overlap).lower()}",
                    f"comm.max_ctas={ctas}"]
            row = self.try_train(name, "124m", self.ranks, sets, name, self.steps["124m"])
            if row:
                rows.append({"bucket_bytes": bucket, "overlap": overlap, "max_ctas": ctas, **row})
        return rows

    def kills(self) -> list[dict]:
        if not self.clock.room("kills", 20):
            return []
        kills = self.args.kills
        if not self.args.quick:
            # Starts, the probe and the first spares take 35 s; then a kill's window and mending, in the run left alone, too.
            kills = max(2, min(kills, int((self.clock.left() - 35) / 4)))
            if kills < self.args.kills:
                self.clock.skip(f"{self.args.kills - kills} of {self.args.kills} kills", f"{self.clock.left():.0f} s of this section are left")
        folder = self.out / "recovery"
        command = [sys.executable, ROOT / "experiments/recovery_gpu/measure.py", "--ranks", self.ranks, "--kills", kills, "--eager",
                   "--without-spare", 0, "--probe-kills", 0 if self.args.gpus == 1 else 2, "--window", 0.6, "--mend", 1.5, "--settle", 6,
                   "--build", self.args.build, "--out", folder]
        if self.args.quick:
            command += ["--steps", 24]
        for s in self.args.set:
            command += ["--set", s]
        try:
            run_limited(command, self.clock.left(), self.out / "recovery.txt")
        except Failed as failure:
            self.clock.skip("kills", str(failure))
        path = folder / "results.json"
        rows = json.loads(path.read_text())["results"] if path.exists() else []
        print((self.out / "recovery.txt").read_text()[-3000:], flush=True)
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int)
    parser.add_argument("--budget", type=float, default=470, help="seconds of the whole run")
    parser.add_argument("--spent", type=float, default=0, help="of them, before this program")
    parser.add_argument("--sections", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--shapes", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="few steps and small sizes: tries the program, its numbers mean little")
    parser.add_argument("--least", type=float, default=8, help="seconds that a training must have left to be started")
    parser.add_argument("--build", default="build/cuda-release")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--out", default="outputs/multi_gpu")
    parser.add_argument("--set", action="append", default=[], help="key=value for every training")
    args = parser.parse_args()
    found = gpus("memory.total")
    if not 1 <= args.gpus <= len(found):
        print(f"{args.gpus} GPUs were asked for; nvidia-smi names {len(found)}", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    # NVLink multicast belongs to the whole host's fabric: not for programs that are killed on purpose.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus))))
    run = Run(args)
    for vocabulary in sorted({50304} | {128256 for s in args.shapes if s != "124m"}):
        subprocess.run([sys.executable, ROOT / "experiments/train_speed/make_tokens.py", str(vocabulary)], check=True, stdout=subprocess.DEVNULL)
    results = {"gpus": args.gpus, "machine": found, "cpus": os.cpu_count(), "command": " ".join(sys.argv), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    sections = [s for s in SHARES if s in args.sections]
    for i, name in enumerate(sections):
        print(f"== {name}", flush=True)
        run.clock.begin(name, sections[i:])
        began = time.monotonic()
        results[name] = getattr(run, name)()
        results.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
        results["left_out"] = run.clock.skipped
        (run.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (run.out / "table.md").write_text(report.table(results))
    print("\n" + report.table(results), flush=True)
    return 0 if report.good(results) else 1


if __name__ == "__main__":
    sys.exit(main())
