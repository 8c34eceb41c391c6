#!/usr/bin/env bash
# Builds the wheel and the source archive, and uses the wheel as a stranger would.
#
#   launch/check_wheel.sh           builds into a temporary directory, which is deleted
#   launch/check_wheel.sh dist/     builds into dist/, which must be empty or absent
#
# The source archive must give the same wheel. Then two empty environments, away from this
# directory: the first has the wheel and its core dependencies alone, and runs the README's library
# example; the second has the extra [lab], where the command lists its configs and trains a tiny
# model. Needs Python >= 3.11 (PYTHON, default python3) and a network for pip.
# Exit codes: 0 all of it works, 1 something does not, 2 wrong arguments.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=${here%/*}
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf 'wheel: %s\n' "$*" >&2; }
if (($# > 1)); then
  say "takes at most one argument, a directory, but has $#: $*"
  exit 2
fi
built=${1:-$scratch/dist}
mkdir -p "$built"
built=$(CDPATH='' cd -- "$built" && pwd -P)
if [[ -n $(ls -A "$built") ]]; then
  say "$built is not empty; name an empty directory"
  exit 2
fi

# An empty environment of its own: its name, and what pip installs into it.
environment() {
  local name=$1
  shift
  "$python" -m venv "$scratch/$name"
  "$scratch/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

say 'building'
environment build build
# Setuptools writes beside what it builds, so it builds a copy of the committed files.
git -C "$root" archive --format=tar HEAD | (mkdir "$scratch/source" && tar -x -C "$scratch/source")
"$scratch/build/bin/python" -m build --outdir "$built" "$scratch/source" >"$scratch/build.log" ||
  { cat "$scratch/build.log" >&2; exit 1; }
wheel=$(ls "$built"/qkattn-*.whl)
archive=$(ls "$built"/qkattn-*.tar.gz)

say 'comparing the wheel with one of the source archive'
"$scratch/build/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --wheel-dir "$scratch/again" "$archive"
"$python" - "$wheel" "$scratch/again" <<'PYTHON'
import pathlib, sys, zipfile

def files(path):
    with zipfile.ZipFile(path) as wheel:
        return {i.filename: i.CRC for i in wheel.infolist() if not i.filename.endswith('RECORD')}

built = files(sys.argv[1])
(again,) = map(files, pathlib.Path(sys.argv[2]).glob('*.whl'))
differing = sorted(name for name in built.keys() | again.keys() if built.get(name) != again.get(name))
if differing:
    sys.exit(f'wheel: the source archive gives other files: {", ".join(differing[:10])}')
PYTHON

# Away from the repository, where only what is installed can be imported.
mkdir "$scratch/elsewhere"
cd "$scratch/elsewhere"

say 'core: the library example of the README'
environment core "$wheel"
"$python" - "$root/README.md" >example.py <<'PYTHON'
import pathlib, re, sys

text = pathlib.Path(sys.argv[1]).read_text('utf-8')
print(re.search(r'## Use a layer.*?```python\n(.*?)```', text, re.DOTALL)[1])
PYTHON
env -i HOME="$scratch" PATH="$PATH" JAX_PLATFORMS=cpu "$scratch/core/bin/python" example.py
for package in ml_collections matplotlib tensorflow_datasets; do
  if "$scratch/core/bin/python" -c "import $package" 2>/dev/null; then
    say "the core dependencies bring $package"
    exit 1
  fi
done

say 'lab: the command, and ten steps of a tiny model'
environment lab "${wheel}[lab]"
env -i HOME="$scratch" PATH="$PATH" "$scratch/lab/bin/qkattn" --help >help.txt
grep -q ' quickstart ' help.txt
env -i HOME="$scratch" PATH="$PATH" JAX_PLATFORMS=cpu "$scratch/lab/bin/qkattn" train \
  --config=small --config.model.d_model=16 --config.model.num_layers=1 --config.train.num_steps=10 \
  --config.optimizer.warmup_steps=2 --workdir=run
[[ -s run/result.json ]]

say "passed: $(basename "$wheel"), $(basename "$archive")"
