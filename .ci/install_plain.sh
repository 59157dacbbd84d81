#!/usr/bin/env bash
# `pip install .` as others do it: build isolation, no framework, run from another folder; then
# `pip uninstall`, which leaves nothing.
set -euo pipefail
work=$1
export SKBUILD_BUILD_DIR=$work/plain-build
"${PYTHON:-python3}" -m venv "$work/plain"
"$work/plain/bin/pip" install --quiet .
cd "$work"
"$work/plain/bin/sdp" --version
"$work/plain/bin/python" - <<'PYTHON'
import sys

import sdp_plugins.core as core

frameworks = {"torch", "tensorflow", "jax", "keras", "lightning", "mpi4py"} & set(sys.modules)
assert not frameworks, frameworks
assert core.Group.from_env().world_size == 1
print("imported", core.__file__)
PYTHON
"$work/plain/bin/pip" uninstall --quiet --yes sdp-plugins
left=$(find "$work"/plain/lib/python3*/site-packages -maxdepth 1 -name '*sdp*' -o -name 'smd*')
if [ -n "$left" ]; then
  echo "pip uninstall has left $left"
  exit 1
fi
