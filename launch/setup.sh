#!/usr/bin/env bash
# Looks for what Kintsugi needs to build and run, and installs what is missing by apt (Debian 12, Ubuntu 24.04). Says
# what it installs; asks sudo only then; a machine that has everything is left alone within a second. Without apt, or
# without the right to install, it lists what is missing and ends with 1. Where launch/preset.sh chooses a build for the
# GPU, setup_cuda.sh then sees to what that needs; the CUDA toolkit and the driver are never touched.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

# One need a line: a command, Python modules or a header that prove that it is there, and the package that brings it.
needs="
command cmake cmake
command ninja ninja-build
command g++ g++
command pkg-config pkg-config
command ccache ccache
python argparse,hashlib,json,subprocess,tempfile,zlib python3
command mpirun openmpi-bin
command mpicxx libopenmpi-dev
header fmt/format.h libfmt-dev
header spdlog/spdlog.h libspdlog-dev
header toml++/toml.h libtomlplusplus-dev
header nlohmann/json.hpp nlohmann-json3-dev
header CLI/CLI.hpp libcli11-dev
header hdf5.h libhdf5-dev
header xxhash.h libxxhash-dev
header isa-l/crc.h libisal-dev
header pcre2.h libpcre2-dev
header utf8proc.h libutf8proc-dev
header openssl/evp.h libssl-dev
header gtest/gtest.h libgtest-dev
header gmock/gmock.h libgmock-dev
header benchmark/benchmark.h libbenchmark-dev
"
# Without it the CPU's matrix products are the built-in, slower ones.
wishes="
header dnnl.hpp libdnnl-dev
"

# Packages of the list in $1 whose proof is missing, one a line. The preprocessor looks for all headers at once.
missing() {
  local kind proof package probes=""
  while read -r kind proof package; do
    case $kind in
      command) command -v "$proof" > /dev/null || echo "$package" ;;
      python) python3 -c "import $proof" 2> /dev/null || echo "$package" ;;
      header) probes+="#if !__has_include(<$proof>)"$'\n'"$package"$'\n'"#endif"$'\n' ;;
    esac
  done <<< "$1"
  if command -v g++ > /dev/null; then
    # HDF5's serial build has a folder of its own.
    g++ -std=c++20 -I/usr/include/hdf5/serial -E -P -x c++ - <<< "$probes" | sed '/^[[:space:]]*$/d; s/ //g'
  else
    sed '/^#/d; /^$/d' <<< "$probes"
  fi
}

say() { printf 'setup: %s\n' "$*"; }

preset=$("$here/preset.sh")
gpu() {
  case $preset in
    cuda*) "$here/setup_cuda.sh" ;;
    *) if nvidia-smi > /dev/null 2>&1; then
      say "there is an NVIDIA GPU but no nvcc in PATH: everything is built for the CPU. For the GPU install CUDA Toolkit 13 (cuda-toolkit-13-0)"
    fi ;;
  esac
}
case $preset in
  cuda*) needs+=$'python pip python3-pip\n' ;;
esac

mapfile -t want < <(missing "$needs")
mapfile -t wish < <(missing "$wishes")
if [ ${#want[@]} = 0 ] && [ ${#wish[@]} = 0 ]; then
  gpu
  exit 0
fi
# Ends for want of a way to install: with 1, unless nothing but wishes is missing.
cannot_install() {
  [ ${#want[@]} = 0 ] || say "$1; please install what these Debian packages hold: ${want[*]}"
  [ ${#wish[@]} = 0 ] || say "for fast matrix products, too: ${wish[*]}"
  [ ${#want[@]} = 0 ] || exit 1
  gpu
  exit 0
}
command -v apt-get > /dev/null || cannot_install "there is no apt here"
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo > /dev/null || cannot_install "neither root nor sudo"
  as_root=(sudo)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() {
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 "$@" > "$log" 2>&1; then
    cat "$log"
    say "apt-get $1 failed"
    exit 1
  fi
}

say "reading the package lists"
apt_get update
for package in "${wish[@]}"; do
  if apt-cache show "$package" > /dev/null 2>&1; then
    want+=("$package")
  else
    say "$package is in none of them: matrix products will be the built-in, slower ones"
  fi
done
if [ ${#want[@]} != 0 ]; then
  say "installing ${want[*]}"
  apt_get install --no-install-recommends "${want[@]}"
fi
mapfile -t left < <(missing "$needs")
if [ ${#left[@]} != 0 ]; then
  say "still missing after the installation: ${left[*]}"
  exit 1
fi
gpu
