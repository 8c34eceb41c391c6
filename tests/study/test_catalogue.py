"""The catalogue repeats the declarations of the classes, and these agree with the real arrays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from qkattn.attention import SCORES, VALUES, Attention, AttentionSpec, Score
from qkattn.attention.parameters import weight
from qkattn.model import cost
from qkattn.study import catalogue, variant_tables

SPEC = AttentionSpec(d_model=32, num_heads=4, num_kv_heads=2, head_size=8)


class Mislabelled(Score):
    def __init__(self, spec, *, key):
        self.w_q_DNH = weight(key, 'w_q_DNH', (spec.d_model, spec.num_heads, 5), 1.0)


def test_letters_are_sizes_and_contradictions_are_errors():
    score = SCORES['low_rank'](SPEC, key=jax.random.key(0), rank=3)
    letters = catalogue.letters(score, SPEC)
    assert letters == {'D': 32, 'E': 32, 'N': 4, 'K': 2, 'H': 8, 'R': 3}
    with pytest.raises(ValueError, match='w_q_DNH: H is 5 here and 8 elsewhere'):
        catalogue.letters(Mislabelled(SPEC, key=jax.random.key(0)), SPEC)


@pytest.fixture(scope='module')
def measured():
    return catalogue.measured(with_conversions=False)


def test_the_stored_catalogue_is_what_is_measured(measured):
    stored = variant_tables.stored()
    for entries in stored.values():
        for entry in entries.values():
            del entry['exact']
    assert json.loads(json.dumps(measured)) == stored
    assert {kind: [*entries] for kind, entries in measured.items()} == {
        'Score': [*SCORES],
        'Value': [*VALUES],
    }
    described = catalogue.documented_variants()
    assert len(described) == len(set(described))
    assert {name for name, _ in described} >= {*SCORES}
    assert {name for _, name in described} >= {*VALUES}


@pytest.mark.parametrize('name', [*SCORES])
def test_counts_in_letters_are_those_of_the_arrays(measured, name):
    entry = measured['Score'][name]
    model = dataclasses.replace(catalogue.REFERENCE, score=name, value='vo')
    spec = catalogue.reference_spec(name, 'vo')
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    letters = catalogue.letters(layer.score, spec)
    assert eval(entry['parameters'], letters) == entry['count']
    shown = eval(entry['cache'], letters)
    y_BSD = jax.ShapeDtypeStruct((1, 1, model.d_model), jnp.float32)
    held = jax.eval_shape(lambda layer, y: layer.score.cached(y), layer, y_BSD)
    assert shown == sum(a.size for a in held.values())
    # no_vo caches the stream: beside it, a Score that caches the stream adds nothing.
    both = cost.cache_floats_per_token(dataclasses.replace(model, value='no_vo'))
    assert both == (shown if 'x_BSD' in held else shown + model.d_model)
    assert cost.flops_per_token(model) > 0


@pytest.mark.slow
def test_the_stored_conversions_are_those_that_are_exact():
    assert json.loads(json.dumps(catalogue.measured())) == variant_tables.stored()
