"""The seeds and documents that a difference takes."""

import dataclasses
import math

import pytest

from qkattn.stats.inference import paired
from qkattn.stats.planning import to_find

DIFFERENCES = [0.01, 0.03, -0.01, 0.02, 0.0, 0.01, 0.02, -0.02]
FOUND = paired(DIFFERENCES, resamples=None)


def test_pairs_that_find_what_these_pairs_can_find_are_as_many():
    assert to_find(FOUND, FOUND.detectable * (1 + 1e-9)) == (len(DIFFERENCES), 1.0)


def test_half_the_size_takes_about_four_times_as_many_pairs():
    many, documents = to_find(FOUND, 0.001)
    more, _ = to_find(FOUND, 0.0005)
    assert documents == 1 and more / many == pytest.approx(4, rel=0.01)


def test_documents_are_added_where_pairs_do_not_suffice():
    found = paired(DIFFERENCES, evaluation_error=0.01, evaluation_df=100, resamples=None)
    pairs, documents = to_find(found, 0.01)
    error = math.hypot(found.sd / pairs**0.5, 0.01 / documents**0.5)
    assert documents > 1 and error == pytest.approx(0.01 / (1.96 + 0.84), rel=0.02)


def test_nothing_finds_what_tuning_may_hide():
    assert to_find(dataclasses.replace(FOUND, tuning_low=0.01), 0.01) is None
    assert to_find(paired([0.1], resamples=None), 0.01) is None
