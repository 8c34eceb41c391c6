"""Names, options and import paths. What cannot be built is refused in one sentence."""

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
from qkattn.attention.values.tied import QIsV
from qkattn.config.calls import options_of
from qkattn.errors import SpecError
from tests.attention import examples
from tests.attention.layers import SIZES, make
from tests.processes import ROOT
from tests.refusals import refused


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('qq/vo', "unknown score 'qq'.*qk, merged, shared_qk"),
        ('qk/no_w', "unknown value 'no_w', did you mean 'no_v'"),
        ('qk', 'must be written'),
        ('qk(rank=3)/vo', "qk has no option 'rank'; it takes none"),
        ('t5_bias:T5Bias(rank=3)/vo', 'it takes buckets, farthest'),
        ('no_such_module:X/vo', "no module named 'no_such_module'"),
        ('gated:Gated/vo', 'not a subclass of qkattn.attention.Score'),
    ],
)
def test_a_variant_text_that_cannot_be_resolved_is_refused(text, message):
    with refused(message, SpecError):
        parse_variant(text)


def test_a_class_outside_the_package_takes_its_options():
    text = 't5_bias:T5Bias(buckets=8)'
    cls, options = registry.find_score(text)
    assert issubclass(cls, Score)
    assert options == {'buckets': 8}
    layer = Attention(AttentionSpec(score=text, **SIZES), key=jax.random.key(0))
    num_heads = 4
    assert layer.score.w_bias_NR.shape == (num_heads, 8)


class QueryIsValue(QIsV):
    """A Value from outside the package that uses W_Q of its Score."""


class SharesAText(QIsV):
    """A Value whose projections are not in a tuple."""

    shares = 'query'


class SharesAnUnknownProjection(QIsV):
    """A Value with a projection that no Score has."""

    shares = ('query', 'output')


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
    pytest.param(
        f'shared_qk(temperature={10**400})/vo',
        {},
        "above 0, 'learned' or None",
        id='temperature beyond float',
    ),
    pytest.param(
        'qk/vo',
        {'normalizer': f'sigmoid(bias={10**400})'},
        'must be a finite number',
        id='bias beyond float',
    ),
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
    (
        'qk/tests.attention.test_registry:SharesAText',
        {},
        "shares='query' of the value .* must be a tuple of .*: key, latent, query$",
    ),
    (
        'qk/tests.attention.test_registry:SharesAnUnknownProjection',
        {},
        r"shares=\('query', 'output'\) of the value .* must be .*: key, latent, query$",
    ),
    (
        'shared_qk/tests.attention.test_registry:QueryIsValue',
        {},
        "write a value that shares 'key' in place of tests.attention.test_registry:QueryIsValue",
    ),
    ('shared_qk(key_norm=True)/k_is_v', {}, 'k_is_v .* cannot be used with .* not bilinear'),
    ('qk/latent', {}, 'qk has none to share; scores that have one are latent'),
    ('qk/v_is_k_transposed', {'num_kv_heads': 2}, 'num_kv_heads must be num_heads=4, not 2'),
]


@pytest.mark.parametrize(('variant', 'change', 'message'), REFUSED)
def test_a_layer_that_cannot_be_built_is_refused_in_one_sentence(variant, change, message):
    score, value = parse_variant(variant)
    fields = {**SIZES, 'score': score, 'value': value, **change}
    with refused(message, SpecError):
        registry.check(AttentionSpec(**fields))


@pytest.mark.parametrize('score', ['low_rank(rank=4)', 'full_size', 'latent(rope_size=4)'])
def test_an_odd_head_size_is_allowed_where_rotated_channels_are_even(score):
    fields = {**SIZES, 'positions': 'rope', 'score': score, 'head_size': 7}
    layer = Attention(AttentionSpec(**fields), key=jax.random.key(0))
    assert layer(jnp.ones((1, 5, 32))).shape == (1, 5, 32)


def wrong_values(class_name: str, option: str) -> list:
    """Values that an option of a Score or Value must refuse.

    Every option refuses the text 'wrong'. Ranks and sizes are whole numbers up to a size of the
    layer. The least is 1, or 0 in `SymmetricSkew`.
    """
    wrong = ['wrong']
    if option.endswith(('rank', 'size')):
        too_small = -1 if 'SymmetricSkew' in class_name else 0
        too_large = 2**17 + 1
        wrong += [too_small, 2.5, True, too_large]
    if option in ('rows', 'columns'):
        # Right is a tuple of 8 whole numbers for each of 4 heads.
        right = tuple(range(8))
        with_float = (0.0, 1, 2, 3, 4, 5, 6, 7)
        wrong += [3, (1, 2, 3, 4), (with_float, right, right, right)]
    return wrong


