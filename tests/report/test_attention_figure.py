"""Figures of an analysis: read from the matplotlib objects, not from pixels."""

import numpy as np
import pytest

from qkattn.report.figures.attention_figure import attention_maps, heat_maps


def test_a_heat_map_has_no_number_where_there_is_none():
    figure = heat_maps({'norm': np.array([[np.nan, np.nan], [1.5, np.inf], [2.0, 3.0]])})
    texts = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert texts == {(0, 1): '1.5', (0, 2): '2', (1, 2): '3'}


@pytest.mark.parametrize(('drift', 'room'), [(6.6e-8, False), (0.25, True)])
def test_numbers_are_written_where_they_have_room(drift, room):
    figure = heat_maps({'drift': np.full((2, 8), drift)})
    assert len(figure.axes[0].texts) == room * 16


@pytest.mark.parametrize('length', [40, 41])
def test_outer_maps_name_the_tokens_where_they_are_few(length):
    words = [f'{place}.' for place in range(length)]
    maps_NTS = np.zeros((3, 4, length))
    figure = attention_maps({0: maps_NTS, 2: maps_NTS}, words[:4], words)
    queries, keys = ([*map(written, side)] for side in zip(*map(sides, figure.axes), strict=True))
    few = length == 40
    assert queries[:6] == [words[:4] * few, [], []] * 2
    assert keys[:6] == [[]] * 3 + [words * few] * 3


def sides(ax):
    return ax.get_yticklabels(), ax.get_xticklabels()


def written(labels):
    return [label.get_text() for label in labels]
