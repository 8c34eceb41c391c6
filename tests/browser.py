"""A browser for the tests of pages that run scripts."""

import os
import shutil

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome')


@pytest.fixture(scope='session')
def chromium() -> str:
    """The path of Chromium; QKATTN_TEST_CHROMIUM names another than that on PATH."""
    paths = (os.environ.get('QKATTN_TEST_CHROMIUM'), *map(shutil.which, NAMES))
    path = next(filter(None, paths), None)
    if path is None:
        pytest.skip('Chromium is absent: install it, or set QKATTN_TEST_CHROMIUM to its path')
    return path
