"""The results of a run as JSON: per trial, per evaluation and per document."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.config import fingerprint
from qkattn.data import pipeline
from qkattn.data.evaluation_corpora import identity_with
from qkattn.errors import ConfigError
from qkattn.metrics import (
    CORPORA,
    PREFIXES,
    Metric,
    bits_per_byte,
    logged,
    result_fields,
    with_outside,
)
from qkattn.model import cost
from qkattn.model.sites import attention_spec
from qkattn.storage.records import (
    DIVERGED,
    FINISHED,
    PROVENANCE,
    START,
    describe_outside_metrics,
    metric_fields,
    read_json,
    to_jsonable,
)
from qkattn.train.trials import Evaluation, Stack


def trial_results(
    stack: Stack,
    evaluations: Mapping[str, Evaluation],
    costs: Mapping[str, Any],
    provenance: Mapping[str, Any],
    diverged_at: Mapping[int, int | None],
    corpora: Mapping[str, Evaluation],
) -> list[dict[str, Any]]:
    """Returns the results of a finished run, one JSON object per trial, in trial order.

    Args:
        stack: The trained trials.
        evaluations: The last evaluation of each split but 'train'.
        costs: The times and the lifting of the run.
        provenance: The software and devices of the run, as `provenance_of` returns them.
        diverged_at: The step at which each diverged trial diverged, by trial number.
        corpora: The last evaluation of each corpus of data.evaluate.
    """
    validation = evaluations['validation']
    # The others, such as BLEU, are measured by `_end_metrics`.
    evaluated = {
        name: metric for name, metric in validation.metrics.items() if metric.value is not None
    }
    task_metrics = {metric.name: metric for metric in stack.rows.metrics}
    shared_fields = _shared_fields(stack, evaluations, costs, corpora)
    shared_fields['provenance'] = provenance
    shared_fields |= describe_outside_metrics({**evaluated, **task_metrics})

    alive_X = stack.alive_X
    # The update of the last step may have made the loss infinite in a trial that is alive.
    finished_X = alive_X & np.isfinite(validation.values['loss'])
    end_metrics = _end_metrics(stack, finished_X)

    results = []
    for x, trial in enumerate(stack.config.trials.trials()):
        is_finished = bool(finished_X[x])
        result: dict[str, Any] = {'trial': trial}
        result['status'] = FINISHED if is_finished else DIVERGED
        result['diverged_at'] = diverged_at.get(x)
        if alive_X[x] and not is_finished:
            result['diverged_at'] = stack.step
        result |= shared_fields
        result |= _metrics_of_trial(x, is_finished, evaluated, evaluations, corpora)
        for field, values_X in end_metrics.items():
            result[field] = values_X[x] if is_finished else None
        results.append(result)
    return to_jsonable(results)


def _metrics_of_trial(
    x: int,
    is_finished: bool,
    evaluated: Mapping[str, Metric],
    evaluations: Mapping[str, Evaluation],
    corpora: Mapping[str, Evaluation],
) -> dict[str, float | None]:
    """Returns the metrics of trial x by field, such as 'val_loss' and 'loss[@train]'.

    A value is None if the trial diverged, the split was not evaluated, or the metric is not defined
    for the data.

    Args:
        x: The number of the trial.
        is_finished: False if the trial diverged.
        evaluated: The metrics by name.
        evaluations: The last evaluation of each split.
        corpora: The last evaluation of each corpus of data.evaluate.
    """

    def value_of(evaluation: Evaluation | None, name: str) -> float | None:
        if evaluation is None or not is_finished:
            return None
        value_X = evaluation.values.get(name)
        return None if value_X is None else float(value_X[x])

    fields: dict[str, float | None] = {}
    for split, prefix in PREFIXES.items():  # such as 'validation', 'val'
        for name, metric in evaluated.items():
            if prefix in metric.prefixes:
                fields[metric.field(prefix)] = value_of(evaluations.get(split), name)
    for corpus, evaluation in corpora.items():
        for name, metric in evaluated.items():
            fields[metric.corpus_field(corpus)] = value_of(evaluation, name)
    return fields


def _end_metrics(stack: Stack, finished_X: np.ndarray) -> Mapping[str, Any]:
    """Returns the metrics that the task measures after training, such as {'val_bleu': [X]}.

    Raises:
        ConfigError: A field belongs to no metric of the package or of the task.
    """
    measured = stack.rows.end_metrics(stack, finished_X)
    known_fields = result_fields(with_outside(stack.rows.metrics))
    for field in measured:
        if field not in known_fields:
            raise ConfigError(
                f'end_metrics of {type(stack.rows).__name__} measures {field!r}, which is no field '
                f'of a metric; valid: {", ".join(known_fields)}'
            )
    return measured


def _shared_fields(
    stack: Stack,
    evaluations: Mapping[str, Evaluation],
    costs: Mapping[str, Any],
    corpora: Mapping[str, Evaluation],
) -> dict[str, Any]:
    """Returns the fields that are equal in the results of all trials."""
    config = stack.config
    model = config.model

    spec = attention_spec(model)
    shape = {
        'd_model': model.d_model,
        'd_ff': model.mlp_width,
        'num_layers': model.num_layers,
        'num_heads': model.num_heads,
        'num_kv_heads': spec.num_kv_heads,
        'head_size': spec.head_size,
    }

    unigram_nats = stack.rows.unigram_nats('validation')
    bytes_per_token = stack.rows.bytes_per_token('validation')
    unigram_bits_per_byte = None
    if unigram_nats is not None and bytes_per_token is not None:
        unigram_bits_per_byte = bits_per_byte(unigram_nats, bytes_per_token)
    data = {
        **identity_with(stack.rows, stack.corpora),
        'unigram_loss': unigram_nats,
        'unigram_bits_per_byte': unigram_bits_per_byte,
    }
    for corpus, evaluation in corpora.items():
        corpus_data = data[CORPORA][corpus]  # from `identity_with`
        corpus_data['eval_tokens'] = evaluation.num_targets

    test_tokens = evaluations['test'].num_targets if 'test' in evaluations else None

    return {
        'num_steps': stack.step,
        'num_tokens': stack.step * config.train.batch_size * model.context,
        'parameters': cost.count(model),
        'config': shape,
        'config_hash': fingerprint(config),
        'flops_per_token': cost.flops_per_token(model),
        'cache_floats_per_token': cost.cache_floats_per_token(model),
        **costs,
        'data': data,
        'eval_tokens': evaluations['validation'].num_targets,
        'test_tokens': test_tokens,
        'eval_rows': evaluations['validation'].num_rows,
    }


def document_results(
    stack: Stack, evaluations: Mapping[str, Evaluation], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the loss of each trial on each document of every split.

    An example of 2 trials and 3 documents of the test split:

        {'test': {
            'documents': ['ast.py', 'bdb.py', 'cmd.py'],
            'tokens': [120, 310, 205],  # numbers of targets
            'nats': [[402.1, 950.7, 644.9], None],  # the second trial diverged
        }}

    'nats' are summed over the targets of a document. Documents without targets are left out. A task
    without documents has groups of rows instead, named '0', '1' and so on. If a task weights its
    targets, 'tokens' are sums of weights, as 61.5, and 'nats' are weighted.
    """
    losses_by_split = {}
    for split, evaluation in evaluations.items():
        # The names of C documents, and for each of R evaluated rows the index of its document.
        max_rows = stack.config.data.eval_sequences
        documents, document_R = pipeline.clusters(stack.rows, split, max_rows)
        num_targets_C = _sums_by_document(evaluation.targets_R, document_R, len(documents))
        has_targets_C = num_targets_C > 0

        nats_by_trial: list[list[float] | None] = []
        for nats_R, result in zip(evaluation.nats_RX.T, results, strict=True):
            if result['status'] == FINISHED:
                nats_C = _sums_by_document(nats_R, document_R, len(documents))
                nats_by_trial.append(nats_C[has_targets_C].tolist())
            else:
                nats_by_trial.append(None)

        losses_by_split[split] = {
            'documents': list(itertools.compress(documents, has_targets_C)),
            'tokens': _whole_as_int(num_targets_C[has_targets_C]),
            'nats': nats_by_trial,
        }
    return losses_by_split


