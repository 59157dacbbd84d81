#!/usr/bin/env bash
# Runs the wheel for aarch64 in Debian's Python for aarch64, which qemu executes. As root, with
#   apt-get install debootstrap qemu-user
#
#   tests/wheels/aarch64.sh WHEEL [FOLDER]       FOLDER is kept, and used again
set -euo pipefail
wheel=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
folder=${2:-$(mktemp -d)}
mkdir -p "$folder"
cd "$folder"
[ $# -gt 1 ] || trap 'rm -rf "$folder"' EXIT

python=root/usr/bin/python3.13
if [ ! -e root/unpacked ]; then
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 trixie root >debootstrap.log
  for package in root/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" root; done
  touch root/unpacked
fi
rm -rf site
python3 -m pip install --quiet --target site --only-binary=:all: --python-version 3.13 \
  --implementation cp --abi cp313 --abi abi3 --abi none --platform manylinux_2_28_aarch64 \
  --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 "$wheel"

export PYTHONPATH=$PWD/site WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT
MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
ranks=()
for rank in 0 1; do
  RANK=$rank LOCAL_RANK=$rank timeout 1200 qemu-aarch64 -L root "$python" "$here/two_ranks.py" &
  ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank"; done
