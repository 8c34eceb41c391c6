"""Prints the catalogue of attention variants: equation, options, parameters, cache, source.

python -m experiments.variants
"""

import importlib
import json

from absl import flags

from qkattn.jobs import cli
from qkattn.study.variant_tables import STORED, markdown, stored, text

MARKDOWN = flags.DEFINE_bool('markdown', False, 'Print tables in Markdown instead.')
MEASURE = flags.DEFINE_bool(
    'measure', False, 'Measure every variant again, and store the catalogue in the package.'
)


def main() -> None:
    """Prints the stored catalogue of variants; with --measure, makes and stores it again."""
    if MEASURE.value:
        # Imported here, because printing the stored catalogue does not need JAX.
        measured = importlib.import_module('qkattn.study.variant_catalogue').measured()
        STORED.write_text(json.dumps(measured, indent=1) + '\n', 'utf-8')
        print(f'stored in {STORED}')
    else:
        print(markdown(stored()) if MARKDOWN.value else text(stored()))


if __name__ == '__main__':
    cli.run(main)
