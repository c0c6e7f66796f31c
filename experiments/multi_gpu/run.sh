#!/usr/bin/env bash
# run.sh N [options]: builds, runs the tests of the GPU and of recovery, and measures N GPUs of one host, in at most eight
# minutes: see measure.py, whose options these are. Needs mpirun and a python3 with torch. KTG_BUILD=0 takes the programs
# as they are. With N = 1 the collectives and the kills have two ranks share the GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "usage: experiments/multi_gpu/run.sh N [options]; N: GPUs of this host" >&2; exit 2; }
if [ "${KTG_BUILD:-1}" = 1 ]; then
  launch/setup.sh
  cmake --preset cuda-release --log-level=NOTICE
  cmake --build --preset cuda-release
fi
exec python3 experiments/multi_gpu/measure.py "$1" --spent "$SECONDS" "${@:2}"
