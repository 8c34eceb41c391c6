"""The width receives what a variant saves: it moves, and d_ff absorbs at most half a step."""

import dataclasses
import functools
import re

import pytest

from qkattn.config import ModelConfig
from qkattn.errors import MatchError
from qkattn.model import cost
from qkattn.model.sites import attention_spec
from qkattn.study import catalogue, matching
from qkattn.study.dimension import buildable, make_dimension

SMALL = ModelConfig(d_model=96, num_layers=2, num_heads=4, context=64)
NARROW = dataclasses.replace(SMALL, d_model=64)
SIZES = {
    'small': SMALL,
    'two heads': dataclasses.replace(NARROW, num_heads=2),
    'odd': dataclasses.replace(SMALL, d_model=111, num_heads=3, d_ff=300, vocab_size=1000),
    'deep': dataclasses.replace(SMALL, d_model=128, num_layers=6, vocab_size=1000),
    'rotary': dataclasses.replace(SMALL, d_model=120, positions='rope'),
    'own head size': dataclasses.replace(SMALL, d_model=120, head_size=20),
    'one head': dataclasses.replace(NARROW, num_heads=1, vocab_size=512, tied_embeddings=False),
    'groups': dataclasses.replace(SMALL, d_model=112, num_kv_heads=2, norm='rmsnorm', biases=True),
    'encoder': dataclasses.replace(SMALL, kind='encoder', d_model=80, num_heads=2),
}


@pytest.fixture(autouse=True, scope='module')
def every_model_is_counted_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, 'count', functools.cache(cost.count))
        yield


def moves(base: ModelConfig, config: ModelConfig, which: str) -> int:
    """What d_model receives, all properties of the match checked; 0 where it is refused."""
    at, target = make_dimension(config, 'd_model', None, which), cost.measured(base, which)
    gap = cost.measured(config, which) / target - 1
    try:
        found = matching.match(config, target, which=which, baseline=base)
    except MatchError as refusal:
        if which != 'cache':  # which d_ff does not fill
            assert 'd_model would' in str(refusal)
            other = at.neighbours(base.d_model)[gap < 0]
            step = cost.measured(at.at(other), which) / target - 1 - gap
            assert abs(gap) <= abs(step) / 2, 'half a step or more was saved'
        return 0
    moved = found.config.d_model - base.d_model
    assert abs(found.residual) <= 1e-3
    assert abs(gap) <= 1e-3 or (moved > 0 if gap < 0 else moved < 0)
    assert found.config.num_heads == base.num_heads
    whole = 2 if config.positions == 'rope' else 1
    size, ratio = attention_spec(found.config).head_size, found.config.d_model / base.num_heads
    assert size == base.head_size or (abs(size - ratio) <= whole / 2 and size % whole == 0)
    # d_ff: its ratio to d_model and at most half of the step of d_model that was rounded away
    plain = at.at(found.config.d_model)
    assert plain.mlp_width == round(base.mlp_width / base.d_model * plain.d_model)
    fill = found.config.mlp_width - plain.mlp_width
    assert found.fill == fill and found.widened == moved
    one = matching._one_width(plain, which)
    reached = cost.measured(plain, which)
    around = [cost.measured(at.at(d), which) for d in at.neighbours(plain.d_model) if d]
    assert abs(fill) * one <= max(abs(c - reached) for c in around) / 2 + one / 2
    return moved


@pytest.mark.parametrize(
    ('name', 'fields', 'sign'),
    [
        ('small', {'score': 'shared_qk'}, 1),
        ('two heads', {'score': 'query_free'}, 1),
        ('odd', {'value': 'k_is_v'}, 1),
        ('rotary', {'value': 'no_o'}, 1),
        ('small', {'score': 'merged'}, -1),
        ('own head size', {'value': 'merged_vo'}, -1),
    ],
)
def test_the_width_of_a_saving_variant_grows_and_of_a_costly_one_shrinks(name, fields, sign):
    base = SIZES[name]
    assert moves(base, dataclasses.replace(base, **fields), 'total') * sign > 0


def test_where_a_step_is_too_coarse_a_baseline_width_that_is_not_is_named():
    config = dataclasses.replace(NARROW, num_layers=1, num_heads=8, value='no_v')
    base = dataclasses.replace(config, value='vo')
    target = cost.measured(base, 'total')
    expected = (
        r'^qk/no_v is -5.\d+% from the target and one step of d_model, to 72, 20.\d+%, so d_model '
        r'would stay at 64 and d_ff absorb it all: use a baseline with d_model=(\d+) or the '
        'destination d_ff$'
    )
    with pytest.raises(MatchError, match=expected) as refusal:
        matching.match(config, target, baseline=base)
    width = int(re.search(expected, str(refusal.value)).group(1))
    wide = dataclasses.replace(base, d_model=width)
    assert moves(wide, dataclasses.replace(config, d_model=width), 'total') == 8
    below = dataclasses.replace(base, d_model=width - 8)
    assert moves(below, dataclasses.replace(config, d_model=width - 8), 'total') == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'which'),
    [
        *((name, 'total') for name in SIZES),
        ('small', 'non_embedding'),
        ('two heads', 'flops'),
        ('rotary', 'flops'),
        ('groups', 'cache'),
    ],
)
def test_the_width_of_every_variant_moves_with_its_cost(name, which):
    base, moved = SIZES[name], {}
    for score, value in catalogue.documented_variants():
        config = dataclasses.replace(base, score=score, value=value)
        if buildable(config):
            moved[f'{score}/{value}'] = moves(base, config, which)
    assert {0 < step for step in moved.values() if step} >= {True}
    assert moved['shared_qk/vo'] > 0 or which == 'cache'
