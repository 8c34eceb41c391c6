"""Checks every number of committed reports, and of headlines in Markdown pages, against the logs.

python -m experiments.verify                        # all studies under experiments/results
python -m experiments.verify --write                # writes the headlines into the pages
"""

from pathlib import Path

from absl import flags

from qkattn.errors import ReportError
from qkattn.report import verify
from qkattn.report.prose import counted
from qkattn.run import cli

ROOT = Path(__file__).parents[1]

RESULTS = flags.DEFINE_string(
    'results', str(ROOT / 'experiments/results'), 'Directory of study directories.'
)
PAGES = flags.DEFINE_list(
    'pages',
    [str(path) for path in (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')))],
    'Markdown pages, at least one of them with a headline; --pages= checks none.',
)
WRITE = flags.DEFINE_bool('write', False, 'Write the headlines instead of checking them.')


def main() -> None:
    if WRITE.value:
        count = sum(verify.check_page(page, write=True) for page in PAGES.value)
        print(f'{counted(count, "headline")} written')
    declarations = sorted(Path(RESULTS.value).glob('*/study.json'))
    if not declarations:
        raise ReportError(f'--results={RESULTS.value} contains no study directory')
    for declaration in declarations:
        count = verify.check_study(declaration.parent)
        print(f'{declaration.parent.name}: {count:,} numbers agree with the logs')
    counts = {page: verify.check_page(page) for page in PAGES.value}
    if counts and not any(counts.values()):
        raise ReportError(f'--pages={",".join(counts)} contain no headline')
    for page, count in counts.items():
        if count:
            print(f'{Path(page).name}: {counted(count, "headline")} checked against the studies')


if __name__ == '__main__':
    cli.run(main)
