"""Variants x sizes become cells of equal weight count."""

import dataclasses

import pytest

from qkattn import study
from qkattn.config import Config, ConfigError, ModelConfig, Study

STUDY = Study(
    base=Config(model=ModelConfig(num_layers=2)),
    variants=('qk/vo', 'shared_qk/no_v', 'qk/vo?num_kv_heads=1'),
    sizes=('d_model=64', 'd_model=128&num_layers=3'),
)


def test_the_grid_is_expanded_and_matched():
    cells = study.expand(STUDY)
    assert [(c.variant, c.size) for c in cells] == [
        (v, s) for s in STUDY.sizes for v in STUDY.variants
    ]
    targets = {c.size: c.match.target for c in cells}
    for cell in cells:
        assert abs(cell.match.weights['total'] / targets[cell.size] - 1) <= 1e-3
        assert cell.config.model == cell.match.config
    assert cells[0].config.model.d_model == 64 and cells[0].match.residual == 0
    assert cells[2].config.model.num_kv_heads == 1
    assert cells[4].config.model.num_layers == 3 and cells[4].config.model.value == 'no_v'
    assert len({c.id for c in cells}) == len({c.directory for c in cells}) == 6


def test_without_matching_the_shapes_are_equal():
    cells = study.expand(dataclasses.replace(STUDY, match=None))
    assert {c.config.model.d_model for c in cells[:3]} == {64}
    assert cells[1].match.residual < -0.05


def test_directories_are_readable_and_safe():
    cell = study.expand(STUDY)[2]
    assert cell.directory == f'cells/qk-vo-num_kv_heads=1-d_model=64-{cell.id}'


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'"),
        ({'variants': ('qk',)}, 'must be written score/value'),
        ({'variants': ('qk/vo?heads=3',)}, "'heads=3' must be a model field"),
        ({'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field"),
        ({'variants': ()}, 'must hold at least one entry'),
        ({'variants': ('qk/vo', 'qk/vo')}, 'none twice'),
        ({'sizes': ('width=3',)}, "'width=3' must be a model field"),
        ({'sizes': ('d_model=66',)}, 'd_model=66 must be a multiple of num_heads=4'),
        ({'sizes': ('d_model=wide',)}, "model.d_model='wide' must be of type int"),
        ({'baseline': 'qk/no'}, "variant 'qk/no': unknown value 'no'"),
        ({'match': 'flops'}, "match='flops' must be total, non_embedding or None"),
        ({'fill': 'heads'}, "fill='heads' must be d_ff or None"),
        ({'tolerance': 0.0}, 'tolerance=0.0 must be above 0'),
        ({'variants': ('shared_qk/vo',), 'fill': None}, 'd_model alone is too coarse'),
    ],
    ids=str,
)
def test_a_wrong_study_is_one_sentence(fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        study.expand(dataclasses.replace(STUDY, **fields))
    assert '\n' not in str(caught.value)
