"""Runs programs under a time limit, and `train` on several ranks for a number of timed steps and one traced one."""

import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Failed(Exception):
    """A program that did not do what was asked; the text has its last words and names its output file."""


def run_limited(command, seconds, output, env=None):
    """Runs `command`, its output into the file `output`. Ended by SIGTERM, then SIGKILL, after `seconds`."""
    command = [str(word) for word in command]
    with open(output, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                                   env={**os.environ, **(env or {})}, start_new_session=True)
        try:
            code = process.wait(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks along
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if code == 0:
        return
    last = [line.strip() for line in pathlib.Path(output).read_text(errors="replace").splitlines() if line.strip()][-2:]
    what = f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"
    raise Failed(f"{what}: {' / '.join(last)[-300:]} (see {output})")


def gpus(*fields):
    """A line for each GPU that nvidia-smi names: its name, its driver's version, then `fields`."""
    query = "--query-gpu=" + ",".join(("name", "driver_version", *fields))
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
    except FileNotFoundError:  # no driver
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def mpirun(ranks):
    return ["mpirun", "-np", ranks, "--oversubscribe"] + (["--allow-run-as-root"] if os.getuid() == 0 else [])


def timed_run(config, out, *, ranks, steps, warm_up, build="build/cuda-release", sets=(), batch=None, seconds=300):
    """`train` on `ranks` ranks: the median of the steps after the first `warm_up`, then one more step with CUPTI.

    tokens_per_second and step_ms are end to end. nccl_ms, exposed_ms: of rank 0's GPU in the traced step, the time with a
    kernel of NCCL's running, and that of it with no other kernel beside it. out + ".output" has what the job printed.
    """
    shutil.rmtree(out, ignore_errors=True)
    pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
    with open(config, "rb") as f:
        training = tomllib.load(f)["training"]
    batch = batch or training["global_batch_size"]
    command = [*mpirun(ranks), ROOT / build / "bin/train", config, "--out", out]
    # The last step is traced, and not among those that are timed.
    for s in ["device=cuda", f"training.steps={steps + 1}", f"metrics.trace_steps=[{steps + 1}]", f"training.global_batch_size={batch}",
              *sets]:
        command += ["--set", s]
    output = f"{out}.output"
    run_limited(command, seconds, output)
    lines = [json.loads(line) for line in (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines()]
    timed = [line["time_metrics/end_to_end(s)"] for line in lines[warm_up:steps]]
    step_s = statistics.median(timed)
    profile = json.loads((pathlib.Path(out) / "trace/rank-0-profile.json").read_text())
    nccl_ms, exposed_ms = profile["nccl_ms"], profile["nccl_exposed_ms"]
    return {"ranks": ranks, "batch": batch, "seq_len": training["seq_len"], "tokens_per_second": batch * training["seq_len"] / step_s,
            "step_ms": step_s * 1e3, "least_step_ms": min(timed) * 1e3, "most_step_ms": max(timed) * 1e3, "nccl_ms": nccl_ms, "exposed_ms": exposed_ms,
            "hidden_percent": 100 * (1 - exposed_ms / nccl_ms) if nccl_ms else None,
            "ranks_share_a_gpu": "ranks share" in pathlib.Path(output).read_text(),
            "loss": lines[-1]["loss_metrics/global_avg_loss"], "command": " ".join(map(str, command)).replace(f"{ROOT}/", "")}
