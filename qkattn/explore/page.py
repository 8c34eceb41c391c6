"""The page on which numbers are dragged: self-contained HTML, no server, no network."""

import json
from collections.abc import Iterable

import jinja2

from qkattn.explore.table import SIZES, table
from qkattn.report.figures.style import DARK, LIGHT


def page(sizes: Iterable[tuple[int, int]] = SIZES) -> str:
    """The page as an HTML document.

    Args:
      sizes: the pairs of d_model and number of heads that it offers.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader('qkattn.explore'),
        autoescape=jinja2.select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # '<' inside a string of JSON would end the script element early.
    data = json.dumps(table(sizes), separators=(',', ':')).replace('<', '\\u003c')
    css, *scripts = (
        environment.loader.get_source(environment, f'explorer.{name}')[0]
        for name in ('css', 'compute.js', 'show.js', 'act.js')
    )
    template = environment.get_template('explorer.html.j2')
    return template.render(data=data, light=LIGHT, dark=DARK, css=css, scripts=scripts)
