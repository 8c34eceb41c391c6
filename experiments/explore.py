"""Works a variant out on symbols for 2 to 4 tokens and dimensions.

python -m experiments.explore --variant=shared_qk/vo --tokens=3 --dims=2
"""

from absl import flags

from qkattn.errors import ConfigError
from qkattn.explore.bench import Bench
from qkattn.explore.worked import worked
from qkattn.run import cli

VARIANT = flags.DEFINE_string('variant', None, 'Variant score/value, with options of its circuits.')
TOKENS = flags.DEFINE_integer('tokens', 2, 'Number of tokens, 2 to 4.')
DIMS = flags.DEFINE_integer('dims', 2, 'd_model, 2 to 4.')
HEADS = flags.DEFINE_integer('heads', 1, 'Number of heads, which divides --dims.')
LATEX = flags.DEFINE_bool('latex', False, 'Print LaTeX (amsmath) instead of text.')


def main() -> None:
    if VARIANT.value is None:
        raise ConfigError('--variant=SCORE/VALUE is required, e.g. --variant=qk/vo')
    bench = Bench(VARIANT.value, TOKENS.value, DIMS.value, HEADS.value)
    print(worked(bench, latex=LATEX.value), end='')


if __name__ == '__main__':
    cli.run(main)
