"""Values of flags: whole numbers, and None."""

import pytest

from qkattn.jobs import cli


@pytest.mark.parametrize(('text', 'value'), [('1000', 1000), ('1e3', 1000), ('-2', -2)])
def test_whole_numbers_may_have_an_exponent(text, value):
    assert cli._WholeParser().parse(text) == value


@pytest.mark.parametrize('text', ['1.5', 'nan', 'inf', 'ten', '1e-3'])
def test_other_numbers_are_refused_as_they_were_written(text):
    with pytest.raises(ValueError, match=repr(text)):
        cli._WholeParser().parse(text)