@pytest.mark.parametrize(
    ('kind', 'registered', 'find'),
    [('score', SCORES, registry.find_score), ('value', VALUES, registry.find_value)],
    ids=['score', 'value'],
)
def test_every_option_refuses_wrong_types_and_sizes(kind, registered, find):
    """Every option of a Score or Value, registered or in examples/, refuses wrong values.

    The text of a Score or Value has its options in parentheses: low_rank(rank=3).
    """
    classes = dict(registered)
    for score, value in examples.FOLDER_VARIANTS:
        name = score if kind == 'score' else value
        is_from_folder = ':' in name  # an import path, as in examples.frozen:Frozen
        if is_from_folder:
            classes[name], _ = find(name)

    num_options = 0
    for name, cls in classes.items():
        for option in options_of(cls):
            num_options += 1
            for wrong in wrong_values(name, option):
                # The refusal begins with this text.
                text = f'{name}({option}={wrong!r})'
                with refused(f'^{re.escape(text)} must ', SpecError):
                    registry.check(AttentionSpec(**{**SIZES, kind: text}))

    # The loop has found options.
    assert num_options >= 5


@pytest.mark.parametrize(
    ('normalizer', 'message'),
    [
        ('softmx', "unknown normalizer 'softmx', did you mean 'softmax'"),
        ('softmax(heat=2)', "no option 'heat'"),
        ("sigmoid(bias='low')", r"sigmoid\(bias='low'\) must be a finite number, or None"),
        ('sigmoid(bias=True)', r'sigmoid\(bias=True\) must be a finite number, or None'),
        ('gated:Gated', 'is not a subclass of qkattn.attention.Normalizer'),
    ],
)
def test_a_normalizer_that_cannot_be_built_is_refused(normalizer, message):
    with refused(message, SpecError):
        registry.check(AttentionSpec(normalizer=normalizer, **SIZES))


def public_members(cls: type) -> set[str]:
    """Public attributes and annotated fields of a Circuit class that nnx.Module lacks."""
    members = set(dir(cls))
    for base in cls.__mro__:
        if issubclass(base, Circuit):
            members |= set(inspect.get_annotations(base))
    members -= set(dir(nnx.Module))
    return {name for name in members if not name.startswith('_')}


def names_in_code(table: str) -> set[str]:
    """The names in backticks of a Markdown table, its last two columns left out."""
    without_last_columns = re.sub(r'\|[^|]*\|[^|]*\|$', '', table, flags=re.M)
    return set(re.findall(r'`(\w+)[`(]', without_last_columns))


def test_the_page_on_extending_names_every_member_of_the_interface():
    page = (examples.PAGE.parent / 'extend.md').read_text()
    section = page.split('## The interface')[1].split('## ')[0]
    # Three tables: members of both classes, of Score, and of Value.
    _, both, scores, values = section.split('| member |')
    for cls, tables in ((Circuit, both), (Score, both + scores), (Value, both + values)):
        missing = public_members(cls) - names_in_code(tables)
        assert not missing, f'{cls.__name__} has {missing}'


def test_the_page_on_extending_lists_every_variant_of_the_folder():
    page = (examples.PAGE.parent / 'extend.md').read_text()
    for score, value in examples.FOLDER_VARIANTS:
        layer = make((score, value))
        circuit = layer.score if ':' in score else layer.value
        count = circuit.parameter_count.replace('*', '·')
        assert f'| `{score}/{value}` | {circuit.equation} | {count} |' in page


def test_every_class_of_the_folder_is_held_to_the_contract():
    """Every Score and Value in a file of examples/ is in FOLDER_VARIANTS.

    The contract tests run on FOLDER_VARIANTS.
    """
    # Import paths of the Scores and Values that the files define, not of imported ones.
    defined = set()
    for path in (ROOT / 'examples').glob('*.py'):
        module = importlib.import_module(f'examples.{path.stem}')
        for name, member in vars(module).items():
            is_circuit = inspect.isclass(member) and issubclass(member, Circuit)
            if is_circuit and member.__module__ == module.__name__:
                defined.add(f'examples.{path.stem}:{name}')

    # A variant is a pair (score, value) of names. A name with a colon is an import path of a class
    # in examples/. A name without a colon is a registered class, which is not counted here.
    held = set()
    for score, value in examples.FOLDER_VARIANTS:
        held |= {score, value}
    held_from_folder = {name for name in held if ':' in name}
    assert defined == held_from_folder
