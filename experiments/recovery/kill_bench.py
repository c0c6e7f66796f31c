#!/usr/bin/env python3
"""Kills workers of a running job at random times and measures how long the job takes to mend.

    kill_bench.py [--kills 50] [--ranks 8] [--seed 1] [--out DIR] [--build build/cpu-release]

The job is the quick start's model (3.3 M parameters) on 8 ranks, nothing else running. This process, not the job, sends each
SIGKILL, to the worker of a random rank at a uniformly random time of a window after the job is whole again (its spare
is ready). t0 is CLOCK_MONOTONIC read just before kill(2); the job's recovery.jsonl has its times on the same clock.

Measured for each kill:
    begun      t0 until the last rank has begun the next step
    committed  t0 until the last rank has made that step's update
    by rank    t0 until a survivor saw the stop word, its streams were drained, it had the verdict, the new communicator, the
               state, the comparison of states, the device's communicator, and began: first and last survivor, and the replacement
and at the end: the time lost against the undisturbed pace, the committed steps lost, and whether the final state_sha256 equals
that of a run of the same steps that was left alone.

Kills that the job has no steps left for are left out. --eager kills a rank as soon as its own spare is ready, though others' may
be starting (each kill says how many): for when time is short.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def percentile(values: list[float], p: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(p / 100 * len(ordered) + 0.5) - 1))]


class JobEnded(SystemExit):
    pass


class Job:
    def __init__(self, args: argparse.Namespace, name: str, steps: int, sets: list[str], ranks: int = 0):
        self.out = pathlib.Path(args.out) / name
        shutil.rmtree(self.out, ignore_errors=True)
        command = ["mpirun", "-np", str(ranks or args.ranks), "--oversubscribe"]
        if os.getuid() == 0:
            command.append("--allow-run-as-root")
        command += [str(ROOT / args.build / "bin/train"), str(ROOT / args.config)]
        command += ["--out", str(self.out)]
        # No run may be shorter than the learning rate's warm-up, and these may have few steps.
        for s in [f"training.steps={steps}", "lr_scheduler.warmup_steps=1", "training.eval_every=0", "fault.kill=[]",
                  f"recovery.spares={args.spares}", *sets, *args.set]:
            command += ["--set", s]
        self.command = command
        self.begin = time.monotonic()
        self.output = open(f"{self.out}.output", "w")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT)
        self.read = 0
        self.events: list[dict] = []
        self.pids: dict[int, dict] = {}
        self.origin_ns = 0

    def poll(self) -> None:
        """Reads what recovery.jsonl has gained."""
        path = self.out / "recovery.jsonl"
        if not path.exists():
            return
        with open(path, "rb") as f:
            f.seek(self.read)
            data = f.read()
        whole = data.rfind(b"\n") + 1
        self.read += whole
        for line in data[:whole].splitlines():
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == "start":
                self.origin_ns = int(event["origin_ns"])
            if event["event"] == "processes":
                self.pids[event["rank"]] = event

    def wait_for(self, condition, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise JobEnded(f"the job ended: see {self.out}.output")
            if time.monotonic() > end:
                raise SystemExit(f"waited {seconds} s in vain: see {self.out}.output")
            time.sleep(0.002)
            self.poll()

    def recovered(self) -> list[dict]:
        return [e for e in self.events if e["event"] == "recovered"]

    def finish(self) -> dict:
        code = self.process.wait()
        self.seconds = time.monotonic() - self.begin
        self.poll()
        if code != 0:
            raise SystemExit(f"exit code {code}: see {self.out}.output")
        return json.loads((self.out / "summary.json").read_text())

    def metrics(self) -> list[dict]:
        path = self.out / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def step_times(self) -> list[float]:
        """Seconds of each step that was not interrupted."""
        return [l["time_metrics/end_to_end(s)"] for l in self.metrics() if "time_metrics/end_to_end(s)" in l]

    def step(self) -> int:
        return max((l["step"] for l in self.metrics()), default=0)


def spares_starting(job: Job, spares: int) -> int:
    return sum(max(0, spares - p["spares_ready"]) for p in job.pids.values())


def kill_one(job: Job, rng: random.Random, ranks: int, window_s: float, spares: int = 1, eager: bool = False) -> dict:
    def ready() -> list[int]:
        return [r for r, p in job.pids.items() if p["spares_ready"] >= spares]

    job.wait_for(lambda: len(job.pids) == ranks and len(ready()) >= (1 if eager else ranks) and len(job.step_times()) > 0)
    time.sleep(rng.uniform(0, window_s))
    job.poll()
    before = len(job.recovered())
    rank = rng.choice(ready()) if eager else rng.randrange(ranks)
    starting = spares_starting(job, spares)
    pid = job.pids[rank]["worker_pid"]
    t0 = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: len(job.recovered()) > before)
    event = job.recovered()[before]
    job.wait_for(lambda: job.pids[rank]["worker_pid"] != pid)  # its agent's word may come a moment later
    absolute = lambda key: job.origin_ns + event[key]
    detected = min(d["detected_t_ns"] for d in event["deaths"]) + job.origin_ns
    detect_ms = (detected - t0) / 1e6
    phases = dict(event["phases"], detect_ms=detect_ms)
    return {
        "rank": rank,
        "step": event["deaths"][0]["step"],
        "spares_starting": starting,
        "begun_ms": (absolute("first_step_begun_t_ns") - t0) / 1e6,
        "committed_ms": (absolute("first_step_committed_t_ns") - t0) / 1e6,
        "steps_lost": event["steps_lost"],
        "source": event["source"],
        "phases": phases,
        "by_rank": [{n: None if v is None else v + detect_ms for n, v in r.items()} for r in event.get("ranks", [])],
    }


def describe_ranks(kill: dict) -> str:
    """First and last survivor at each milestone, then the replacement."""
    survivors = [r for i, r in enumerate(kill["by_rank"]) if i != kill["rank"]]
    if not survivors:
        return ""
    def span(name: str) -> str:
        values = [r[name] for r in survivors if r[name] is not None]
        return f"{name[:-3]} {min(values):.0f}-{max(values):.0f}" if values else ""
    names = [n for n in survivors[0] if n != "committed_ms"]
    replacement = kill["by_rank"][kill["rank"]]
    return ("     survivors: " + "  ".join(filter(None, map(span, names))) + "\n     replacement: " +
            "  ".join(f"{n[:-3]} {replacement[n]:.0f}" for n in names if replacement[n] is not None))


def pace_of(job: Job) -> float:
    """Seconds of a step, once the first ones are over."""
    times = job.step_times()
    return statistics.median(times[min(5, len(times) // 2):])


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--config", default="experiments/quick_start/quick_start.toml", help="from the root")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--pace-steps", type=int, default=30, help="of the run that finds out how long a step takes")
    parser.add_argument("--mend", type=float, default=1.5, help="seconds from a kill until the next may come, at most")
    parser.add_argument("--settle", type=float, default=0, help="seconds that the first spares take to be ready")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--undisturbed-ranks", type=int, default=0,
                        help="of the run that is left alone; 0: as many. Others need parallelism.reduce_order=fixed")
    parser.add_argument("--steps", type=int, default=0, help="of the job; 0: enough for the kills, by the pace of a short run")
    parser.add_argument("--window", type=float, default=1.0, help="seconds in which a kill falls")
    parser.add_argument("--eager", action="store_true", help="kill whoever has a spare ready; do not wait for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", default="build/cpu-release")
    parser.add_argument("--out", default="outputs/kill_bench")
    parser.add_argument("--set", action="append", default=[], help="key=value for both runs")
    return parser


def measure(args: argparse.Namespace) -> dict:
    """The whole experiment; prints as it goes."""
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)

    # Nobody dies in these: no spares, so that what they take of the machine does not count.
    steps = args.steps
    if not steps:
        warm = Job(args, "pace", args.pace_steps, ["recovery.spares=0"])
        warm.finish()
        # A kill needs its window, the mending, the step that follows, and the new spare's start behind training.
        seconds = args.settle + args.kills * (args.window / 2 + args.mend)
        steps = int(seconds / pace_of(warm)) + max(5, args.pace_steps)
    print(f"{steps} steps for {args.kills} kills; seed {args.seed}", flush=True)

    job = Job(args, "disturbed", steps, [])
    kills = []
    # The step that a kill interrupts must not be the last, and the window may take steps of its own.
    while len(kills) < args.kills and job.step() + args.window / min(job.step_times(), default=1) < steps - 3:
        try:
            kills.append(kill_one(job, rng, args.ranks, args.window, args.spares, args.eager))
        except JobEnded:
            if not kills or job.process.returncode != 0:
                raise
            break  # its steps ran out before a spare was ready
        k = kills[-1]
        print(f"{len(kills):3d}: rank {k['rank']} step {k['step']:4d}  begun {k['begun_ms']:7.1f} ms  committed {k['committed_ms']:7.1f} ms  "
              + "  ".join(f"{n[:-3]} {v:.1f}" for n, v in k["phases"].items() if v is not None and n not in ("total_ms", "committed_ms"))
              + f"  (spares starting: {k['spares_starting']})", flush=True)
        if text := describe_ranks(k):
            print(text, flush=True)
        # Kept even when the rest is cut off.
        (pathlib.Path(args.out) / "kills.json").write_text(json.dumps(kills, indent=1) + "\n")
    disturbed = job.finish()
    alone = Job(args, "undisturbed", steps, ["recovery.spares=0"], args.undisturbed_ranks)
    undisturbed = alone.finish()
    comparable = args.undisturbed_ranks in (0, args.ranks)
    pace = pace_of(alone if comparable else job)

    begun = [k["begun_ms"] for k in kills]
    committed = [k["committed_ms"] for k in kills]
    lost_ms = (job.seconds - alone.seconds) * 1e3 / len(kills) if comparable else None
    result = {
        "kills": len(kills),
        "ranks": args.ranks,
        "undisturbed_ranks": args.undisturbed_ranks or args.ranks,
        "seed": args.seed,
        "step_ms": pace * 1e3,
        "begun_ms": {"median": statistics.median(begun), "p95": percentile(begun, 95), "max": max(begun)},
        "committed_ms": {"median": statistics.median(committed), "p95": percentile(committed, 95), "max": max(committed)},
        "lost_ms_a_kill": lost_ms,
        "phases_median_ms": {n: statistics.median([k["phases"][n] for k in kills if k["phases"][n] is not None] or [0.0])
                             for n in kills[0]["phases"]},
        "steps_lost": sum(k["steps_lost"] for k in kills),
        "digests_equal": disturbed["state_sha256"] == undisturbed["state_sha256"],
        "state_sha256": disturbed["state_sha256"],
        "command": job.command,
        "load_average": os.getloadavg(),
        "each": kills,
    }
    (pathlib.Path(args.out) / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nt0 -> every rank has begun the next step: median {result['begun_ms']['median']:.1f} ms, "
          f"p95 {result['begun_ms']['p95']:.1f} ms, max {result['begun_ms']['max']:.1f} ms")
    print(f"t0 -> first committed step everywhere:    median {result['committed_ms']['median']:.1f} ms, "
          f"p95 {result['committed_ms']['p95']:.1f} ms (an undisturbed step takes {pace * 1e3:.0f} ms)")
    if lost_ms is not None:
        print(f"time lost against the undisturbed run: {lost_ms:.0f} ms a kill")
    print(f"committed steps lost: {result['steps_lost']}")
    print(f"median phases: " + ", ".join(f"{n[:-3]} {v:.1f}" for n, v in result["phases_median_ms"].items()))
    print("the states are equal, bit for bit" if result["digests_equal"] else "THE STATES DIFFER", flush=True)
    return result


def main() -> int:
    result = measure(arguments(__doc__).parse_args())
    return 0 if result["digests_equal"] and result["steps_lost"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
