"""The tables of measure.py, from its results."""

import re

NVLINK_GB_S = 450  # of an H100 or H200, each direction
MIB = 1 << 20


def count_tests(text: str) -> dict:
    """What CTest printed, counted; tests that it never began are in `found` alone."""
    found = re.search(r"tests failed out of (\d+)", text)
    passed = len(re.findall(r"^\s*\d+/\d+ Test +#\d+: .* Passed ", text, re.MULTILINE))
    ended = re.findall(r"^\s*\d+/(\d+) Test +#\d+: (\S+) .*?(Passed|\*\*\*\S+)", text, re.MULTILINE)
    listed = re.search(r"^\s*\d+/(\d+) Test", text, re.MULTILINE)
    not_run = [n for _, n, r in ended if r == "***Not"]
    failures = [n for _, n, r in ended if r not in ("Passed", "***Not")]
    return {"found": int(listed[1]) if listed else int(found[1]) if found else 0, "passed": passed, "failed": len(failures),
            "failures": failures, "not_run": not_run}


def add_up(counts: list[dict]) -> dict:
    return {key: sum((c[key] for c in counts), start=type(counts[0][key])()) for key in counts[0]}


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]) + "\n"


def collectives(rows: list[dict]) -> str:
    """Bus bandwidth in GB/s: one line an operation, algorithm and buffer size, one column a size."""
    sizes = sorted({r["size_bytes"] for r in rows})
    cells = {}
    for r in rows:
        cells.setdefault((r["op"], r["algorithm"], r["chunk_bytes"]), {})[r["size_bytes"]] = r
    lines = []
    for (op, algorithm, buffsize), by_size in cells.items():
        largest = by_size[max(by_size)]["busbw_gb_s"]
        lines.append([op, algorithm, size_name(buffsize) if buffsize else "NCCL's own"] +
                     [f"{by_size[s]['busbw_gb_s']:.1f}" if s in by_size else "" for s in sizes] + [f"{100 * largest / NVLINK_GB_S:.0f} %"])
    return markdown(["operation", "algorithm", "buffer", *map(size_name, sizes), f"of {NVLINK_GB_S} GB/s"], lines)


def scaling(results: dict) -> str:
    rows, peers, n = results.get("scaling", []), results.get("peers", []), results["gpus"]
    alone = {(r["shape"], r["mode"]): r["tokens_per_second"] for r in rows if r["ranks"] == 1}
    theirs = {(p["shape"], {"ddp": "ddp", "fsdp2": "zero3"}[p["mode"]]): p["tokens_per_second"] for p in peers}
    lines = []
    for r in rows:
        key = (r["shape"], r["mode"])
        share = f"{100 * r['tokens_per_second'] / r['ranks'] / alone[key]:.1f} %" if key in alone else ""
        peer = theirs.pop(key, None) if r["ranks"] == n else None
        lines.append([*key, str(r["ranks"]), f"{r['tokens_per_second']:,.0f}", f"{r['step_ms']:.1f}", share,
                      "" if r["hidden_percent"] is None else f"{r['hidden_percent']:.0f} %", f"{r['exposed_ms']:.1f}", f"{peer:,.0f}" if peer else ""])
    lines += [[*key, str(n), "", "", "", "", "", f"{speed:,.0f}"] for key, speed in theirs.items()]
    return markdown(["shape", "mode", "GPUs", "tokens/s", "step ms", "of 1 GPU's, a GPU", "NCCL hidden", "exposed ms",
                     "PyTorch DDP / FSDP2, compiled"], lines)


def overlap(rows: list[dict]) -> str:
    return markdown(["bucket", "overlap", "max CTAs", "tokens/s", "step ms", "NCCL ms", "exposed ms"],
                    [[size_name(r["bucket_bytes"]), "on" if r["overlap"] else "off", str(r["max_ctas"] or "NCCL's own"),
                      f"{r['tokens_per_second']:,.0f}", f"{r['step_ms']:.1f}", f"{r['nccl_ms']:.1f}", f"{r['exposed_ms']:.1f}"] for r in rows])


def kills(rows: list[dict]) -> str:
    names = list(rows[0]["phases_median_ms"])
    return markdown(["ranks", "kills", "begun, median ms", "p95", "max", *[f"{n[:-3]} ms" for n in names], "steps lost", "states equal"],
                    [[str(r["ranks"]), str(r["kills"]), *[f"{r['begun_ms'][k]:.0f}" for k in ("median", "p95", "max")],
                      *["" if r["phases_median_ms"][n] is None else f"{r['phases_median_ms'][n]:.1f}" for n in names], str(r["steps_lost"]),
                      "yes" if r["digests_equal"] else "NO"] for r in rows])


def table(results: dict) -> str:
    n = results["gpus"]
    text = [f"{n} of {len(results['machine'])} GPUs ({results['machine'][0]}), {results['time']}\n"]
    if n == 1:
        text.append("Collectives, overlap and kills: two ranks share the one GPU and take turns; their times say nothing of NVLink.\n")
    if results.get("tests"):
        text.append(markdown(["tests", "found", "passed", "failed", "names"],
                             [[f"ctest -L {t['label']}", str(t["found"]), str(t["passed"]), str(t["failed"]), " ".join(t["failures"])]
                              for t in results["tests"]]))
    if results.get("collectives"):
        text.append(collectives(results["collectives"]))
    if results.get("scaling") or results.get("peers"):
        text.append(scaling(results))
    if results.get("overlap"):
        text.append(overlap(results["overlap"]))
    if results.get("kills"):
        text.append(kills(results["kills"]))
    if results.get("left_out"):
        text.append(markdown(["left out", "what", "why"], [[s["section"], s["what"], s["why"]] for s in results["left_out"]]))
    return "\n".join(text)


def good(results: dict) -> bool:
    """Whether all that was run gave right results."""
    return (all(t["failed"] == 0 for t in results.get("tests", [])) and all(r["num_wrong"] <= 0 for r in results.get("collectives", []))
            and all(k["digests_equal"] and k["steps_lost"] == 0 for k in results.get("kills", [])))
