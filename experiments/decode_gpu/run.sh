#!/usr/bin/env bash
# Decode and prefill on one GPU: checks, then measures, then prints a table.
#   run.sh [folder for results]          PEER=1: PyTorch, compiled, beside each line (some minutes)
# BIN: folder of the programs (default: build/cuda-release/bin). Python: torch, numpy.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${BIN:-$here/../../build/cuda-release/bin}
out=${1:-$here/../../build/decode_gpu}
mkdir -p "$out"
rm -f "$out/results.jsonl"

"$bin/decode_bench_gpu" --check "$out/texts.jsonl"
python3 "$here/compare.py" "$out/texts.jsonl"
rm -f "$out"/texts.jsonl*

for shape in llama-1b qwen3-0.6b llama-8b; do
  "$bin/decode_bench_gpu" --shape $shape --batch 1 --json "$out/results.jsonl"
  "$bin/decode_bench_gpu" --shape $shape --batch 32 --prefill 0 --json "$out/results.jsonl"
  if [ "${PEER:-0}" = 1 ]; then python3 "$here/pytorch_peer.py" --shape $shape --json "$out/results.jsonl"; fi
done
"$bin/decode_kernels_gpu" | tee "$out/kernels.txt"
python3 "$here/table.py" "$out/results.jsonl"
