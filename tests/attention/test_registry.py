"""Names, options and import paths; what cannot be built is refused in one sentence."""

import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from qkattn.attention import Attention, AttentionSpec, Score, Value, parse_variant, registry
from qkattn.attention.registry import SCORES, VALUES
from qkattn.attention.scores.score import Circuit
from qkattn.config.calls import options_of
from qkattn.errors import SpecError
from tests.attention import examples
from tests.attention.layers import SIZES, make
from tests.processes import ROOT
from tests.refusals import refused


def test_a_variant_text_that_cannot_be_resolved_is_refused():
    # The variant, and what the refusal says.
    for text, message in (
        ('qq/vo', "unknown score 'qq'.*qk, merged, shared_qk"),
        ('qk/no_w', "unknown value 'no_w', did you mean 'no_v'"),
        ('qk', 'must be written'),
        ('qk(rank=3)/vo', "qk has no option 'rank'; it takes none"),
        ('t5_bias:T5Bias(rank=3)/vo', 'it takes buckets, farthest'),
        ('no_such_module:X/vo', "no module named 'no_such_module'"),
        ('gated:Gated/vo', 'not a subclass of qkattn.attention.Score'),
    ):
        with refused(message, SpecError):
            parse_variant(text)


def test_a_class_outside_the_package_takes_its_options():
    text = 't5_bias:T5Bias(buckets=8)'
    cls, options = registry.find_score(text)
    assert issubclass(cls, Score) and options == {'buckets': 8}
    layer = Attention(AttentionSpec(score=text, **SIZES), key=jax.random.key(0))
    assert layer.score.w_bias_NR.shape == (4, 8)


ROPE = {'positions': 'rope'}
WIDE = {'head_size': 16}
# Variant, changes of the sizes of a layer of 4 heads of 8 channels, part of the refusal.
REFUSED = [
    ('qk/vo', {'num_kv_heads': 3}, 'num_kv_heads=3 must divide num_heads=4'),
    ('qk/vo', {'init': 'nanoGPT'}, "init='nanoGPT' must be fan_in or nanogpt"),
    ('merged/no_v', {'num_kv_heads': 2}, 'num_kv_heads=2 changes nothing in merged/no_v'),
    ('query_free/vo', WIDE, r'query_free uses .* must equal d_model=32, not 4 \* 16'),
    ('key_free/vo', WIDE, 'key_free uses slices'),
    ('qk/examples.hadamard:Hadamard', WIDE, 'Hadamard uses slices'),
    ('examples.collaborative:Collaborative/vo', ROPE, 'Collaborative has no rotary form'),
    ('low_rank(rank=33)/vo', {}, 'rank=33.*from 1 to d_model=32'),
    ('low_rank(rank=3)/vo', ROPE, 'low_rank.*rotates 3 channels of a head, which must be an even'),
    ('full_size/vo', {**ROPE, 'd_model': 33}, 'd_model=33 .* rotates 33 channels'),
    ('latent(rope_size=3)/vo', ROPE, 'rotates 3 channels'),
    ('qk/k_is_v', {**ROPE, 'head_size': 7}, 'qk with .* head_size=7 rotates 7 channels'),
    ('shared_qk(temperature=0)/vo', {}, "temperature=0.*above 0, 'learned' or None"),
    ('shared_qk(key_norm=True)/vo', {'qk_norm': True}, 'qk_norm=True undoes key_norm'),
    ('shared_qk(temperature="learned")/vo', {'qk_norm': True}, 'qk_norm=True undoes key_norm'),
    (f'shared_qk(temperature={10**400})/vo', {}, "above 0, 'learned' or None"),
    ('qk/vo', {'normalizer': f'sigmoid(bias={10**400})'}, 'must be a finite number'),
    (
        'examples.symmetric_skew:SymmetricSkew(symmetric_rank=33)/vo',
        {},
        'symmetric_rank=33.*from 0 to d_model=32',
    ),
    ('examples.symmetric_skew:SymmetricSkew(skew_rank=17)/vo', {}, 'skew_rank=17.*d_model // 2=16'),
    ('examples.symmetric_skew:SymmetricSkew(symmetric_rank=0, skew_rank=0)/vo', {}, 'above 0'),
    ('latent(size=64)/vo', {}, 'size=64.*from 1 to d_model=32'),
    ('latent(rope_size=4)/vo', {}, 'needs positions=rope, not none; leave it out in cross-'),
    ('latent/vo', ROPE, r'positions=rope needs latent\(rope_size=G\)'),
    (
        'examples.gauge_fixed:GaugeFixedQK/vo',
        {'head_size': 64},
        'head_size=64 must be at most d_model=32',
    ),
    (
        'examples.gauge_fixed:GaugeFixedQK(rows=((0, 1),))/vo',
        {'head_size': 64},
        'head_size=64 must be at most d_model',
    ),
    (
        'examples.gauge_fixed:GaugeFixedQK(rows=((0, 1),))/vo',
        {},
        'for each of num_kv_heads=4 heads, head_size=8',
    ),
    (
        'qk/examples.gauge_fixed:GaugeFixedVO',
        {'num_heads': 1, 'num_kv_heads': 1, 'head_size': 32},
        'below d_model',
    ),
    (
        'qk/examples.gauge_fixed:GaugeFixedVO(columns=((0, 1),))',
        {},
        'for each of num_heads=4 heads, head_size=8',
    ),
    (
        'qk/examples.hadamard:Hadamard',
        {'d_model': 24, 'head_size': 6},
        'power of two, not 24; the nearest are 16',
    ),
    ('merged/k_is_v', {}, 'k_is_v uses the key projection of its score, and merged has none'),
    ('merged/q_is_v', {}, 'uses the query projection.*scores that have one are qk, shared_qk'),
    ('shared_qk/q_is_v', {}, 'is the key matrix: write k_is_v in place of q_is_v'),
    ('shared_qk(key_norm=True)/k_is_v', {}, 'k_is_v .* cannot be used with .* not bilinear'),
    ('qk/latent', {}, 'qk has none to share; scores that have one are latent'),
    ('qk/v_is_k_transposed', {'num_kv_heads': 2}, 'num_kv_heads must be num_heads=4, not 2'),
]


