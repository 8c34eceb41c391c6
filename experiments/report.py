"""Prints the results of a study and writes its tables and report.html, which has the figures.

python -m experiments.report --study=runs/fair_small
python -m experiments.report --study=runs/fair_small --export=kept/fair_small
python -m experiments.report --study=runs/fair_small --plots=png,pdf
python -m experiments.report --study=runs/fair_small --yardsticks
python -m experiments.report --study=runs/fair_small --accept=commits --why=WHY
"""

import importlib

from absl import flags

from qkattn import report
from qkattn.errors import ConfigError, ReportError
from qkattn.jobs import cli
from qkattn.jobs.display import waiting
from qkattn.report.figures.drawing import FORMATS
from qkattn.storage import ledger
from qkattn.storage.files import as_path

STUDY = cli.define_path('study', None, 'Study directory; --study= may be left out.')
EXPORT = cli.define_path(
    'export', None, 'Directory to copy the files to from which a report is made.'
)
ACCEPT = flags.DEFINE_list(
    'accept',
    [],
    'What should not withhold verdicts, recorded in the ledger: uncommitted (changes) or commits '
    '(that differ between runs). Needs --why.',
)
WHY = flags.DEFINE_string('why', '', 'Why --accept is right, for whoever reads the report.')
PLOTS = flags.DEFINE_list(
    'plots',
    [],
    f'Formats of figures for files in plots/, beside those on the page: {", ".join(FORMATS)}.',
)
YARDSTICKS = flags.DEFINE_bool(
    'yardsticks', False, 'Record what the models of the study have to beat, if it is not recorded.'
)
IMPORTS = cli.define_imports()


def main() -> None:
    """Prints the results of a study and writes its report, with what further flags ask for."""
    study = as_path(cli.required(STUDY))
    if WHY.value and not ACCEPT.value:
        raise ConfigError(f'--why={WHY.value!r} is a reason without --accept')
    if EXPORT.value is not None:
        report.check_export(study, EXPORT.value)
    if ACCEPT.value:
        ledger.accept(study, ACCEPT.value, WHY.value)
    problems = []
    if YARDSTICKS.value:
        # Imported here, because reports do not need JAX.
        recorder = importlib.import_module('qkattn.study.yardsticks')
        with waiting(study.name, 'recording yardsticks'):
            problems = recorder.record(study, IMPORTS.value)
    with waiting(study.name, 'writing the report'):
        text = report.show_report(study, PLOTS.value)
    print(text)
    if EXPORT.value is not None:
        print(f'exported to {report.export(study, EXPORT.value)}')
    if problems:
        raise ReportError(f'yardsticks could not be recorded: {"; ".join(problems)}')


if __name__ == '__main__':
    cli.run(main, positional=STUDY)
