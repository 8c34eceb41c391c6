"""Yardsticks of a study: what its baseline has to beat before arms are compared.

Recorded when training is finished, from the data that the models saw and from the checkpoints of
the baseline's verdict runs that are still there:

    yardsticks.json
      groups   of each size, corpus and length of training: the task, the tokens that its models
               saw, the tokens counted, and on each evaluation split the losses (nats/token) of
               counts of these tokens, by name; of a translation the BLEU of IBM model 1 on
               the sentences that its models translate; the definition (`yardstick_definitions`)
      runs     of each of its verdict runs the trials: loss; of a language model at position 4
               ('early') and over the last half of the context ('late'), of a translator with the
               sources shuffled; or why not
"""

import logging
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, MeshConfig, from_json
from qkattn.config.imports import require_named
from qkattn.data import pipeline
from qkattn.data.tasks.language import LanguageRows, MaskedRows
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers.vocabulary import as_recorded, names_in
from qkattn.decode.translate import translation_scores
from qkattn.errors import CheckpointError, ConfigError
from qkattn.jobs.display import waiting
from qkattn.metrics import PREFIXES
from qkattn.model.transformer import cross_entropy
from qkattn.stats import ibm1, ngrams
from qkattn.storage import records
from qkattn.storage.files import Files, absolute
from qkattn.storage.ledger import YARDSTICKS
from qkattn.storage.run_directory import describe_start
from qkattn.study import stored
from qkattn.study.arm_key import LONGER, SAME_SHAPE
from qkattn.study.tuning import SCREENING, VERDICT
from qkattn.study.yardstick_definitions import DEFINITIONS, is_current
from qkattn.train import step
from qkattn.train.exported import load_stack
from qkattn.train.program import stack_program
from qkattn.train.sharding import make_mesh

ORDERS = 6
NEIGHBOURS = 5  # of a masked token
# Counts of more tokens take more memory than they lower the loss; the file says how many were.
MAX_TOKENS = 2**23
EARLY = 4
# Between a logged loss and the same from a checkpoint, on another machine.
ROUNDING = 1e-3

log = logging.getLogger(__name__)

_Record = dict[str, Any]


def record(directory: str | Path, imports: Collection[str] | None = None) -> list[str]:
    """Writes yardsticks.json into a study's directory; what it holds already is kept.

    A group of an earlier definition is recorded again. `imports` are the import paths that configs
    of the study may name; None is any, of a study that this process has trained. Returns why
    yardsticks of a size and corpus could not be computed, a sentence each. Raises ConfigError for a
    directory without the files of a study.
    """
    if jax.process_count() > 1:  # reading checkpoints would take all of them
        return ['the job has several processes']
    path = absolute(directory)
    files = stored.opened(path)
    before: _Record = {'groups': [], 'runs': []}
    if (path / YARDSTICKS).exists():
        before = records.read_json(path / YARDSTICKS, dict.fromkeys(before, tuple[dict, ...]))
    groups = {group['run']: group for group in before['groups']}
    runs = {run['run']: run for run in before['runs']}
    problems: dict[str, None] = {}
    made: dict[str, list[_Record]] = {'groups': [], 'runs': []}
    counted: dict[tuple, _Record] = {}
    for run, results in _of_baseline(path, files):
        if imports is not None:
            _require_named(path, run, imports)
        name = run['run']
        config: Config = from_json(Config, run['config'])
        # What the losses of counts depend on.
        key = config.data, config.model.context, config.train.num_steps, config.trials.seeds[0]
        try:
            if name not in groups or not is_current(groups[name]):
                if key not in counted:
                    counted[key] = _group(config, results[0])
                about = {field: run[field] for field in ('run', 'size', 'corpus')}
                groups[name] = about | {'longer': run['control'] == LONGER} | counted[key]
            if run['stage'] == VERDICT and runs.get(name, {}).get('trials') is None:
                about = {field: run[field] for field in ('run', *records.ARM_KEY)}
                runs[name] = about | _run(path, run, config, results)
        except ConfigError as error:  # then what is recorded is kept
            problems[f'{run["size"]}, {run["corpus"]}: {error}'] = None
        made['groups'] += [groups[name]] if name in groups else []
        made['runs'] += [runs[name]] if name in runs else []
    if any(new not in before[name] for name, several in made.items() for new in several):
        start = describe_start()
        about = {'recorded': start['started'], 'start': {key: start[key] for key in records.START}}
        records.write_json(path / YARDSTICKS, about | records.to_jsonable(made))
    return list(problems)


def _require_named(path: Path, run: _Record, imports: Collection[str]) -> None:
    """Raises ConfigError for an import path that the plan, or the run's own config, names alone."""
    remedy = 'if you trust it, give --imports={}'
    require_named(run['config'], imports, path / 'plan.jsonl', remedy)
    file = path / run['directory'] / 'config.json'
    if file.exists():
        config = records.read_json(file, records.CONFIG)['config']
        require_named(config, imports, file, remedy)


