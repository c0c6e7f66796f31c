#!/usr/bin/env bash
# Builds, measures how long a killed GPU rank takes to mend, and prints the table: see measure.py, whose options these are.
# Needs a GPU and mpirun. KTG_BUILD=0 takes the programs as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ "${KTG_BUILD:-1}" = 1 ]; then
  launch/setup.sh
  cmake --preset cuda-release --log-level=NOTICE
  cmake --build --preset cuda-release --target train nccl_probe
fi
exec python3 experiments/recovery_gpu/measure.py "$@"
