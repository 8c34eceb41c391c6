#!/usr/bin/env bash
# Creates or reuses the virtual environment that every launcher here runs in.
#
#   launch/venv.sh
#
# Needs Python >= 3.11 with its venv module, and a network for pip.
#   PYTHON       interpreter to use (default: the environment's own, else 3.12, 3.11 or what PATH has)
#   QKATTN_VENV  directory of the environment (default: .venv in the repository)
# Exit codes: 0 ready, 1 installation failed, 2 wrong setting or missing prerequisite.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=${here%/*}
venv=${QKATTN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=${PWD%/}/$venv
stamp=$venv/qkattn-stamp
owner=$venv/made-by-qkattn

say() { printf 'venv: %s\n' "$*" >&2; }
fail() { say "$1"; exit "${2:-2}"; }

is_recent() {
  "$1" -I -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1
}
can_make_venv() { "$1" -I -c 'import ensurepip, venv' >/dev/null 2>&1; }

choose_python() {
  local candidate without_venv=''
  if [[ -n ${PYTHON:-} ]]; then
    is_recent "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python >= 3.11; set PYTHON to one."
    can_make_venv "$PYTHON" || fail "$PYTHON has no venv module; install it (Debian: python3-venv)."
    python=$PYTHON
    return
  fi
  for candidate in "$venv/bin/python" python3.12 python3.11 python3.13 python3; do
    is_recent "$candidate" || continue
    if can_make_venv "$candidate"; then
      python=$candidate
      return
    fi
    without_venv=${without_venv:-$candidate}
  done
  [[ -z $without_venv ]] ||
    fail "$without_venv has no venv module; install it (Debian: python3-venv)."
  fail 'no Python >= 3.11 found on PATH; install one or set PYTHON to its path.'
}

# What the environment was created from. Its own path and the repository's are included: neither an
# environment nor an editable installation survives being copied elsewhere.
describe() {
  "$1" -I - "$venv" "$root" <<'PYTHON_SOURCE'
import hashlib, pathlib, platform, sys

venv, root = sys.argv[1:]
digest = hashlib.sha256()
for name in ('requirements.txt', 'pyproject.toml', 'setup.py'):
    digest.update(pathlib.Path(root, name).read_bytes())
print(f'python {sys.version_info.major}.{sys.version_info.minor} {platform.machine()}')
print(f'requirements {digest.hexdigest()}')
print(f'environment {venv}')
print(f'repository {root}')
PYTHON_SOURCE
}

is_ready() {
  [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && is_recent "$venv/bin/python"
}

choose_python
wanted=$(describe "$python")
if is_ready; then
  say "using $venv"
  exit 0
fi

# One installation at a time. The lock is held on a file that exists anyway, and pip inherits it:
# after a kill, the next call waits for a pip that is still running, then starts over.
if command -v flock >/dev/null; then
  exec 9<"$root/requirements.txt"
  flock -n 9 || { say 'waiting for another installation to finish'; flock 9; }
  if is_ready; then
    say "using $venv"
    exit 0
  fi
fi

if [[ -e $venv ]]; then
  if [[ ! -e $owner && -n $(ls -A "$venv" 2>&1) ]]; then
    fail "$venv exists and was not made by this script; remove it or set QKATTN_VENV to another path."
  fi
  # The chosen interpreter may be the one about to be removed.
  if [[ $python == "$venv/bin/python" ]]; then
    python=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
  fi
  say "$venv is incomplete or out of date; recreating it"
  rm -rf "$venv"
fi

say "creating $venv with $("$python" -I -c 'import sys; print("Python", sys.version.split()[0])')"
mkdir -p "$venv"
: >"$owner"
"$python" -I -m venv "$venv" || fail "$python could not create $venv; the reason is above." 1

pip=("$venv/bin/python" -I -m pip --disable-pip-version-check --quiet)
started=$SECONDS
say 'installing requirements.txt (a few minutes the first time)'
"${pip[@]}" install -r "$root/requirements.txt" ||
  fail 'pip could not install requirements.txt; the reason is above. Run this again to retry.' 1
"${pip[@]}" install --no-deps -e "$root" ||
  fail 'pip could not install the package itself; the reason is above. Run this again to retry.' 1

# Written last and atomically: an environment without it is recreated.
printf '%s\n' "$wanted" >"$stamp.part"
mv "$stamp.part" "$stamp"
say "ready after $((SECONDS - started)) s"