def test_a_layer_that_cannot_be_built_is_refused_in_one_sentence():
    for variant, change, message in REFUSED:
        spec = {**SIZES, **parse_variant(variant)._asdict(), **change}
        with refused(message, SpecError):
            registry.check(AttentionSpec(**spec))


def test_an_odd_head_size_is_allowed_where_rotated_channels_are_even():
    for score in ('low_rank(rank=4)', 'full_size', 'latent(rope_size=4)'):
        odd = {**SIZES, **ROPE, 'score': score, 'head_size': 7}
        layer = Attention(AttentionSpec(**odd), key=jax.random.key(0))
        assert layer(jnp.ones((1, 5, 32))).shape == (1, 5, 32)


@pytest.mark.parametrize(
    ('kind', 'known', 'find'),
    [('score', SCORES, registry.find_score), ('value', VALUES, registry.find_value)],
)
def test_every_option_refuses_wrong_types_and_sizes(kind, known, find):
    classes = dict(known)
    for variant in examples.FOLDER_VARIANTS:
        name = variant[0] if kind == 'score' else variant[1]
        if ':' in name:
            classes[name], _ = find(name)
    options = [(name, option) for name, cls in classes.items() for option in options_of(cls)]
    assert len(options) >= 5

    # Wrong numbers for ranks and sizes are too small, fractional, a bool or too large; rows and
    # columns must be tuples of whole numbers, one for each head.
    for name, option in options:
        least = -1 if 'SymmetricSkew' in name else 0
        numbers = [least, 2.5, True, 2**17 + 1] if option.endswith(('rank', 'size')) else []
        halves = ((0.0, *range(1, 8)), *[tuple(range(8))] * 3)
        numbers += [3, (1, 2, 3, 4), halves] if option in ('rows', 'columns') else []
        for wrong in ('wrong', *numbers):
            text = f'{name}({option}={wrong!r})'
            with refused(f'^{re.escape(text)} must ', SpecError):
                registry.check(AttentionSpec(**SIZES | {kind: text}))


def test_a_normalizer_that_cannot_be_built_is_refused():
    for name, message in (
        ('softmx', "unknown normalizer 'softmx', did you mean 'softmax'"),
        ('softmax(heat=2)', "no option 'heat'"),
        ("sigmoid(bias='low')", r"sigmoid\(bias='low'\) must be a finite number, or None"),
        ('gated:Gated', 'is not a subclass of qkattn.attention.Normalizer'),
    ):
        with refused(message, SpecError):
            registry.check(AttentionSpec(normalizer=name, **SIZES))


def test_the_page_on_extending_names_every_member_of_the_interface():
    page = (examples.PAGE.parent / 'extend.md').read_text()
    _, both, scores, values = page.split('## The interface')[1].split('## ')[0].split('| member |')
    tables = {Circuit: both, Score: both + scores, Value: both + values}
    for cls, table in tables.items():
        listed = set(re.findall(r'`(\w+)[`(]', re.sub(r'\|[^|]*\|[^|]*\|$', '', table, flags=re.M)))
        bases = [base for base in cls.__mro__ if issubclass(base, Circuit)]
        members = {*dir(cls)}.union(*map(inspect.get_annotations, bases)) - {*dir(nnx.Module)}
        own = {name for name in members if not name.startswith('_')}
        assert own <= listed, f'{cls.__name__} has {own - listed}'


def test_the_page_on_extending_lists_every_variant_of_the_folder():
    page = (examples.PAGE.parent / 'extend.md').read_text()
    for score, value in examples.FOLDER_VARIANTS:
        layer = make((score, value))
        circuit = layer.score if ':' in score else layer.value
        count = circuit.parameter_count.replace('*', '·')
        assert f'| `{score}/{value}` | {circuit.equation} | {count} |' in page


def test_every_class_of_the_folder_is_held_to_the_contract():
    defined = set()
    for path in (ROOT / 'examples').glob('*.py'):
        module = importlib.import_module(f'examples.{path.stem}')
        for name, member in vars(module).items():
            is_circuit = inspect.isclass(member) and issubclass(member, Circuit)
            if is_circuit and member.__module__ == module.__name__:
                defined.add(f'examples.{path.stem}:{name}')
    named = {name for variant in examples.FOLDER_VARIANTS for name in variant if ':' in name}
    assert defined == named
