#!/usr/bin/env python3
"""Tables out of a run's folder.

    report.py recovery RUN          each recovery of recovery.jsonl, phase by phase in ms
    report.py compare RUN OTHER     loss and state_sha256 of two runs' summary.json; ends with 1 when the digests differ
"""

import json
import pathlib
import sys


def print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip())


def cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def recovery(run: pathlib.Path) -> int:
    lines = (run / "recovery.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "recovered"]
    if not events:
        print(f"{run / 'recovery.jsonl'} names no recovery", file=sys.stderr)
        return 1
    for event in events:
        print(f"{event['cause']}; state from: {event['source']}; steps lost: {event['steps_lost']}")
        phases = event["phases"]
        # Negative: not known, as the moment of a kill by hand.
        print_table(["phase", "ms"], [[key.removesuffix("_ms"), f"{ms:.1f}" if ms >= 0 else "-"] for key, ms in phases.items()])
    return 0


def compare(run: pathlib.Path, other: pathlib.Path) -> int:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, other)]
    rows = [[key, *(cell(summary.get(key)) for summary in summaries)] for key in ("steps", "final_loss", "state_sha256")]
    print_table(["", run.name, other.name], rows)
    digests = {summary["state_sha256"] for summary in summaries}
    print("The states are equal, bit for bit." if len(digests) == 1 else "THE STATES DIFFER.")
    return 0 if len(digests) == 1 else 1


def main() -> int:
    match sys.argv[1:]:
        case ["recovery", run]:
            return recovery(pathlib.Path(run))
        case ["compare", run, other]:
            return compare(pathlib.Path(run), pathlib.Path(other))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
