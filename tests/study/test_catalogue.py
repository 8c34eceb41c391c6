"""The catalogue repeats the declarations of the classes, and these agree with the real arrays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from qkattn.attention import SCORES, VALUES, Attention
from qkattn.model import cost
from qkattn.study import catalogue, variant_tables
from tests.attention import layers


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
    documented = catalogue.documented_variants()
    assert len(documented) == len(set(documented))
    scores, values = map(set, zip(*documented, strict=True))
    assert scores >= {*SCORES} and values >= {*VALUES}


@pytest.mark.parametrize('name', [*SCORES])
def test_counts_in_letters_are_those_of_the_arrays(measured, name):
    entry = measured['Score'][name]
    model = dataclasses.replace(catalogue.REFERENCE, score=name, value='vo')
    spec = catalogue.reference_spec(name, 'vo')
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    letters = layers.letters(layer.score, spec)
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
