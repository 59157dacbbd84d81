#!/usr/bin/env bash
# Builds the wheels for this Python and processor, and installs them as others do: into a new
# environment, without a compiler, run from another folder; then `pip uninstall`, which leaves nothing.
set -euo pipefail
work=$1
tests=$PWD/tests/wheels
python=$(command -v "${PYTHON:-python3}")
make wheels ARGS="--out $work/dist --python $python --machine $(uname -m)"

"$python" -m venv "$work/plain"
"$work/plain/bin/pip" install --quiet "$work"/dist/sdp_plugins-*.whl
for name in "Apache License" "Wenzel Jakob" "Goetghebuer"; do  # in our file, and of what is linked
  grep -rq "$name" "$work"/plain/lib/python3*/site-packages/sdp_plugins-*/licenses || {
    echo "the wheel has no licence of $name"
    exit 1
  }
done
cd "$work"
export PATH=$work/plain/bin:$PATH CC=none CXX=none
python - <<'PYTHON'
import importlib.util
import sys

import sdp_plugins.core as core

frameworks = {"torch", "tensorflow", "jax", "keras", "lightning", "mpi4py"} & set(sys.modules)
assert not frameworks, frameworks
assert core.Group.from_env().world_size == 1
for name in ("smdistributed", "smddpcommon"):  # SMDDP's own wheel may have them
    assert importlib.util.find_spec(name) is None, name
print("imported", core.__file__)
PYTHON
sdp run -n 2 "$tests/two_ranks.py"
pip install --quiet dist/sdp_plugins_smddp-*.whl
smddprun -n 1 python -c "import smdistributed.dataparallel, smddpcommon"
pip uninstall --quiet --yes sdp-plugins sdp-plugins-smddp
for left in plain/lib/python3*/site-packages/{*sdp*,smd*} plain/bin/{sdp*,smddp*}; do
  if [ -e "$left" ]; then
    echo "pip uninstall has left $left"
    exit 1
  fi
done
