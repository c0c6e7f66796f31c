#!/usr/bin/env bash
# All-reduce between processes of one machine: Kintsugi, Open MPI and gloo (PyTorch), in one run.
#
#   experiments/collectives/run.sh [out-folder]
#
# Builds comm_bench and the Open MPI program, runs all of them at 2 and 8 ranks, and writes table.md and results.json;
# then measures what waiting ranks take from working ones. About three minutes.
# KTG_PYTHON names a Python that has torch; without one gloo's column stays empty. KTG_ROUNDS: 3 unless set.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:-$here/results}
python=${KTG_PYTHON:-python3}
sizes="4096 65536 1048576 67108864"
mkdir -p "$out"

cd "$root"
cmake --preset cpu-release >/dev/null
cmake --build --preset cpu-release --target comm_bench waiting_cost >/dev/null
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
# The rounds go in turn, so that no program alone meets a quiet or a busy moment; the table shows the median of the rounds.
for round in $(seq "${KTG_ROUNDS:-3}"); do
  for ranks in 2 8; do
    echo "round $round, $ranks ranks"
    for memory in symmetric private; do
      for size in $sizes; do
        "$bench" --ranks $ranks -b $size -e $size -a direct -m $memory -J "$out/kintsugi_$memory.$ranks.$size.$round.json" >/dev/null
      done
    done
    if [ $have_mpi = 1 ]; then
      mpirun --oversubscribe -np $ranks "$out/mpi_all_reduce" "$out/open_mpi.$ranks.all.$round.json" $sizes
    fi
    if [ $have_gloo = 1 ]; then
      "$python" "$here/gloo_all_reduce.py" $ranks "$out/gloo.$ranks.all.$round.json" $sizes 2>/dev/null
    fi
  done
done
"$root/build/cpu-release/bin/waiting_cost" | tee "$out/waiting_cost.txt"
"$python" "$here/summarize.py" "$out" > "$out/table.md"
rm -f "$out"/*.[28].*.json "$out/mpi_all_reduce"
cat "$out/table.md"
