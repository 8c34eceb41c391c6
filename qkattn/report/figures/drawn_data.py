"""The numbers that a figure shows, read off the drawing itself."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter

from qkattn.report.prose import rounded
from qkattn.storage.records import to_jsonable


def drawn_data(figure: Figure) -> str:
    """JSON: for each panel its axes' labels, what is drawn in it as coordinates, and its texts.

    Numbers have the digits of `rounded`.
    """
    panels = [_panel(ax) for ax in figure.axes if ax.get_visible()]
    lines = ',\n'.join(
        json.dumps(part) for panel in panels for part in (panel['axes'], *panel['drawn'])
    )
    return f'[\n{lines}\n]\n'


def _panel(ax: Axes) -> dict[str, Any]:
    about: dict[str, Any] = {'title': ax.get_title(), 'x': ax.get_xlabel(), 'y': ax.get_ylabel()}
    if isinstance(ax.yaxis.get_major_formatter(), FixedFormatter):
        about['rows'] = [label.get_text() for label in ax.get_yticklabels()]
    return {'axes': about, 'drawn': list(_drawn(ax))}


def _drawn(ax: Axes) -> Iterator[dict[str, Any]]:
    for line in ax.lines:
        yield _part('line', line.get_label(), [line.get_xydata()])
    for collection in ax.collections:
        offsets = np.ma.filled(collection.get_offsets(), np.nan)
        yield _part('points', collection.get_label(), [offsets])
        paths = [] if len(offsets) > 1 else [path.vertices for path in collection.get_paths()]
        yield _part('paths', collection.get_label(), paths)
    for patch in ax.patches:
        corners = patch.get_patch_transform().transform(patch.get_path().vertices)
        yield _part('patch', patch.get_label(), [corners])
    for text in ax.texts:
        yield {'text': text.get_text(), 'at': rounded(to_jsonable(text.get_position()))}


def _part(kind: str, label: Any, coordinates: list[Any]) -> dict[str, Any]:
    return {kind: str(label), 'at': [rounded(to_jsonable(np.asarray(of))) for of in coordinates]}
