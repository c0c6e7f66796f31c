#!/usr/bin/env bash
# compute-sanitizer over the CUDA test programs, one run a tool and program, then a table. Exit code 0: every run ended, ran
# tests and found nothing; 1: something was found, did not end or ran no test; 2: the tool or a program is not there.
#   tests/sanitize_gpu.sh [build folder]      default build/cuda-release, whose tests are built
# Environment:
#   TOOLS="memcheck racecheck initcheck"      which tools
#   SUITES="attention hopper rowwise gemm"    which programs and tests, see suite() below
#   EACH=150                                  seconds a run may take before it is ended (and counts as failed)
#   JOBS=1                                    runs side by side; they share the GPU
#   LARGEST=20000000                          elements of the largest array of a test: a tool makes kernels a hundred times slower
#   LIBRARIES=0                               1 checks cuDNN's kernels, too, in memcheck and racecheck
#   OUT=<build folder>/sanitize               where the tools' reports go
# initcheck runs with arrays as cudaMalloc gives them. Tests that compare the gaps between outputs with what was written there
# fail then by design, so its own count decides; with the other tools a failed test fails the run as well.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(cd "${1:-$root/build/cuda-release}" 2> /dev/null && pwd) || { echo "no build folder ${1:-$root/build/cuda-release}" >&2; exit 2; }
tools=${TOOLS:-memcheck racecheck initcheck}
suites=${SUITES:-attention hopper rowwise gemm}
each=${EACH:-150}
jobs=${JOBS:-1}
out=${OUT:-$build/sanitize}
export KTG_TEST_LARGEST=${LARGEST:-20000000}

sanitizer=$(command -v compute-sanitizer || true)
for there in /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer; do
  if [ -z "$sanitizer" ] && [ -x "$there/compute-sanitizer" ]; then sanitizer=$there/compute-sanitizer; fi
done
[ -n "$sanitizer" ] || { echo "no compute-sanitizer: it is part of the CUDA toolkit" >&2; exit 2; }

# suite NAME: sets program and filter. Odd small sizes; those of training take minutes under a tool.
suite() {
  case $1 in
    attention) program=kernels_cuda_attention_test filter='*CudaAttentionTest.*OverOddSizes*/bf16:*CudaAttentionTest.Gradients*/bf16:*CudaAttentionTest.LseMayBeNull*/bf16' ;;
    hopper) program=kernels_cuda_attention_test filter='*CudaHopper*-*Training*' ;;
    rowwise) program=kernels_cuda_rowwise_test filter='*CudaNormTest.RmsNorm*/bf16:*CudaReductionTest.CrossEntropyMatches*/bf16:*CudaEmbeddingTest.Backward*/bf16:*CudaElementwiseTest.AdamwMatches*/bf16' ;;
    gemm) program=kernels_cuda_gemm_test filter='*CudaGemmTest.BiasGradient*/bf16:*CudaGemmTest.Gelu*/bf16' ;;
    *) echo "no suite $1: attention, hopper, rowwise, gemm" >&2; return 1 ;;
  esac
}
for name in $suites; do
  suite "$name" || exit 2
  [ -x "$build/tests/$program" ] || { echo "no $build/tests/$program: build it first" >&2; exit 2; }
done
for tool in $tools; do
  case $tool in memcheck | racecheck | initcheck) ;; *) echo "no tool $tool: memcheck, racecheck, initcheck" >&2; exit 2 ;; esac
done
mkdir -p "$out"

# check TOOL SUITE: one run. Writes a line of the table and "ok" or why not.
check() {
  local tool=$1 name=$2 report=$out/$1.$2.txt begin=$SECONDS rc ran failed found verdict=ok
  local -a options=(--tool "$tool" --error-exitcode 9 --print-limit 20)
  suite "$name"
  case $tool in
    memcheck) options+=(--leak-check no) ;;
    # A copy of a whole buffer reads its padding, which no kernel does.
    initcheck) options+=(--check-api-memory-access no) ;;
  esac
  # The libraries' kernels are not ours to mend, and slow under a tool. initcheck must see what they write.
  if [ "${LIBRARIES:-0}" != 1 ] && [ "$tool" != initcheck ] && [ "$name" = attention ]; then options+=(--kernel-name-exclude kns=cudnn); fi
  rm -f "$report"
  (
    if [ "$tool" = initcheck ]; then export KTG_TEST_UNWRITTEN=1; fi
    exec timeout -k 5 "$each" "$sanitizer" "${options[@]}" "$build/tests/$program" --gtest_color=no --gtest_filter="$filter"
  ) > "$report" 2>&1
  rc=$?
  ran=$(sed -n 's/^\[==========\] \([0-9]*\) tests\{0,1\} from .* ran.*/\1/p' "$report" | tail -n 1)
  failed=$(grep -c '^\[  FAILED  \] .*(' "$report")
  found=$(sed -n 's/^=* *\(ERROR\|RACECHECK\) SUMMARY: //p' "$report" | tail -n 1)
  case $found in
    "0 errors"* | "0 hazards displayed (0 errors, 0 warnings)"*) ;;
    "") verdict="no summary" ;;
    *) verdict="found something" ;;
  esac
  if [ "$rc" = 124 ] || [ "$rc" = 137 ]; then
    verdict="did not end within $each s"
  elif [ "${ran:-0}" = 0 ]; then
    verdict="ran no test"
  elif [ "$verdict" = ok ] && [ "$tool" != initcheck ] && [ "$rc" != 0 ]; then
    verdict="exit code $rc"
  fi
  printf '%-10s %-10s %5s s %5s tests %3s failed  %-14s %s\n' "$tool" "$name" $((SECONDS - begin)) "${ran:-0}" "$failed" "$verdict" "$found" > "$report.line"
  echo "$verdict" > "$report.verdict"
}

rm -f "$out"/*.line "$out"/*.verdict
for tool in $tools; do
  for name in $suites; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    check "$tool" "$name" &
  done
done
wait

bad=0
for tool in $tools; do
  for name in $suites; do
    cat "$out/$tool.$name.txt.line" || bad=1
    [ "$(cat "$out/$tool.$name.txt.verdict")" = ok ] || bad=1
  done
done
if [ $bad = 0 ]; then echo "nothing found"; else echo "NOT CLEAN; the reports are in $out"; fi
exit $bad
