"""experiments.explore: what it prints and what it refuses."""

import sys

import pytest

from qkattn.explore import bench
from qkattn.explore.bench import Bench
from qkattn.explore.worked import worked

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ([], 'one of --variant=SCORE/VALUE and --html=FILE is required'),
        (['--variant=qk/vo', '--html=a.html'], 'one of --variant=SCORE/VALUE and --html=FILE is'),
        (['--html=.'], '--html=. is a directory; give a file, e.g. ./explorer.html'),
        (['--html=/proc/x/a.html'], '/proc/x cannot be used'),
        (['--variant=qkk/vo'], "unknown score 'qkk', did you mean 'qk'?"),
        (['--variant=qk/vo', '--tokens=9'], 'tokens=9 must be from 2 to 4'),
        (['--variant=qk/vo', '--dims=x'], 'dims'),
    ],
)
def test_bad_input_is_one_sentence(script_here, flags, message):
    done = script_here('explore', *flags)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_sympy_the_extra_is_named(script_here, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sympy', None)
    bench.sympy.cache_clear()
    done = script_here('explore', '--variant=qk/vo')
    bench.sympy.cache_clear()
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == "explore needs the package sympy: pip install -e '.[explore]'\n"


def test_the_script_prints_a_bench(script_here):
    done = script_here('explore', '--variant=shared_qk/no_vo')
    assert (done.returncode, done.stdout) == (0, worked(Bench('shared_qk/no_vo')))
