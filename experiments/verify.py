"""Verifies every number of committed reports and of the README's headline against the logs.

python -m experiments.verify                        # all studies under experiments/results
python -m experiments.verify --write                # writes the headlines into the README
"""

from pathlib import Path

from absl import flags

from qkattn.errors import ReportError
from qkattn.report import verify
from qkattn.run import cli

ROOT = Path(__file__).parents[1]

RESULTS = flags.DEFINE_string(
    'results', str(ROOT / 'experiments/results'), 'Directory of study directories.'
)
PAGE = flags.DEFINE_string(
    'page', str(ROOT / 'README.md'), 'Markdown page with headlines; --page= skips it.'
)
WRITE = flags.DEFINE_bool('write', False, 'Write the headlines instead of checking them.')


def main() -> None:
    if WRITE.value:
        print(f'{PAGE.value}: {verify.check_page(PAGE.value, write=True)} headlines written')
    declarations = sorted(Path(RESULTS.value).glob('*/study.json'))
    if not declarations:
        raise ReportError(f'--results={RESULTS.value} contains no study directory')
    for declaration in declarations:
        count = verify.check_study(declaration.parent)
        print(f'{declaration.parent.name}: {count:,} numbers agree with the logs')
    if PAGE.value:
        count = verify.check_page(PAGE.value)
        if not count:
            raise ReportError(f'--page={PAGE.value} contains no headline')
        print(f'{Path(PAGE.value).name}: {count} headlines agree with their studies')


if __name__ == '__main__':
    cli.run(main)
