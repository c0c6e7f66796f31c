#!/usr/bin/env bash
# Decode and prefill on one GPU: builds, checks, measures, prints a table with PyTorch's numbers of the same call.
#   run.sh [folder for results]
# Needs a GPU and a python3 with torch and numpy. BIN: folder of programs that are built already.
# PEER: 1 measures PyTorch, compiled, beside each shape (some minutes), 0 leaves it out; without it, where torch finds the GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=${BIN:-$root/build/cuda-release/bin}
out=${1:-$root/build/decode_gpu}
if [ -z "${BIN:-}" ]; then
  (
    cd "$root"
    launch/setup.sh
    cmake --preset cuda-release --log-level=NOTICE
    cmake --build --preset cuda-release --target decode_bench_gpu decode_kernels_gpu
  )
fi
peer=${PEER:-}
if [ -z "$peer" ]; then
  if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    peer=1
  else
    peer=0
    echo "python3 has no torch that finds the GPU: PyTorch is left out" >&2
  fi
fi
mkdir -p "$out"
rm -f "$out/results.jsonl"

"$bin/decode_bench_gpu" --check "$out/texts.jsonl"
python3 "$here/compare.py" "$out/texts.jsonl"
rm -f "$out"/texts.jsonl*

for shape in llama-1b qwen3-0.6b llama-8b; do
  "$bin/decode_bench_gpu" --shape $shape --batch 1 --json "$out/results.jsonl"
  "$bin/decode_bench_gpu" --shape $shape --batch 32 --prefill 0 --json "$out/results.jsonl"
  if [ "$peer" = 1 ]; then python3 "$here/pytorch_peer.py" --shape $shape --json "$out/results.jsonl"; fi
done
"$bin/decode_kernels_gpu" | tee "$out/kernels.txt"
python3 "$here/table.py" "$out/results.jsonl"
