"""Runs a weight-matched ablation and writes its report.

python -m experiments.ablate --config=configs/quickstart.py --workdir=runs/quickstart
"""

from absl import flags

from qkattn import cli, report, study
from qkattn.config import ConfigError, Study

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Study directory; the same one resumes.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the cells and their weights, then stop.')


def main() -> None:
    config = cli.read_config(CONFIG, Study)
    cells = study.expand(config)
    trials = len(config.base.trials.trials())
    print(f'{config.name}: {len(cells)} cells of {trials} trials\n{study.table(cells)}', flush=True)
    if DRY_RUN.value:
        return
    if WORKDIR.value is None:
        raise ConfigError('--workdir=DIRECTORY is required')
    path = study.run(config, WORKDIR.value, command=cli.command('ablate'))
    page = report.write_report(path)
    print(f'\n{(path / "table.txt").read_text()}\nreport: {page}')


if __name__ == '__main__':
    cli.run(main)
