#!/usr/bin/env bash
# Lint, formatting, types, committed numbers and tests: everything a change has to pass.
#
#   launch/test.sh                     all quick tests
#   launch/test.sh -m slow             the slow ones
#   launch/test.sh tests/test_x.py -x  any pytest arguments
#
# PYTHON and QKATTN_VENV: see launch/venv.sh. Exit code 0 only when all pass.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=${here%/*}
venv=${QKATTN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=${PWD%/}/$venv

selection=(-m 'not slow')
# Every worker imports JAX and compiles on several threads; more than four compete for memory.
# Each worker takes consecutive tests, so that most module fixtures are built once.
workers=(-n auto --maxprocesses 4 --dist worksteal)
for argument in "$@"; do
  case $argument in
    -m | -m[!-]*) selection=() ;;
    -n | -n[0-9a]* | --numprocesses* | --pdb | --trace) workers=() ;;
  esac
done

bash "$here/venv.sh"
cd "$root"
failed=()
"$venv/bin/python" -m ruff check --output-format concise . || failed+=('ruff check')
"$venv/bin/python" -m ruff format --check --output-format concise . || failed+=('ruff format')
"$venv/bin/python" -m mypy &  # beside experiments.verify: each takes one core
types=$!
"$venv/bin/python" -m experiments.verify || failed+=('experiments.verify')
wait "$types" || failed+=('mypy')
# The expansions keep an empty array legal under `set -u` in bash 4.3 and older.
"$venv/bin/python" -m pytest ${workers[@]+"${workers[@]}"} ${selection[@]+"${selection[@]}"} "$@" ||
  failed+=('pytest')

if ((${#failed[@]})); then
  printf 'test: failed:%s\n' "$(printf ' %s;' "${failed[@]}")" >&2
  exit 1
fi
echo 'test: all passed'
