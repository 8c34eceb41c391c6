"""What a run leaves for reports: an object per trial, per evaluation, and per document."""

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
      stack: the trained trials.
      evaluations: the last evaluation of each split but 'train'.
      costs: the times and the lifting of the run.
      provenance: the software and devices of the run, as `provenance_of` returns them.
      diverged_at: by trial number, the step at which a trial diverged.
      corpora: the last evaluation of each entry of data.evaluate.
    """
    validation = evaluations['validation']
    evaluated = {
        name: metric for name, metric in validation.metrics.items() if metric.value is not None
    }
    of_task = {metric.name: metric for metric in stack.rows.metrics}
    common = _common(stack, evaluations, costs, corpora)
    common['provenance'] = provenance
    # Declarations of metrics from outside the package, so that reports can show them.
    common |= describe_outside_metrics({**evaluated, **of_task})

    alive_X = stack.alive_X
    # A finite gradient in the last step may still have left parameters with an infinite loss.
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
        result |= common
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

    A metric is None if the trial diverged, if there is no evaluation of the split, or if the metric
    is not defined for its data.

    Args:
      x: the number of the trial.
      is_finished: False if the trial diverged.
      evaluated: the metrics, by name.
      evaluations: the last evaluation of each split of the run's data.
      corpora: the last evaluation of each further corpus, which the setting data.evaluate names.
    """

    def value_of(evaluation: Evaluation | None, name: str) -> float | None:
        if evaluation is None or not is_finished:
            return None
        value_X = evaluation.values.get(name)
        return None if value_X is None else float(value_X[x])

    fields: dict[str, float | None] = {}
    for split, prefix in PREFIXES.items():
        for name, metric in evaluated.items():
            if prefix in metric.prefixes:
                fields[metric.field(prefix)] = value_of(evaluations.get(split), name)
    for corpus, evaluation in corpora.items():
        for name, metric in evaluated.items():
            fields[metric.corpus_field(corpus)] = value_of(evaluation, name)
    return fields


def _end_metrics(stack: Stack, finished_X: np.ndarray) -> Mapping[str, Any]:
    """Returns what the task measures when training ends, as values [X] by field of a result.

    A translation task, for example, gives {'val_bleu': [31.2, 30.8]} for two trials. Raises
    ConfigError for a field that belongs to no metric of the package or of the task.
    """
    measured = stack.rows.end_metrics(stack, finished_X)
    known = result_fields(with_outside(stack.rows.metrics))
    for field in measured:
        if field not in known:
            raise ConfigError(
                f'end_metrics of {type(stack.rows).__name__} measures {field!r}, which is no field '
                f'of a metric; valid: {", ".join(known)}'
            )
    return measured


def _common(
    stack: Stack,
    evaluations: Mapping[str, Evaluation],
    costs: Mapping[str, Any],
    corpora: Mapping[str, Evaluation],
) -> dict[str, Any]:
    """Returns the fields that the results of all trials share.

    These are the length of training, the size and the costs of the model, the `costs` of the run,
    the data with the loss of unigram frequencies, and the size of the evaluations.
    """
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
        data[CORPORA][corpus]['eval_tokens'] = evaluation.num_targets

    # A dataset may have no test split.
    test_tokens = None
    if 'test' in evaluations:
        test_tokens = evaluations['test'].num_targets

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
    """Returns the loss of each of X trials on each of the C documents of every split.

    An example of 2 trials and 3 documents of the test split:

        {'test': {
            'documents': ['ast.py', 'bdb.py', 'cmd.py'],
            'tokens': [120, 310, 205],  # numbers of targets
            'nats': [[402.1, 950.7, 644.9], None],  # the second trial diverged
        }}

    'nats' are losses summed over the targets of a document. So the loss of the first trial on the
    split, in nats per target, is (402.1 + 950.7 + 644.9) / (120 + 310 + 205). Documents without
    targets are left out.

    If the task has no documents, groups of rows named '0', '1' and so on take their place.
    """
    splits = {}
    for split, evaluation in evaluations.items():
        # The names of the C documents, or groups. Row r of the R evaluated rows belongs to the
        # document names[document_R[r]].
        max_rows = stack.config.data.eval_sequences
        names, document_R = pipeline.clusters(stack.rows, split, max_rows)
        targets_C = _sums_by_document(evaluation.targets_R, document_R, len(names))
        has_targets_C = targets_C > 0

        # The losses of each trial; None if it diverged. Column x of nats_RX belongs to results[x].
        nats: list[list[float] | None] = []
        for nats_R, result in zip(evaluation.nats_RX.T, results, strict=True):
            if result['status'] == FINISHED:
                nats_C = _sums_by_document(nats_R, document_R, len(names))
                nats.append(nats_C[has_targets_C].tolist())
            else:
                nats.append(None)

        splits[split] = {
            'documents': list(itertools.compress(names, has_targets_C)),
            'tokens': targets_C[has_targets_C].astype(int).tolist(),
            'nats': nats,
        }
    return splits


def _sums_by_document(
    values_R: np.ndarray, document_R: np.ndarray, num_documents: int
) -> np.ndarray:
    """Sums the values of rows over each document; returns [C].

    `document_R` holds the number of each row's document. Any further values belong to rows that pad
    the last batch; they are left out.
    """
    values_R = values_R[: len(document_R)]
    return np.bincount(document_R, weights=values_R, minlength=num_documents)


def eval_record(
    step: int, evaluation: Evaluation, corpora: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """Returns the record of an evaluation in metrics.jsonl, with values [X] by field.

    Fields such as 'val_loss' are from `evaluation`, on the validation split. Fields such as
    'loss[@train]' are from `corpora`, evaluations on further corpora such as '@train', which the
    setting data.evaluate names.
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
    """Returns the last record of metrics.jsonl: the metrics of the results, a value per trial."""
    first = results[0]
    record = {
        'kind': 'final',
        'step': first['num_steps'],
        'trials': [result['trial'] for result in results],
        'eval_tokens': first['eval_tokens'],
        'test_tokens': first['test_tokens'],
    }
    for field in metric_fields(first):
        if any(field in result for result in results):
            record[field] = [result.get(field) for result in results]
    return record


def with_code_of_this_start(directory: Path, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the code of all starts of a run: that of earlier starts, `before`, then of this one.

    An entry holds the git commit and the modules from outside the package, as provenance.json does.
    Each version of the code is listed once, and the version of this start is the last entry.
    """
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    code = {name: start[name] for name in ('git', 'imported')}
    others = [earlier for earlier in before if earlier != code]
    return [*others, code]


def provenance_of(
    directory: Path, read_files: Mapping[str, str], code: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the provenance of results: the software and devices of the run's last start.

    A run has several starts if it was interrupted. The fields are those of the last start in
    provenance.json, without user and host, and two that are left out if they are empty:

        git, python, versions, devices
        imported   sha256 of modules from outside the package, and of files that the run has read
        earlier    the code of earlier starts, if it was different

    Args:
      directory: the run directory, with provenance.json.
      read_files: the sha256 of files that the run has read, by setting.
      code: the code of all starts, as `with_code_of_this_start` returns it.
    """
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    provenance = {name: start[name] for name in START}
    imported = {**start['imported'], **read_files}
    earlier = list(code[:-1])  # the last entry is the code of the last start
    if imported:
        provenance['imported'] = imported
    if earlier:
        provenance['earlier'] = earlier
    return provenance