def _whole_as_int(numbers: np.ndarray) -> list[int | float]:
    """Returns the numbers as a list, in which whole numbers are integers."""
    return [int(number) if number.is_integer() else number for number in numbers.tolist()]


def _sums_by_document(
    values_R: np.ndarray, document_R: np.ndarray, num_documents: int
) -> np.ndarray:
    """Sums the values of rows over each of C documents; returns [C].

    `document_R` is the index of each row's document.
    """
    values_R = values_R[: len(document_R)]  # drop the rows that pad the last batch
    return np.bincount(document_R, weights=values_R, minlength=num_documents)


def eval_record(
    step: int, evaluation: Evaluation, corpora: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """Returns the record of an evaluation in metrics.jsonl, with values [X] by field.

    Args:
        step: The number of completed steps.
        evaluation: The evaluation on the validation split, for fields such as 'val_loss'.
        corpora: The evaluations on corpora of data.evaluate, for fields such as 'loss[@train]'.
    """
    record: dict[str, Any] = {'kind': 'eval', 'step': step}
    logged_metrics = logged(evaluation.metrics)
    for metric in logged_metrics:
        record[metric.field('val')] = evaluation.values[metric.name]
    for corpus, evaluation_of_corpus in corpora.items():
        for metric in logged_metrics:
            record[metric.corpus_field(corpus)] = evaluation_of_corpus.values[metric.name]
    return record


def final_record(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the last record of metrics.jsonl, with the metrics of all trials by field."""
    first = results[0]
    record = {
        'kind': 'final',
        'step': first['num_steps'],
        'trials': [result['trial'] for result in results],
        'eval_tokens': first['eval_tokens'],
        'test_tokens': first['test_tokens'],
    }
    for field in metric_fields(first):  # such as 'val_loss'
        if any(field in result for result in results):
            record[field] = [result.get(field) for result in results]
    return record


def with_code_of_this_start(directory: Path, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Appends the code version of this start to the versions `before`, without repeats.

    A version holds the git commit and the modules from outside the package.
    """
    recorded = read_json(directory / 'provenance.json', PROVENANCE)
    this_start = recorded['starts'][-1]
    code = {name: this_start[name] for name in ('git', 'imported')}
    other_versions = [version for version in before if version != code]
    return [*other_versions, code]


def provenance_of(
    directory: Path, read_files: Mapping[str, str], code: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the software and devices of a run's last start, without user and host.

    The field 'imported' has the sha256 of imported modules and of `read_files`; 'earlier' has the
    other code versions of the run. Both are absent if empty.

    Args:
        directory: The run directory, with provenance.json.
        read_files: The sha256 of each file that the run has read, by setting.
        code: The code versions of all starts, as `with_code_of_this_start` returns them.
    """
    recorded = read_json(directory / 'provenance.json', PROVENANCE)
    last_start = recorded['starts'][-1]
    provenance = {name: last_start[name] for name in START}  # such as 'git' and 'devices'
    imported = {**last_start['imported'], **read_files}
    earlier_versions = list(code[:-1])  # the last version is the current one
    if imported:
        provenance['imported'] = imported
    if earlier_versions:
        provenance['earlier'] = earlier_versions
    return provenance
