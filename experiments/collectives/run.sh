#!/usr/bin/env bash
# All-reduce between processes of one machine: Kintsugi, Open MPI and gloo (PyTorch), in one run.
#
#   experiments/collectives/run.sh [out-folder]
#
# Builds comm_bench and the Open MPI program, runs all of them at 2 and 8 ranks, and writes table.md and results.json.
# KTG_PYTHON names a Python that has torch; without one gloo's column stays empty.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:-$here/results}
python=${KTG_PYTHON:-python3}
sizes="4096 65536 1048576 67108864"
mkdir -p "$out"

cd "$root"
cmake --preset cpu-release >/dev/null
cmake --build --preset cpu-release --target comm_bench >/dev/null
bench=$root/build/cpu-release/bin/comm_bench
have_mpi=0
if command -v mpicxx >/dev/null && command -v mpirun >/dev/null; then
  mpicxx -O3 -std=c++20 -o "$out/mpi_all_reduce" "$here/mpi_all_reduce.cc" && have_mpi=1
else
  echo "no Open MPI (libopenmpi-dev, openmpi-bin): its column stays empty"
fi
have_gloo=0
if "$python" -c 'import torch' 2>/dev/null; then have_gloo=1; else echo "no torch in $python: gloo's column stays empty"; fi

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
rm -f "$out"/*.json
# Three rounds, so that no program meets a quiet machine alone; summarize.py takes the median of the rounds.
for round in 1 2 3; do
  for ranks in 2 8; do
    echo "round $round, $ranks ranks"
    for size in $sizes; do
      for memory in symmetric private; do
        "$bench" --ranks $ranks -b $size -e $size -a direct -m $memory -J "$out/kintsugi_$memory.$ranks.$size.$round.json" >/dev/null
      done
      if [ $have_mpi = 1 ]; then
        mpirun --oversubscribe -np $ranks "$out/mpi_all_reduce" "$out/open_mpi.$ranks.$size.$round.json" $size
      fi
      if [ $have_gloo = 1 ]; then
        "$python" "$here/gloo_all_reduce.py" $ranks "$out/gloo.$ranks.$size.$round.json" $size 2>/dev/null
      fi
    done
  done
done
"$python" "$here/summarize.py" "$out" > "$out/table.md"
cat "$out/table.md"
