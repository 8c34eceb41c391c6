"""The page, open in Chromium."""

import pytest

from qkattn.explore.page import page as written
from tests.explore.devtools import opened


@pytest.fixture(scope='session')
def document():
    pytest.importorskip('sympy', reason="pip install -e '.[explore]'")
    return written(((2, 1), (4, 2)))


@pytest.fixture(scope='module')
def browser(chromium, document, tmp_path_factory):
    folder = tmp_path_factory.mktemp('explorer')
    (folder / 'page.html').write_text(document, encoding='utf-8')
    with opened(chromium, (folder / 'page.html').as_uri(), folder / 'profile') as page:
        yield page


@pytest.fixture
def page(browser):
    """As at the beginning."""
    browser.run("document.getElementById('reset').click()")
    return browser
