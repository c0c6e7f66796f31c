#!/usr/bin/env bash
# A real run by one command: sets up, builds, trains austen_25m.toml with one rank, and keeps in results/ (or $1) the
# loss curve (CSV and SVG), a sample of the best checkpoint, and the seconds it took. KTG_BIN names the folder of ready
# programs, and then nothing is set up or built; KTG_TRAIN_ARGS is handed to train.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=experiments/austen_25m
results=${1:-$here/results}
out=${KTG_OUT:-outputs/austen_25m}
bin=${KTG_BIN:-}
if [ -z "$bin" ]; then
  launch/setup.sh
  preset=$(launch/preset.sh)
  cmake --preset "$preset" --log-level=NOTICE
  cmake --build --preset "$preset" --target train infer
  bin=build/$preset/bin
fi
experiments/quick_start/get_corpus.py
rm -rf "$out"
mkdir -p "$(dirname "$out")" "$results"
begin=$(date +%s.%N)
# shellcheck disable=SC2086
"$bin/train" "$here/austen_25m.toml" --out "$out" ${KTG_TRAIN_ARGS:-}
seconds=$(python3 -c "print(f'{$(date +%s.%N) - $begin:.1f}')")
checkpoint=$("$here/report.py" "$out" --results "$results" --seconds "$seconds")
"$bin/infer" generate "$out/checkpoint/$checkpoint" --prompt "It is a truth universally acknowledged, that " --max-tokens 460 \
  --temperature 0.7 --seed 1 | tee "$results/sample.txt"
