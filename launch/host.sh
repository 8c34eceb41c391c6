#!/usr/bin/env bash
# Sets up, starts and stops qkattn on one host, in its copy of the repository, for launch/tpu.py.
#
#   launch/host.sh setup [EXTRAS]                       makes .venv and installs the extras (tpu)
#   launch/host.sh start [flags of supervise.sh] -- train|ablate FLAGS...   detached
#   launch/host.sh status|logs
#   launch/host.sh stop [SECONDS]                       TERM, then waits for the checkpoint (300)
#
# `status` prints one line: qkattn HOST new|ready|running|lost|exit CODE. `lost`: the command was
# running when the host went down. State and log are in QKATTN_STATE (~/qkattn-run).
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
state=${QKATTN_STATE:-$HOME/qkattn-run}
mkdir -p "$state"
cd "$root"

is_running() { ! flock -n "$state/lock" true; }

setup() {
  rm -f "$state/ready"
  local candidate
  for candidate in python3.12 python3.11 python3.13; do
    if [[ -z ${PYTHON:-} ]] && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      export PYTHON=$candidate
    fi
  done
  if [[ -z ${PYTHON:-} ]]; then # images with Python 3.10 only
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    python3 -m uv python install 3.12
    PYTHON=$(python3 -m uv python find --managed-python 3.12)
    export PYTHON
  fi
  if [[ -e .venv/qkattn-stamp ]] && ! is_running; then # venv.sh cannot tell that nothing runs
    .venv/bin/python -m pip install --quiet -r requirements.txt
  fi
  launch/venv.sh
  .venv/bin/python -m pip install --quiet -c requirements.txt -e ".[${1:-tpu}]"
  touch "$state/ready"
}

start() {
  local flags=()
  while (($#)) && [[ $1 != -- ]]; do
    flags+=("$1")
    shift
  done
  if is_running; then
    echo 'running already'
    return
  fi
  rm -f "$state/exit" "$state/pid"
  PYTHONUNBUFFERED=1 nohup setsid launch/supervise.sh ${flags[@]+"${flags[@]}"} \
    --state="$state" -- .venv/bin/python -m qkattn "${@:2}" >>"$state/log" 2>&1 </dev/null &
  local supervisor=$!
  until [[ -f $state/pid ]]; do # so that `status` knows at once
    kill -0 "$supervisor" || return 1
    sleep 0.1
  done
}

status() {
  local state_name=new
  if is_running; then
    state_name=running
  elif [[ -f $state/exit ]]; then
    state_name="exit $(<"$state/exit")"
  elif [[ -f $state/pid ]]; then
    state_name=lost
  elif [[ -f $state/ready ]]; then
    state_name=ready
  fi
  echo "qkattn $(hostname) $state_name"
}

stop() {
  if ! is_running; then
    echo 'not running'
    return
  fi
  kill -TERM "$(<"$state/pid")"
  if ! flock -w "${1:-300}" "$state/lock" true; then
    echo "still saving after ${1:-300} s" >&2
    return 1
  fi
  echo "ended with exit code $(<"$state/exit")"
}

case ${1:-} in
  setup | start | status | stop) "$@" ;;
  logs) exec tail -n 200 -F "$state/log" ;;
  *)
    echo "unknown verb '${1:-}'; known: setup, start, status, logs and stop" >&2
    exit 2
    ;;
esac
