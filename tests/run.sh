#!/usr/bin/env bash
# Installs what is missing, builds everything, and runs every test but the slow ones: those of the GPU, too, where
# launch/preset.sh finds one.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
preset=$(launch/preset.sh)
cmake --preset "$preset" -DKTG_UNITY=ON
cmake --build --preset "$preset"
ctest --preset "$preset" -LE slow -j "$(nproc)"
