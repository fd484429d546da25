#!/usr/bin/env bash
# Build wheel and sdist, install the wheel by extra in an empty environment, and let it say its version: make package.
# usage: packaging/check_install.sh PYTHON [EXTRA ...]      "core" is no extra
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1; shift
extras=("${@:-core}")
rm -rf dist
"$python" -m build --no-isolation --outdir dist . >/dev/null
wheel=$(ls dist/*.whl)
for extra in "${extras[@]}"; do
  place=$(mktemp -d)
  "$python" -m venv "$place"
  [ "$extra" = core ] && what=$wheel || what="$wheel[$extra]"
  "$place/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt "$what"
  "$place/bin/pip" check --disable-pip-version-check
  (cd "$place" && env -u PYTHONPATH bin/python -c "
import importlib.resources as r, casewise
assert r.files('casewise').joinpath('py.typed').is_file(), 'not typed'
from casewise.data.phantom import cardiac_cohort
" && env -u PYTHONPATH bin/casewise --version && env -u PYTHONPATH bin/casewise --help >/dev/null)
  echo "ok: $extra"
  rm -rf "$place"
done
