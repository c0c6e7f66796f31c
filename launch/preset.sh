#!/usr/bin/env bash
# Prints the CMake preset that fits this machine: cuda-release where nvcc and a working NVIDIA driver are, cpu-release
# otherwise. KTG_PRESET says it outright.
set -euo pipefail
if [ -n "${KTG_PRESET:-}" ]; then
  echo "$KTG_PRESET"
elif command -v nvcc > /dev/null && nvidia-smi > /dev/null 2>&1; then
  echo cuda-release
else
  echo cpu-release
fi
