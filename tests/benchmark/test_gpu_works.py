"""Every row of --suite=gpu is built and timed on the CPU, its sizes made tiny."""

import importlib.util
import json

import pytest

from qkattn.benchmark import contestant
from qkattn.benchmark.suites import decoding, depth, stacks, steps
from tests.benchmark.test_suites import Recorded

SUITES = {'decoding': decoding, 'depth': depth, 'stacks': stacks, 'steps': steps}
HEADS, WIDTH, VOCABULARY = 2, 16, 32
# Numbers by the names that settings have for them; all others stay.
TINY = {
    **{'width': WIDTH, 'd_model': WIDTH, 'heads': HEADS, 'num_heads': HEADS},
    **{'vocabulary': VOCABULARY, 'vocab_size': VOCABULARY, 'size': 8, 'megabytes': 1},
    **{'batch': 1, 'batch_size': 1, 'prompt': 2, 'tokens': 3, 'compilations': 1},
}


def tiny(settings):
    """The settings of a work with tiny sizes, contexts 1/32 as long, and 1 layer for a few."""
    if isinstance(settings, list):
        return [tiny(value) for value in settings]
    if not isinstance(settings, dict):
        return settings
    small = {name: TINY.get(name, tiny(value)) for name, value in settings.items()}
    if 'context' in small:
        small['context'] //= 32
    for name in {'layers', 'num_layers'} & small.keys():
        small[name] = 1 if small[name] < 12 else small[name]  # more are scanned
    return small


def works(suite):
    """The works of a suite and their tiny settings, each once."""
    own = Recorded('gpu')
    own.suite = suite
    SUITES[suite].run(own)
    pairs = {json.dumps([c.work, tiny(dict(c.settings))]) for c in own.contestants}
    return [json.loads(pair) for pair in sorted(pairs)]


def installed(work, settings):
    kernel = settings.get('config', {}).get('model', {}).get('kernel')
    needed = 'tokamax' if kernel == 'tokamax' else work.partition('_')[0]
    return needed not in ('tokamax', 'torch') or importlib.util.find_spec(needed) is not None


@pytest.mark.slow
@pytest.mark.parametrize('suite', SUITES)
def test_the_works_of_a_gpu_run_with_tiny_sizes(suite):
    answers = {}
    for work, settings in works(suite):
        if installed(work, settings):
            answers[json.dumps([work, settings])] = contestant._built(work, settings)[1]
    assert answers
    assert {name: own['failed'] for name, own in answers.items() if 'failed' in own} == {}
    assert all(own['steps'] > 0 and own['seconds'] > 0 for own in answers.values())
