#!/usr/bin/env bash
# Builds, checks gradients against PyTorch's, measures the shapes of the table and prints it: see measure.py, whose
# options these are. Needs a GPU and a python3 with torch. KTG_BUILD=0 takes the programs as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ "${KTG_BUILD:-1}" = 1 ]; then
  launch/setup.sh
  cmake --preset cuda-release --log-level=NOTICE
  cmake --build --preset cuda-release --target train gradient_dump
fi
exec python3 experiments/train_speed/measure.py "$@"
