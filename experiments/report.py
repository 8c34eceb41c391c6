"""Reports on a study: prints its table and writes table.txt, .md, .csv, plots and report.html.

python -m experiments.report --study=runs/quickstart
"""

from pathlib import Path

from absl import flags

from qkattn import cli, report

STUDY = flags.DEFINE_string('study', None, 'Directory of the study, as written by ablate.')


def main() -> None:
    if STUDY.value is None:
        raise report.ReportError('--study=DIRECTORY is required')
    page = report.write_report(STUDY.value)
    print(f'{Path(page).with_name("table.txt").read_text()}\nreport: {page}')


if __name__ == '__main__':
    cli.run(main)
