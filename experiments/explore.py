"""Evaluates a variant symbolically for 2 to 4 tokens and dimensions, or writes a page with all.

python -m experiments.explore --variant=shared_qk/vo --tokens=3 --dims=2
python -m experiments.explore --html=runs/explorer.html   # drag numbers
"""

from absl import flags

from experiments.explorer.bench import Bench
from experiments.explorer.page import page
from experiments.explorer.symbolic import sympy
from experiments.explorer.worked import worked
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.jobs.display import waiting
from qkattn.storage.files import as_path, make_directory, write_atomic
from qkattn.train.program_cache import keep_programs

VARIANT = flags.DEFINE_string('variant', None, 'Variant score/value, with options of its circuits.')
TOKENS = flags.DEFINE_integer('tokens', 2, 'Number of tokens, 2 to 4.')
DIMS = flags.DEFINE_integer('dims', 2, 'd_model, 2 to 4.')
HEADS = flags.DEFINE_integer('heads', 1, 'Number of heads, which divides --dims.')
LATEX = flags.DEFINE_bool('latex', False, 'Print LaTeX (amsmath) instead of text.')
HTML = cli.define_path('html', None, 'File to write a page with all variants to.')


def main() -> None:
    """Prints the equations of --variant, or writes a page with all variants to --html."""
    has_variant = VARIANT.value is not None
    has_html = HTML.value is not None
    if has_variant == has_html:
        raise ConfigError('give either --variant=SCORE/VALUE or --html=FILE')
    if has_variant:
        bench = Bench(VARIANT.value, tokens=TOKENS.value, dims=DIMS.value, heads=HEADS.value)
        print(worked(bench, latex=LATEX.value), end='')
        return
    keep_programs()
    sympy()  # raises ConfigError if sympy is not installed
    file = as_path(HTML.value)
    if file.is_dir():
        raise ConfigError(f'--html={file} is a directory; give a file, e.g. {file}/explorer.html')
    make_directory(file.parent, name='the directory of --html')
    if file.exists():
        raise ConfigError(f'--html={file} exists; give another file')
    with waiting(file.name, 'writing the page'):
        write_atomic(file, page())
    print(f'wrote {file}')


if __name__ == '__main__':
    cli.run(main)