def _of_baseline(path: Path, files: Files) -> Iterator[tuple[_Record, list[_Record]]]:
    """The finished runs of the baseline but those of screening, each with its results."""
    baseline = records.read_json(path / 'study.json', {'baseline': str})['baseline']
    results: dict[str, list[_Record]] = {}
    for result in records.read_lines(files / 'results.jsonl', {}, take=records.check_result):
        results.setdefault(result['run'], []).append(result)
    schema = records.ARM_KEY | {
        'run': str,
        'stage': str,
        'trials': int,
        'config': dict,
        'directory': str,
    }
    for run in records.read_lines(files / 'plan.jsonl', schema, take=stored.check_run_directory):
        results_of_run = results.get(run['run'], [])
        is_baseline = run['variant'] == baseline and run['control'] != SAME_SHAPE
        is_finished = any(result['status'] == records.FINISHED for result in results_of_run)
        if is_baseline and is_finished and run['stage'] != SCREENING:
            yield run, results_of_run


def record_finished(directory: Path) -> None:
    """Records the yardsticks of a study whose training is finished; logs what it could not."""
    with waiting(directory.name, 'recording yardsticks'):
        problems = record(directory)
    for problem in problems:
        log.warning(
            'yardsticks of %s not recorded: %s; python -m experiments.report --study=%s '
            '--yardsticks records them',
            *(directory.name, problem, shlex.quote(str(directory))),
        )


def _group(config: Config, result: Mapping[str, Any]) -> _Record:
    """The tokens that models of this config saw, and the losses of counts of them."""
    seen = config.train.num_steps * config.train.batch_size * config.model.context
    about = {'seen': seen, 'tokens': None, 'losses': {}}
    rows = _same_rows(config, result)
    if isinstance(rows, TranslationRows):
        measured: _Record = {'task': 'translation', 'bleu': _word_by_word(config, rows)}
    elif isinstance(rows, LanguageRows | MaskedRows):
        measured = _counted(config, rows)
    else:
        measured = {'task': 'probe', 'losses': _chance(rows)}
    return about | measured | {'definition': DEFINITIONS[measured['task']]}


def _chance(rows: Rows) -> _Record:
    """The losses of a probe's token frequencies, or of all tokens alike."""
    losses = {}
    for split in rows.splits[1:]:
        nats = rows.unigram_nats(split)
        chance = float(np.log(rows.vocab_size)) if nats is None else nats
        losses[PREFIXES[split]] = {'chance': chance}
    return losses


def _word_by_word(config: Config, rows: TranslationRows) -> _Record:
    """The BLEU of IBM model 1 on the sentences that models of this config translate."""
    decode = rows.pairs.source.tokenizer.decode

    def texts(split: str) -> list[tuple[str, str]]:
        sides = [map(decode, side) for side in rows.pairs.sentences(split)]
        return list(zip(*sides, strict=True))

    dictionary = ibm1.fit(texts('train'))
    scores = {}
    for split in rows.splits[1:]:
        pairs = texts(split)[: config.decode.max_sources]
        translations = [dictionary.translate(source) for source, _ in pairs]
        references = [target for _, target in pairs]
        measured = translation_scores(translations, references, lowercase=config.data.lowercase)
        scores[PREFIXES[split]] = measured['bleu']
    return scores


def _same_rows(config: Config, result: Mapping[str, Any]) -> Rows:
    """The rows of a config; ConfigError if they differ from those of the result."""
    with as_recorded(*names_in(result['data'])):
        rows = rows_of(config)
    here = records.to_jsonable(rows.identity())
    if any(result['data'].get(name) != value for name, value in here.items()):
        raise ConfigError(
            f'data.name={config.data.name!r} gives other data on this machine than the study was '
            'trained on; record its yardsticks where the same versions are installed'
        )
    return rows


def _tokens(rows: Rows, batch: Batch) -> np.ndarray:
    """The text of a batch before masking."""
    if isinstance(rows, MaskedRows):
        return batch['targets_BT']
    return np.concatenate([batch['tokens_BT'][:, :1], batch['targets_BT']], axis=1)


