#!/usr/bin/env bash
# From a fresh clone to a first report: installs the requirements, then runs the quickstart study.
#
#   launch/quickstart.sh [flags of experiments.ablate]
#
#   QKATTN_RUNS  directory for results (default: runs in the repository)
# The same command resumes the study. PYTHON and QKATTN_VENV: see launch/venv.sh.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=${here%/*}
venv=${QKATTN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=${PWD%/}/$venv
runs=${QKATTN_RUNS:-$root/runs}
[[ $runs == /* ]] || runs=${PWD%/}/$runs

bash "$here/venv.sh"
cd "$root"
exec "$venv/bin/python" -m experiments.ablate \
  --config=configs/quickstart.py --workdir="$runs/quickstart" --workers=auto "$@"
