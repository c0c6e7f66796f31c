#!/usr/bin/env bash
# Installs what is missing, builds everything, and runs every test but the slow ones.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
cmake --preset cpu-release
cmake --build --preset cpu-release
ctest --preset cpu-release -LE slow -j "$(nproc)"
