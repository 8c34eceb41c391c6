"""Names, options and import paths; refusals in one sentence."""

import sys

import jax
import pytest

from qkattn.attention import Attention, AttentionSpec, Score, parse_variant, registry
from qkattn.errors import SpecError
from tests.attention.layers import SIZES

OUTSIDE = """
from qkattn.attention.scores.qk import QK
class Scaled(QK):
    def __init__(self, spec, *, key, factor=1.0):
        super().__init__(spec, key=key)
        self.scale = factor * self.scale
class NotAScore: pass
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / 'outside_variants.py').write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    yield 'outside_variants'
    sys.modules.pop('outside_variants', None)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(SpecError, match="unknown score 'qq'.*qk, merged, shared_qk"):
        parse_variant('qq/vo')
    with pytest.raises(SpecError, match="unknown value 'no_w', did you mean 'no_v'"):
        parse_variant('qk/no_w')


@pytest.mark.parametrize('text', ['qk', 'qk(rank=)/vo', 'qk(2)/vo'])
def test_a_malformed_variant_says_how_to_write_it(text):
    with pytest.raises(SpecError, match='must be written'):
        parse_variant(text)


def test_an_unknown_option_lists_what_the_class_takes():
    with pytest.raises(SpecError, match="qk has no option 'rank'; it takes none"):
        parse_variant('qk(rank=3)/vo')


def test_a_class_outside_the_package_takes_its_options(outside):
    cls, options = registry.find_score(f'{outside}:Scaled(factor=3.0)')
    assert issubclass(cls, Score) and options == {'factor': 3.0}
    spec = AttentionSpec(score=f'{outside}:Scaled(factor=3.0)', **SIZES)
    assert Attention(spec, key=jax.random.key(0)).score.scale == 3.0 * 8**-0.5
    with pytest.raises(SpecError, match='it takes factor'):
        registry.find_score(f'{outside}:Scaled(rank=3)')


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('no_such_module:X', "no module named 'no_such_module'"),
        ('outside_variants:Missing', "has no 'Missing'"),
        ('outside_variants:NotAScore', 'not a subclass of qkattn.attention.Score'),
    ],
)
def test_a_wrong_import_path_is_one_sentence(outside, path, message):
    with pytest.raises(SpecError, match=message):
        registry.find_score(path)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'num_kv_heads': 3}, 'num_kv_heads=3 must divide num_heads=4'),
        ({'num_heads': 0}, 'num_heads=0 must be a whole number'),
        ({'score': 'query_free', 'head_size': 16}, 'must equal d_model=32, not 4 \\* 16'),
        ({'score': 'key_free', 'head_size': 16}, 'key_free uses slices'),
        ({'value': 'no_v', 'head_size': 16}, 'no_v uses slices'),
        ({'value': 'no_o', 'head_size': 16}, 'no_o uses slices'),
        ({'value': 'no_vo', 'head_size': 16}, 'no_vo uses slices'),
        ({'score': 'merged', 'value': 'no_v', 'num_kv_heads': 2}, 'changes nothing'),
    ],
)
def test_a_variant_that_cannot_be_built_is_refused(change, message):
    with pytest.raises(SpecError, match=message):
        registry.check(AttentionSpec(**{**SIZES, **change}))