def _counted(config: Config, rows: LanguageRows | MaskedRows) -> _Record:
    """The training tokens of the first trial, each once, and the losses of their counts."""
    number = config.train.num_steps * config.train.batch_size
    number = min(number, rows.count('train'), max(MAX_TOKENS // rows.length, 1))
    size = min(number, 1024)
    seed = config.trials.seeds[0]
    batches = (
        pipeline.train_batch(rows, seed=seed, step=at, batch_size=size)
        for at in range(-(-number // size))
    )
    text_RL = np.concatenate([_tokens(rows, batch) for batch in batches])[:number]
    splits = {}
    for split in rows.splits[1:]:
        most = config.data.eval_sequences
        parts = list(pipeline.eval_batches(rows, split, batch_size=1024, max_rows=most))
        splits[split] = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
    if isinstance(rows, MaskedRows):
        task = 'masked'
        names = ['frequencies', 'nearest visible neighbour']
        names += [f'{n} nearest visible neighbours' for n in range(2, NEIGHBOURS + 1)]
        nats = ngrams.masked_losses(
            text_RL,
            [_hidden(rows, batch) for batch in splits.values()],
            NEIGHBOURS,
            rows.vocab_size,
        )
        weights = [np.ones(nats_OM.shape[1]) for nats_OM in nats]  # targets alone
    else:
        task = 'language'
        names = [f'{order}-gram' for order in range(1, ORDERS + 1)]
        counted = ngrams.preceding(text_RL, ORDERS - 1)
        texts = [_tokens(rows, batch) for batch in splits.values()]
        sets = [ngrams.preceding(text, ORDERS - 1) for text in texts]
        nats = ngrams.losses(*counted, sets, rows.vocab_size)
        weights = [batch['loss_weights_BT'].ravel() for batch in splits.values()]
    losses = {}
    for split, nats_OM, weights_M in zip(splits, nats, weights, strict=True):
        means_O = np.average(nats_OM, axis=1, weights=weights_M)
        losses[PREFIXES[split]] = dict(zip(names, means_O.tolist(), strict=True))
    return {'task': task, 'tokens': number * rows.length, 'losses': losses}


def _hidden(rows: MaskedRows, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a model sees of evaluated rows, the rows themselves, and where they are targets."""
    tokens_BT = batch['tokens_BT']
    shown_BT = np.where(tokens_BT == rows.mask, ngrams.MISSING, tokens_BT)
    return shown_BT, batch['targets_BT'], batch['loss_weights_BT'] > 0


def _run(path: Path, run: _Record, config: Config, results: list[_Record]) -> _Record:
    """The trials of a verdict run of the baseline, or why they are not measured."""
    try:
        if not (path / run['directory'] / 'checkpoints').is_dir():
            raise CheckpointError('it has no checkpoint')
        params = load_stack(path / run['directory'])[2]['params']
    except (ConfigError, CheckpointError) as error:
        return {'trials': None, 'why': str(error)}
    if len(results) != run['trials']:
        return {'trials': None, 'why': 'results of its trials are missing'}
    rows = _same_rows(config, results[0])
    log.info('measuring the loss by position of %s', run['directory'])
    split = PREFIXES[rows.splits[-1]]
    made = []
    for result, trial in zip(results, _trials(config, rows, params), strict=True):
        if result['status'] == records.FINISHED:
            loss = trial['loss']
            logged = result[f'{split}_loss']
            if not np.isclose(loss, logged, atol=ROUNDING):
                why = f'its checkpoint has a loss of {loss:.4f}, its result {logged:.4f}'
                return {'trials': None, 'why': why}
            made.append({'seed': result['trial']['seed']} | trial)
    return {'trials': made, 'why': None}


def _trials(config: Config, rows: Rows, params: dict) -> Iterator[_Record]:
    """Measurements of each of the stacked trials on the last split; None where not defined."""
    nats_XT, weights_T = _by_position(config, rows, params)
    means = {'loss': nats_XT.sum(1) / weights_T.sum()}
    T = config.model.context
    if isinstance(rows, LanguageRows) and 2 * EARLY <= T:
        means['early'] = nats_XT[:, EARLY - 1] / weights_T[EARLY - 1]
        means['late'] = nats_XT[:, T // 2 :].sum(1) / weights_T[T // 2 :].sum()
    if isinstance(rows, TranslationRows):
        nats_XT, weights_T = _by_position(config, rows.with_shuffled_sources(), params)
        means['shuffled'] = nats_XT.sum(1) / weights_T.sum()
    for losses in zip(*means.values(), strict=True):
        absent = dict.fromkeys(('early', 'late', 'shuffled'))
        yield absent | dict(zip(means, map(float, losses), strict=True))


def _by_position(config: Config, rows: Rows, params: dict) -> tuple[np.ndarray, np.ndarray]:
    """The summed loss of each trial by position in the rows of the last split, and the weights."""
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    measure = stack_program(config, 'map', mesh, _weighted_nats)
    size = config.train.batch_size
    most = config.data.eval_sequences
    nats = []
    weights = []
    for batch in pipeline.eval_batches(rows, rows.splits[-1], batch_size=size, max_rows=most):
        nats.append(np.sum(measure(params, batch)['nats_BT'], axis=1, dtype=float))
        weights.append(np.sum(batch['loss_weights_BT'], axis=0, dtype=float))
    return np.sum(nats, axis=0), np.sum(weights, axis=0)


def _weighted_nats(config: Config, params: dict, batch: Batch) -> dict[str, jax.Array]:
    """Loss weight times cross-entropy of every target of one trial."""
    measured = step.on_targets(
        config, params, batch, lambda *pair: {'nats_BT': cross_entropy(*pair)}
    )
    return {'nats_BT': measured['nats_BT'] * batch['loss_weights_BT']}
