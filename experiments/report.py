"""Prints the table of a study and writes tables, figures and report.html into its directory.

python -m experiments.report --study=runs/fair_small
python -m experiments.report --study=runs/fair_small --export=results/fair_small   # to keep
"""

from pathlib import Path

from absl import flags

from qkattn import report
from qkattn.errors import ReportError
from qkattn.report.export import export
from qkattn.run import cli

STUDY = flags.DEFINE_string('study', None, 'Study directory, as written by experiments.ablate.')
EXPORT = flags.DEFINE_string(
    'export', None, 'Directory to copy the files to that a report is made from.'
)


def main() -> None:
    if STUDY.value is None:
        raise ReportError('--study=DIRECTORY is required')
    page = report.write_report(STUDY.value)
    print(f'{Path(page).with_name("table.txt").read_text()}\nreport: {page}')
    if EXPORT.value is not None:
        print(f'exported to {export(STUDY.value, EXPORT.value)}')


if __name__ == '__main__':
    cli.run(main)
