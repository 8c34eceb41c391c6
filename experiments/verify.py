"""Asserts every number of committed reports, and of the README's headlines, against the logs.

python -m experiments.verify                        # all studies under experiments/results
python -m experiments.verify --write                # puts the headlines into the README
"""

from pathlib import Path

from absl import flags

from qkattn import cli
from qkattn.report import verify

ROOT = Path(__file__).parents[1]

RESULTS = flags.DEFINE_string(
    'results', str(ROOT / 'experiments/results'), 'Directory of study directories.'
)
PAGE = flags.DEFINE_string('page', str(ROOT / 'README.md'), 'Markdown page with headlines.')
WRITE = flags.DEFINE_bool('write', False, 'Write the headlines instead of checking them.')


def main() -> None:
    if WRITE.value:
        print(f'{PAGE.value}: {verify.check_page(PAGE.value, write=True)} headlines written')
    for declaration in sorted(Path(RESULTS.value).glob('*/study.json')):
        count = verify.check_study(declaration.parent)
        print(f'{declaration.parent.name}: {count:,} numbers are what the logs give')
    print(f'{Path(PAGE.value).name}: {verify.check_page(PAGE.value)} headlines are')


if __name__ == '__main__':
    cli.run(main)
