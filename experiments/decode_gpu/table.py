"""Prints run.sh's results.jsonl as the README's table: ours, and PyTorch's of the same call where it ran.

python3 table.py results.jsonl
"""
import json
import sys

ours, peer, prefill = {}, {}, {}
for line in open(sys.argv[1]):
    r = json.loads(line)
    is_peer = r.get("what", "").startswith("PyTorch")
    if "decode" in r:
        (peer if is_peer else ours)[r["shape"], r["decode"]["batch"]] = r["decode"]
    if "prefill" in r:
        prefill.setdefault(r["shape"], {})[is_peer] = f'{r["prefill"]["tokens_per_second"]:.0f}'


def cells(of, key):
    return f'{of[key]["ms"]:.3f} | {of[key]["percent_of_floor"]:.1f}' if key in of else "- | -"


print("| shape | batch | ms a step | % of floor | PyTorch ms | PyTorch % |\n|---|---|---|---|---|---|")
for key in ours:
    print(f"| {key[0]} | {key[1]} | {cells(ours, key)} | {cells(peer, key)} |")
print("\n| shape | prefill tok/s | PyTorch tok/s |\n|---|---|---|")
for shape, of in prefill.items():
    print(f'| {shape} | {of.get(False, "-")} | {of.get(True, "-")} |')
