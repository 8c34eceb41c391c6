"""What tests of the page share: a strict reader of HTML, and the figures behind a report."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from qkattn.report.figures.style import Rendered

VOID = {'meta', 'br', 'link', 'img', 'input', 'hr'}


class Page(HTMLParser):
    """Collects tags and text, and fails on tags that do not nest."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.tags, self.text, self.ids = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == 'id']
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == 'id']

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def assert_drawn(path: Path, least: float) -> None:
    image = imread(path)[..., :3]
    assert image.shape[0] > 150 and image.shape[1] > 600
    assert np.mean(np.any(image < 0.9, axis=-1)) > least
    # Nothing is cut off: the outermost pixels are background.
    edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    assert np.all(edge > 0.99)


def capture_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """From here on figures are kept, by the name of their file, and not rendered."""
    made: dict[str, Figure] = {}

    def render(figure, stem, title, caption):
        made[stem] = figure
        return Rendered(stem, title, caption, b'', '', '')

    for module in ('bowls', 'forest', 'plots', 'retrieval', 'scaling_plot', 'verdict_plot'):
        monkeypatch.setattr(f'qkattn.report.{module}.render', render)
    return made
