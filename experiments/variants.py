"""Prints the catalogue of attention variants: equation, parameters, FLOPs, cache, conversions.

python -m experiments.variants
"""

from absl import flags

from qkattn.jobs import cli
from qkattn.study import catalogue

MARKDOWN = flags.DEFINE_bool('markdown', False, 'Print tables in Markdown instead.')
EQUATIONS = flags.DEFINE_bool('equations', False, 'Print equations and options in JSON instead.')
CONVERSIONS = flags.DEFINE_bool('conversions', False, 'Print measured errors of conversions.')


def main() -> None:
    if CONVERSIONS.value:
        print(catalogue.conversion_table())
    elif EQUATIONS.value:
        print(catalogue.equations())
    else:
        print(catalogue.markdown() if MARKDOWN.value else catalogue.text())


if __name__ == '__main__':
    cli.run(main)
