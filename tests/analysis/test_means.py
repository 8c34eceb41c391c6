"""Means over layers and heads: which there are, and of which layers."""

import re

import jax
import numpy as np
import pytest

from qkattn.analysis import means
from qkattn.analysis.analyze import _of_forms, _of_spectra
from qkattn.config import ModelConfig
from qkattn.model import build


def decompositions(function, *inputs) -> list[str]:
    """The calls of LAPACK in the compiled program, which is for CPUs."""
    with jax.default_device(jax.devices('cpu')[0]):
        text = jax.jit(function).lower(*inputs).compile().as_text()
    return re.findall(r'custom_call_target="(lapack_\w+)"', text)


@pytest.mark.parametrize('kind', ['decoder', 'encoder_decoder'])
def test_a_program_decomposes_one_array(kind):
    sizes = {'d_model': 8, 'num_layers': 2, 'num_heads': 2, 'context': 4}
    model = build(ModelConfig(kind=kind, **sizes), key=jax.random.key(0))
    assert len(decompositions(means, model)) == 1
    stacked_PNDD = np.ones((3, 2, 8, 8), np.float32)
    programs = (_of_spectra, _of_forms)
    assert [len(decompositions(program, stacked_PNDD)) for program in programs] == [1, 1]


def test_patterns_are_measured_where_there_are_inputs():
    model = build(ModelConfig(d_model=8, num_heads=2, context=4), key=jax.random.key(0))
    of_circuits = jax.eval_shape(means, model).keys()
    assert {name[:3] for name in of_circuits} == {'qk_', 'ov_'} and len(of_circuits) == 8
    tokens_BT = np.zeros((1, 4), np.int32)
    more = jax.eval_shape(means, model, {'tokens_BT': tokens_BT}).keys() - of_circuits
    assert {name.partition('_')[0] for name in more} == {'attention'} and len(more) == 4
