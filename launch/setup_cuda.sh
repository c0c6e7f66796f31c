#!/usr/bin/env bash
# What a build for the GPU needs beside the CUDA toolkit: fetches cudnn-frontend's headers (a Python wheel of 3 MB whose
# headers alone are kept) into build/third_party, and says which of NVIDIA's libraries are missing, what is off without
# them, and how to get them. Never fails: the build goes on without what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }

folder=build/third_party/cudnn-frontend
nvcc=$(readlink -f "$(command -v nvcc)")
toolkit=$(dirname "$(dirname "$nvcc")")
packages=$(python3 -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")

# has_header HEADER FOLDER: where kernels/cuda/libraries.cmake looks, too; FOLDER is that of pip's nvidia-* packages.
has_header() {
  g++ -I "$toolkit/include" -I "$packages/nvidia/$2/include" -I "$packages/include" -I "$folder/include" \
    -E -x c++ - > /dev/null 2>&1 <<< "#if !__has_include(<$1>)"$'\n'"#error"$'\n'"#endif"
}

if ! has_header cudnn_frontend.h cudnn; then
  say "fetching the headers of nvidia-cudnn-frontend into $folder"
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  if python3 -m pip download -q --retries 1 --timeout 10 --no-deps --only-binary :all: -d "$wheels" nvidia-cudnn-frontend > "$wheels/log" 2>&1; then
    mkdir -p "$folder"
    python3 -c "
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith('include/') or 'LICENSE' in n])
" "$wheels"/*.whl "$folder"
  else
    say "that failed ($(tail -n 1 "$wheels/log")); attention on the GPU will be the plain, slower one. By hand: pip install nvidia-cudnn-frontend"
  fi
fi
has_header cudnn.h cudnn ||
  say "no cuDNN: attention on the GPU will be the plain, slower one. To have it: apt install libcudnn9-dev-cuda-13, or pip install nvidia-cudnn-cu13"
has_header nccl.h nccl ||
  say "no NCCL: one GPU rank only. To have it: apt install libnccl-dev, or pip install nvidia-nccl-cu13"
has_header cupti.h cuda_cupti ||
  say "no CUPTI: traces show no kernels. It belongs to the CUDA toolkit (cuda-cupti-dev-13-0)"
