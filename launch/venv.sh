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
# environment of another clone, Python or other requirements.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=${here%/*}
venv=${QKATTN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=${PWD%/}/$venv
stamp=$venv/qkattn-stamp
owner=$venv/made-by-qkattn
pip=("$venv/bin/python" -I -m pip --disable-pip-version-check --quiet)

say() { printf 'venv: %s\n' "$*" >&2; }
fail() { say "$1"; exit "${2:-2}"; }

(($# == 0)) || fail "launch/venv.sh takes no arguments, but '$*'; its first lines say what it reads"

python=''
for candidate in "${PYTHON:-$venv/bin/python}" ${PYTHON:-python3.12 python3.11 python3.13 python3}; do
  if "$candidate" -I -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
    >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done
[[ -n $python ]] || fail "no Python >= 3.11 with its venv module (Debian: python3-venv) is \
${PYTHON:-on PATH}; install one or set PYTHON to its path."

# What the environment is for. Its own path and the repository's are included: neither an
# environment nor an editable installation survives being copied elsewhere.
wanted=$("$python" -I - "$venv" "$root" <<'PYTHON_SOURCE'
import hashlib, os, pathlib, platform, sys

venv, root = sys.argv[1:]
digest = hashlib.sha256()
for name in ('requirements.txt', 'pyproject.toml', 'setup.py'):
    digest.update(pathlib.Path(root, name).read_bytes())
print(f'python {sys.version_info.major}.{sys.version_info.minor} {platform.machine()}')
print(f'requirements {digest.hexdigest()}')
print(f'environment {os.path.realpath(venv)}')
print(f'repository {root}')
PYTHON_SOURCE
)

finish() {
  "${pip[@]}" install --no-deps -e "$root" ||
    fail 'pip could not install the package itself; the reason is above. Run this again to retry.' 1
  # Written last and atomically: an environment without it is incomplete.
  printf '%s\n' "$wanted" >"$stamp.part"
  mv "$stamp.part" "$stamp"
}

# A complete environment is used or left alone: jobs may run in it, here or on another host. If only
# the requirements differ and it meets them, the package alone is installed again.
if [[ -f $stamp ]]; then
  other=''
  while read -r line; do
    [[ $'\n'$wanted$'\n' == *$'\n'"$line"$'\n'* ]] || other+="${other:+, }${line/requirements */other requirements}"
  done <"$stamp"
  [[ -x $venv/bin/python ]] || other="python ${other#python }"
  if [[ $other == 'other requirements' ]] && "${pip[@]}" install --dry-run --no-deps --no-index \
    -r "$root/requirements.txt" >/dev/null 2>&1; then
    finish
  elif [[ -n $other ]]; then
    fail "$venv was made for $other; set QKATTN_VENV to another path, or, once nothing runs in it, \
remove it or run '$venv/bin/pip install -r $root/requirements.txt', and run this again."
  fi
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
  exec "$here/venv.sh"
fi
[[ ! -f $stamp ]] || exec "$here/venv.sh" # another installation has ended since the look above

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
finish
say "ready after $((SECONDS - started)) s"
