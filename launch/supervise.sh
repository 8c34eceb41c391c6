#!/usr/bin/env bash
# Runs a command on one host of a job, and starts it again where that helps.
#
#   launch/supervise.sh [--retries=N] [--delay=SECONDS] [--state=DIRECTORY] -- COMMAND [ARGUMENT ...]
#
# Exit code of the command: 0 or 2 (a wrong setting) ends; 75 (stopped with a checkpoint) starts it
# again, unless TERM or INT came here; any other starts it again at most N (3) times, after DELAY (5)
# seconds. TERM and INT are passed on to the command, which then has all the time it needs.
#   --state  where `pid` and `exit` of the supervisor are kept, and `lock` is held while it runs
# Exit code: the last one of the command.
set -euo pipefail

retries=3 delay=5 state=''
say() { printf 'supervise: %s\n' "$*" >&2; }
while (($#)); do
  case $1 in
    --retries=*) retries=${1#*=} ;;
    --delay=*) delay=${1#*=} ;;
    --state=*) state=${1#*=} ;;
    --) shift; break ;;
    *) say "unknown argument '$1'; the command follows --"; exit 2 ;;
  esac
  shift
done
(($#)) || { say 'no command after --'; exit 2; }
[[ $retries =~ ^[0-9]+$ ]] || { say "--retries=$retries is not a number >= 0"; exit 2; }

if [[ -n $state ]]; then
  mkdir -p "$state"
  exec 9>"$state/lock"
  flock -w 5 9 || { say 'a command is running on this host already'; exit 2; }
  rm -f "$state/exit"
  echo $$ >"$state/pid"
fi
finish() {
  [[ -z $state ]] || { echo "$1" >"$state/exit.part" && mv "$state/exit.part" "$state/exit"; }
  exit "$1"
}

child='' stopping='' interrupted=''
# shellcheck disable=SC2317  # the trap calls it
stop() {
  stopping=1 interrupted=1
  if [[ -n $child ]]; then kill -TERM "$child" || true; fi
}
trap stop TERM INT

failures=0
while true; do
  "$@" &
  child=$!
  [[ -z $stopping ]] || kill -TERM "$child" || true
  # A trapped signal ends `wait` early, with a code above 128, while the command is still saving.
  code=0 interrupted=''
  wait "$child" || code=$?
  while [[ -n $interrupted ]]; do
    interrupted='' again=0
    wait "$child" 2>/dev/null || again=$?
    ((again == 127)) || code=$again # 127: the first wait had its code already
  done
  child=''
  if [[ -n $stopping || $code == 0 || $code == 2 ]]; then break; fi
  if [[ $code != 75 ]]; then
    failures=$((failures + 1))
    if ((failures > retries)); then
      say "exit code $code; all $retries retries are used"
      break
    fi
    say "exit code $code; retry $failures of $retries in $delay s"
  else
    say "stopped with a checkpoint; starting again in $delay s"
  fi
  sleep "$delay" &
  wait $! || true # TERM ends the pause
  if [[ -n $stopping ]]; then break; fi
done
finish "$code"
