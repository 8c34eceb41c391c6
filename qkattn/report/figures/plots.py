"""The directory plots/ of a report: figures as files, and as SVG for its page."""

from collections.abc import Sequence
from pathlib import Path

from qkattn.report.figures.style import Drawing, render
from qkattn.storage.files import write_atomic


def write_plots(
    plots: Path,
    drawn: Sequence[Drawing],
    kinds: Sequence[str] = ('png', 'pdf', 'svg'),
) -> dict[str, str]:
    """Writes figures into a directory, and removes those of before that are not drawn any more.

    Returns:
      The SVG of each figure for a page, by its stem.
    """
    for of in plots.glob('*.*'):
        if of.stem not in {drawing.stem for drawing in drawn}:
            of.unlink()
    svg = {}
    for drawing in drawn:
        rendered = render(drawing)
        svg[drawing.stem] = rendered.svg
        for kind in kinds:
            content = rendered.paper_svg if kind == 'svg' else getattr(rendered, kind)
            write_atomic(plots / f'{drawing.stem}.{kind}', content)
    return svg
