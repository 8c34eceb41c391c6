#!/usr/bin/env bash
# Builds the pages of docs/ and the reference of the package, a site made from its docstrings.
#
#   launch/docs.sh                  builds into build/docs
#   launch/docs.sh DIRECTORY        builds into DIRECTORY, which must be empty, absent or an earlier site
#   launch/docs.sh --serve          also serves the site on http://localhost:8000, until Ctrl-C
#   launch/docs.sh --serve=PORT     ... on another port; DIRECTORY may follow
#
# A warning is an error, such as a link or an anchor that leads nowhere. Takes half a minute.
# PYTHON and QKATTN_VENV: see launch/venv.sh. Exit codes: 0 built, 1 a warning or an error of the
# build, or the port is taken, 2 wrong arguments, or no environment.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=${here%/*}
venv=${QKATTN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=${PWD%/}/$venv

say() { printf 'docs: %s\n' "$*" >&2; }
port=''
case ${1-} in
  --serve) port=8000 ;;
  --serve=*) port=${1#*=} ;;
esac
[[ -z $port ]] || shift
if (($# > 1)) || [[ ${1-} == -* ]] || [[ -n $port && ! $port =~ ^[0-9]+$ ]]; then
  say "takes --serve or --serve=PORT and a directory, but has: $*"
  exit 2
fi
site=${1:-$root/build/docs}
[[ $site == /* ]] || site=${PWD%/}/$site
# The build deletes what is in the directory, except names that begin with a point.
owner=$site/.made-by-qkattn
if [[ -e $site && ! -e $owner && -n $(ls -A "$site" 2>&1) ]]; then
  say "$site was not made by this script; name an empty directory"
  exit 2
fi

bash "$here/venv.sh"
mkdir -p "$site"
touch "$owner"
cd "$root"
# The theme prints a notice about the next version of mkdocs.
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --quiet \
  --config-file docs/site/mkdocs.yml --site-dir "$site"
say "built $site"
[[ -n $port ]] || exit 0
say "serving http://localhost:$port/"
exec "$venv/bin/python" -m http.server --bind localhost --directory "$site" "$port"
