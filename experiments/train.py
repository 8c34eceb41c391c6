"""Trains one architecture as a stack of trials.

python -m experiments.train --config=configs/small.py --workdir=runs/small
python -m experiments.train --config=small --dry_run  # parameters, FLOPs
python -m experiments.train --config=small --dry_run=v5e-1x1  # its memory
"""

import shlex
import textwrap
from typing import Any

from qkattn.config import Config
from qkattn.errors import ConfigError
from qkattn.jobs import agreement, bootstrap, cli, signals
from qkattn.metrics import PREFIXES, shown
from qkattn.storage.files import as_path
from qkattn.storage.records import corpora_of, metrics_of
from qkattn.train import dry_run
from qkattn.train.loop import train
from qkattn.train.program_cache import keep_programs
from qkattn.train.results import FINISHED

CONFIG = cli.define_config(Config)
DRY_RUN = cli.define_dry_run('Only print parameters, tokens and FLOPs; compiles nothing.')
LOG = cli.define_path('dry_run_log', None, 'CSV file to which --dry_run=POD appends a row.')
WORKDIR = cli.define_path('workdir', None, 'Run directory; the same directory resumes.')
PROFILE = cli.define_path('profile', None, 'Directory for a trace of the third to fifth dispatch.')


@signals.exit_on_signal(cli.is_dry_run)
@bootstrap.in_job
def main() -> None:
    """Trains the run of a config and prints its results; with --dry_run, only its cost."""
    keep_programs()
    config = cli.read_config(CONFIG)
    has_pod = DRY_RUN.value not in (None, cli.COUNT)
    if LOG.value is not None and not has_pod:
        raise ConfigError(f'--dry_run_log={LOG.value} needs --dry_run=POD')
    if DRY_RUN.value is not None:
        _dry_run(config)
        return
    workdir = cli.required(WORKDIR)
    for result in train(config, workdir, profile=PROFILE.value):
        print(text_of_result(result))
    path = as_path(workdir)
    print(f'results     {path / "result.json"}')
    print(f'metrics     {path / "metrics.jsonl"}')
    print(f'checkpoints {path / "checkpoints"}')
    source = shlex.quote(f'--source={path}')
    print(f'to export   {cli.script("convert")} {source} --out=DIRECTORY')


def _dry_run(config: Config) -> None:
    """Prints what a run would cost, without training it.

    Without a pod, these are its parameters, tokens and FLOPs. With --dry_run=POD, a training step
    is compiled for the pod, and its memory and FLOPs are printed and appended to --dry_run_log.
    """
    if DRY_RUN.value == cli.COUNT:  # --dry_run without a pod
        print(dry_run.counts(config))
        return
    pod = DRY_RUN.value
    log_file = LOG.value
    if log_file is not None:
        dry_run.check_log(log_file)
    step = dry_run.describe(config, pod)
    if not agreement.is_process_0():
        return
    print(dry_run.text(step))
    if log_file is not None:
        dry_run.append_to_log(step, log_file)


def text_of_result(result: dict[str, Any]) -> str:
    """Formats the result of a trial: its settings, its status, and its metrics if it finished."""
    settings = ' '.join(f'{name}={value}' for name, value in result['trial'].items())
    first_line = f'{settings}: {result["status"]}'
    if result.get('diverged_at') is not None:
        first_line += f' at step {result["diverged_at"]:,}'
    lines = [first_line]
    if result['status'] == FINISHED:
        for split, metrics in metrics_by_split(result).items():
            text = f'{split} {", ".join(metrics)}'
            lines.append(textwrap.fill(text, 100, initial_indent='  ', subsequent_indent='    '))
    return '\n'.join(lines)


def metrics_by_split(result: dict[str, Any]) -> dict[str, list[str]]:
    """Formats the metrics of a finished trial by split, and by corpus of data.evaluate.

    For example, {'validation': ['loss 1.4513', ...], 'test': [...]}. A split without a value is
    left out.
    """
    shown_metrics = shown(metrics_of(result), [result])
    metrics = [metric for metric in shown_metrics if metric.role != 'error']
    # The fields of `result` with these metrics, such as 'val_loss'.
    fields_by_split: dict[str, list[str]] = {}
    for split, prefix in PREFIXES.items():
        fields_by_split[split] = [f'{prefix}_{metric.name}' for metric in metrics]
    for corpus in corpora_of(result):
        fields_by_split[corpus] = [metric.corpus_field(corpus) for metric in metrics]

    texts_by_split: dict[str, list[str]] = {}
    for split, fields in fields_by_split.items():
        texts = []
        for metric, field in zip(metrics, fields, strict=True):
            value = result.get(field)
            if value is not None:
                texts.append(metric.text(value))
        if texts:
            texts_by_split[split] = texts
    return texts_by_split


if __name__ == '__main__':
    cli.run(main)
