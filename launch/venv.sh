#!/usr/bin/env bash
# Creates or reuses the virtual environment that every launcher here runs in.
#
#   launch/venv.sh
#
# Needs Python >= 3.11 with its venv module, and a network for pip. An environment belongs to one
# clone of the repository. Once it is complete, nothing here deletes it or replaces what is in it.
#   PYTHON       interpreter to use (default: the environment's own, else 3.12, 3.11 or what PATH has)
#   QKATTN_VENV  directory of the environment (default: .venv in the repository)
# Exit codes: 0 ready, 1 installation failed, 2 wrong setting, missing prerequisite, or an
# environment of another clone or of other requirements.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=${here%/*}
venv=${QKATTN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=${PWD%/}/$venv
stamp=$venv/qkattn-stamp
owner=$venv/made-by-qkattn
pip=("$venv/bin/python" -I -m pip --disable-pip-version-check --quiet)

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

# What the environment is for. Its own path and the repository's are included: neither an
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

install_package() {
  "${pip[@]}" install --no-deps -e "$root" ||
    fail 'pip could not install the package itself; the reason is above. Run this again to retry.' 1
  # Written last and atomically: an environment without it is incomplete.
  printf '%s\n' "$wanted" >"$stamp.part"
  mv "$stamp.part" "$stamp"
}

# Whether a complete environment serves this repository, or a sentence that says why not. Jobs may
# run in it, here or on another host, and what they import later has to be of the version that they
# began with. So packages are neither deleted nor upgraded, and no link is set to an environment
# beside it: an interpreter looks for its packages through the link that it was started by.
check_complete() {
  local python_of digest_of venv_of root_of free='stop what runs in it and remove it'
  { read -r _ python_of; read -r _ digest_of; read -r _ venv_of; read -r _ root_of; } <"$stamp"
  # The same file, as a file system may be mounted at two paths.
  [[ $venv_of -ef $venv && $root_of -ef $root ]] ||
    fail "$venv was made as $venv_of for $root_of; set QKATTN_VENV to another path, or $free."
  { is_recent "$venv/bin/python" && [[ $wanted == "python $python_of"$'\n'* ]]; } ||
    fail "$venv is for Python $python_of, unlike PYTHON or this machine; set QKATTN_VENV to \
another path, or $free."
  [[ $wanted != *$'\n'"requirements $digest_of"$'\n'* ]] || return 0
  "${pip[@]}" install --dry-run --no-deps --no-index -r "$root/requirements.txt" >/dev/null 2>&1 ||
    fail "$venv has other packages than requirements.txt; once nothing runs in it, update it by \
'$venv/bin/pip install -r $root/requirements.txt', or remove it, and run this again."
  install_package
}

choose_python
wanted=$(describe "$python")
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && is_recent "$venv/bin/python"; then
  say "using $venv"
  exit 0
fi
if [[ -e $venv && ! -e $owner && -n $(ls -A "$venv" 2>&1) ]]; then
  fail "$venv exists and was not made by this script; remove it or set QKATTN_VENV to another path."
fi

# One installation at a time. The lock is on a file that is open for writing, as NFS demands, and pip
# inherits it: after a kill, the next call waits for a pip that is still running, then starts over.
mkdir -p "$venv"
exec 9>>"$owner"
if command -v flock >/dev/null && ! flock -n 9; then
  say 'waiting for another installation to finish'
  flock 9
fi
if [[ -f $stamp ]]; then
  check_complete
  say "using $venv"
  exit 0
fi
root_of=$(<"$owner")
[[ -z $root_of || $root_of -ef $root ]] ||
  fail "$venv is incomplete, and for $root_of; set QKATTN_VENV to another path, or remove it."
printf '%s\n' "$root" >"$owner"

# Incomplete: nothing runs in it. The chosen interpreter may be the one about to be removed.
if [[ $python == "$venv/bin/python" ]]; then
  python=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
fi
for entry in "$venv"/*; do
  [[ $entry == "$owner" ]] || rm -rf "$entry"
done

say "creating $venv with $("$python" -I -c 'import sys; print("Python", sys.version.split()[0])')"
"$python" -I -m venv "$venv" || fail "$python could not create $venv; the reason is above." 1
started=$SECONDS
say 'installing requirements.txt (a few minutes the first time)'
"${pip[@]}" install -r "$root/requirements.txt" ||
  fail 'pip could not install requirements.txt; the reason is above. Run this again to retry.' 1
install_package
say "ready after $((SECONDS - started)) s"
