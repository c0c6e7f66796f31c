#!/usr/bin/env bash
# The quick start: installs what is missing, builds, trains on Jane Austen's novels with 8 ranks of which one is killed on
# the way, shows how the run mended itself, trains once more undisturbed, compares the two results bit for bit, and
# writes some text with the model; on a GPU where launch/preset.sh finds one. Each step of a fresh machine is done once: a second call begins to train at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
preset=$(launch/preset.sh)
bin=build/$preset/bin
config=experiments/quick_start/quick_start.toml
out=outputs/quick_start

say() { printf '\n== %s\n' "$*"; }

mpi=(mpirun -np 8 --oversubscribe)
if [ "$(id -u)" = 0 ]; then
  mpi+=(--allow-run-as-root)
fi

say "Packages"
launch/setup.sh

say "Build"
cmake --preset "$preset" -DKTG_UNITY=ON --log-level=NOTICE
cmake --build --preset "$preset" --target train infer

say "Text"
experiments/quick_start/get_corpus.py

# Earlier results of this script are replaced; train itself never overwrites a run.
rm -rf "$out"
mkdir -p "$out"

say "Train with 8 ranks; rank 3 is killed on the way"
"${mpi[@]}" "$bin/train" "$config" --out "$out/disturbed"

say "The recovery, by phases"
experiments/quick_start/report.py recovery "$out/disturbed"

say "Train the same steps undisturbed"
"${mpi[@]}" "$bin/train" "$config" --out "$out/undisturbed" --set "fault.kill=[]"

say "Compare"
experiments/quick_start/report.py compare "$out/disturbed" "$out/undisturbed"

say "Sample"
"$bin/infer" generate "$out/disturbed" --prompt "Elizabeth had never" --max-tokens 230 --temperature 0.8 --seed 1
