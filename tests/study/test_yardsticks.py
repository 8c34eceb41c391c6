"""Yardsticks of a small study, recorded from its data and from the checkpoint of its one run."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from experiments.claims.protocol import translator
from qkattn.config import Config, to_json
from qkattn.data import pipeline
from qkattn.data.tasks.language import MaskedRows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.metrics.translation import translation_scores
from qkattn.stats import ibm1, ngrams
from qkattn.storage.ledger import YARDSTICKS
from qkattn.storage.records import read_json
from qkattn.study import stored, yardsticks
from qkattn.study.yardstick_definitions import DEFINITIONS, is_current
from tests.refusals import refused
from tests.studies import read_lines, write_lines

ARM = {'variant': 'qk/vo', 'size': 'd_model=32', 'corpus': 'stdlib', 'control': None}


class RecordedStudy(NamedTuple):
    config: Config
    path: Path


@pytest.fixture
def study(small_run, tmp_path):
    """Prepares the directory of a study with one finished verdict run, 'a', in runs/a.

    The run trained the baseline, a small language model, with the seeds 0 and 1. It has a
    checkpoint. Returns the config of the run and the path of the study.
    """
    config = small_run.config
    shutil.copytree(small_run.path, tmp_path / 'runs/a')
    results = read_json(small_run.path / 'result.json', [{}])
    planned = {
        'run': 'a',
        **ARM,
        'stage': 'verdict',
        'directory': 'runs/a',
        'config': to_json(config),
        'trials': len(results),
    }
    (tmp_path / 'study.json').write_text('{"baseline": "qk/vo"}')
    write_lines(tmp_path / 'plan.jsonl', [planned])
    write_lines(tmp_path / 'results.jsonl', [result | {'run': 'a'} for result in results])
    return RecordedStudy(config, tmp_path)


def recorded_yardsticks(path):
    return read_json(path / YARDSTICKS, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})


def change_results(path, **changes):
    """Sets these fields in all lines of results.jsonl."""
    results = read_lines(path / 'results.jsonl')
    write_lines(path / 'results.jsonl', [result | changes for result in results])


def name_other_data_in_results(path):
    """Makes results.jsonl name a version of the data that this machine does not have."""
    data = read_lines(path / 'results.jsonl')[0]['data']
    change_results(path, data=data | {'version': '2'})


def text_of(batches):
    """The rows of text of a language model's batches: the first token and all targets."""
    rows = []
    for batch in batches:
        first_tokens = batch['tokens_BT'][:, :1]
        rows.append(np.hstack([first_tokens, batch['targets_BT']]))
    return np.concatenate(rows)


def test_a_group_says_which_run_and_which_tokens_it_is_of(study):
    """Yardsticks are the losses of n-grams, which the baseline has to beat.

    A group is the entry of yardsticks.json for one size, corpus and length of training.
    """
    problems = yardsticks.record(study.path)

    assert problems == []
    (group,) = recorded_yardsticks(study.path)['groups']
    assert group['run'] == 'a'
    assert group['size'] == 'd_model=32'
    assert group['longer'] is False
    assert group['task'] == 'language'
    assert group['definition'] == 1  # the version of the measurements

    # A trial is trained on `seen` tokens. Here, n-grams are counted in as many `tokens`.
    num_steps = 12
    batch_size = 8
    context = 16
    num_tokens = num_steps * batch_size * context
    assert group['seen'] == num_tokens
    assert group['tokens'] == num_tokens


def test_counts_are_of_the_rows_that_the_first_trial_saw(study):
    """n-grams are counted in the rows that the first trial, of seed 0, saw in its 12 steps."""
    problems = yardsticks.record(study.path)

    assert problems == []
    (group,) = recorded_yardsticks(study.path)['groups']

    # Count the same n-grams here.
    batch_size = 8
    rows = rows_of(study.config)
    training_batches = [
        pipeline.train_batch(rows, seed=0, step=step, batch_size=batch_size) for step in range(12)
    ]
    test_batches = pipeline.eval_batches(rows, 'test', batch_size=batch_size, max_rows=8)
    max_order = 6
    # An n-gram of order 6 is a target with its 5 preceding tokens.
    contexts_KN, targets_N = ngrams.preceding(text_of(training_batches), max_order - 1)
    evaluated = ngrams.preceding(text_of(test_batches), max_order - 1)
    (nats_OM,) = ngrams.losses(contexts_KN, targets_N, [evaluated], rows.vocab_size)

    # Row 0 of `nats_OM` has the losses of order 1.
    expected = {f'{order}-gram': nats_OM[order - 1].mean() for order in range(1, max_order + 1)}
    assert group['losses']['test'] == pytest.approx(expected)


def test_the_loss_of_a_checkpoint_is_that_of_the_run(study):
    """yardsticks.json also has losses of every trial, measured from the checkpoint of its run."""
    problems = yardsticks.record(study.path)

    assert problems == []
    (run,) = recorded_yardsticks(study.path)['runs']
    results = read_lines(study.path / 'results.jsonl')
    assert [trial['seed'] for trial in run['trials']] == [0, 1]
    for trial, result in zip(run['trials'], results, strict=True):
        assert trial['loss'] == pytest.approx(result['test_loss'], abs=1e-5)
        # These are the losses early and late in the context.
        assert trial['early'] > 0
        assert trial['late'] > 0
        # Only a translator has a loss with shuffled source sentences.
        assert trial['shuffled'] is None


def test_a_stored_study_has_losses_of_ngrams_but_none_of_its_trials(study):
    """Losses of n-grams need only the data. Losses of trials need the checkpoint of their run.

    yardsticks.json has both. A stored study has no checkpoints.
    """
    # Packing makes a stored study, and leaves out the checkpoints.
    packed_study = study.path / 'packed'
    stored.pack(study.path, packed_study)

    # `record` returns a list of problems. A missing checkpoint is no problem.
    assert yardsticks.record(packed_study) == []
    assert yardsticks.record(study.path) == []

    # `groups` has the losses of n-grams.
    recorded_for_packed = recorded_yardsticks(packed_study)
    recorded_for_study = recorded_yardsticks(study.path)
    assert recorded_for_packed['groups'] == recorded_for_study['groups']

    # `runs` has the losses of trials.
    (packed_run,) = recorded_for_packed['runs']
    assert packed_run['trials'] is None
    assert packed_run['why'] == 'it has no checkpoint'


def test_checkpoints_outside_the_study_are_not_read(study):
    (planned,) = read_lines(study.path / 'plan.jsonl')
    write_lines(study.path / 'plan.jsonl', [planned | {'directory': '../a'}])
    with pytest.raises(ConfigError, match=r"plan.jsonl, line 1 is damaged \(field 'directory' is"):
        yardsticks.record(study.path)


def test_recorded_yardsticks_are_kept_where_checkpoints_are_gone(study, monkeypatch):
    """A second recording measures nothing that yardsticks.json already has."""
    yardsticks.record(study.path)
    first_recording = (study.path / YARDSTICKS).read_bytes()
    shutil.rmtree(study.path / 'runs')

    # Any measurement would call None, and raise an error.
    monkeypatch.setattr(yardsticks, '_measure_group', None)
    problems = yardsticks.record(study.path)

    assert problems == []
    assert (study.path / YARDSTICKS).read_bytes() == first_recording


def test_models_of_another_kind_have_yardsticks_of_their_own(study, monkeypatch):
    """Decoders are compared with n-grams, and encoders of the same data with other counts."""
    # Runs of the stage 'single' have counts, and nothing of theirs is read from checkpoints.
    decoder = read_lines(study.path / 'plan.jsonl')[0] | {'stage': 'single'}
    encoder = copy.deepcopy(decoder) | {'run': 'b', 'size': 'kind=encoder'}
    encoder['config']['model']['kind'] = 'encoder'
    write_lines(study.path / 'plan.jsonl', [decoder, encoder])
    results = read_lines(study.path / 'results.jsonl')
    results_of_b = [result | {'run': 'b'} for result in results]
    write_lines(study.path / 'results.jsonl', results + results_of_b)
    # In place of a measurement, each group says which kind of model it was measured for.
    monkeypatch.setattr(
        yardsticks, '_measure_group', lambda config, result: {'measured_for': config.model.kind}
    )

    yardsticks.record(study.path)

    groups = recorded_yardsticks(study.path)['groups']
    # The second group must not repeat the first, although both models read the same dataset.
    assert [group['measured_for'] for group in groups] == ['decoder', 'encoder']


def test_without_checkpoints_only_losses_of_ngrams_are_recorded(study):
    """Losses of n-grams need only the data. Losses of trials need the checkpoint of their run."""
    shutil.rmtree(study.path / 'runs')

    problems = yardsticks.record(study.path)

    assert problems == []
    recorded = recorded_yardsticks(study.path)
    # `groups` has the losses of n-grams, and `runs` the losses of trials.
    assert recorded['groups'][0]['losses']['test']
    assert recorded['runs'] == [
        {
            'run': 'a',
            'variant': 'qk/vo',
            'size': 'd_model=32',
            'corpus': 'stdlib',
            'control': None,
            'trials': None,
            'why': 'it has no checkpoint',
        },
    ]
    # `start` describes the program that measured the losses.
    assert recorded['start']['git']


def test_a_study_whose_data_are_not_here_gets_no_yardsticks(study):
    name_other_data_in_results(study.path)

    (problem,) = yardsticks.record(study.path)

    assert problem.startswith("d_model=32, stdlib: data.name='stdlib' gives other data on this")
    assert not (study.path / YARDSTICKS).exists()


def test_a_checkpoint_of_another_training_is_not_measured(study):
    """The losses of a checkpoint are recorded only if they fit the results of its run.

    A run without recorded losses is tried again at the next recording.
    """
    results = read_lines(study.path / 'results.jsonl')

    # The results claim a loss of 1.0, far below the loss of the small model.
    change_results(study.path, test_loss=1.0)
    assert yardsticks.record(study.path) == []
    (run,) = recorded_yardsticks(study.path)['runs']
    assert run['trials'] is None
    assert run['why'].endswith(', its result 1.0000')

    # The checkpoint has two trials, but only the first has a result.
    write_lines(study.path / 'results.jsonl', results[:1])
    assert yardsticks.record(study.path) == []
    (run,) = recorded_yardsticks(study.path)['runs']
    assert run['trials'] is None
    assert run['why'] == 'results of its trials are missing'


def data_in_results(rows):
    """The identity of the data, with lists in place of tuples, like in results.jsonl."""
    return json.loads(json.dumps(rows.identity()))


def test_the_yardstick_of_a_probe_is_chance(tiny):
    data = {'name': 'recall(pairs=2)', 'eval_sequences': None, 'data_dir': None}
    config = tiny(model={'context': 7}, data=data)
    rows = rows_of(config)

    group = yardsticks._measure_group(config, {'data': data_in_results(rows)})

    assert group['task'] == 'probe'
    # The loss of chance is ln(number of answers), which `unigram_nats` returns for a probe.
    assert group['losses']['test'] == {'chance': rows.unigram_nats('test')}


def test_a_masked_text_is_counted_by_its_visible_neighbours(tiny):
    num_steps = 12
    batch_size = 8
    context = 16
    vocab_size = 256 + 1  # bytes and the mask token
    config = tiny(
        model={'kind': 'encoder', 'context': context, 'vocab_size': vocab_size},
        train={'num_steps': num_steps, 'batch_size': batch_size},
    )
    rows = rows_of(config)
    # An encoder on text learns to predict masked tokens.
    assert isinstance(rows, MaskedRows)

    counts = rows.yardsticks(config)

    assert counts.task == 'masked'
    # The yardsticks are losses of a model that counts the tokens of all training rows.
    assert counts.tokens == num_steps * batch_size * context

    # This model predicts a masked token from its 0 to 5 nearest visible tokens.
    losses = counts.losses['test']
    assert list(losses) == [
        'frequencies',
        'nearest visible neighbour',
        '2 nearest visible neighbours',
        '3 nearest visible neighbours',
        '4 nearest visible neighbours',
        '5 nearest visible neighbours',
    ]
    # A known neighbour lowers the loss by more than 0.1 nats/token.
    assert losses['nearest visible neighbour'] < losses['frequencies'] - 0.1


def test_a_task_from_outside_has_yardsticks_of_its_own(tiny, outside):
    """The task Ahead, of a module outside the package, predicts a token at a distance.

    Its yardstick is the loss of a model that only knows how frequent each token is.
    """
    config = tiny(data={'task': 'ahead:Ahead'})
    rows = rows_of(config)

    group = yardsticks._measure_group(config, {'data': rows.identity()})

    assert group['task'] == 'ahead'
    assert group['losses']['test'] == {'frequencies': rows.unigram_nats('test')}
    # `tokens` is the number of training tokens that a yardstick counts. Ahead does not set it.
    assert group['tokens'] is None
    # `definition` is the version of a task's yardsticks. Tasks from outside always have version 1.
    assert group['definition'] == 1
    assert is_current(group)


@pytest.fixture
def wrong_tasks(outside):
    """Writes a module `wrong_tasks` with three tasks whose yardsticks have a wrong form.

    A task has to return Yardsticks with losses by split, 'val' or 'test'. NoYardsticks returns a
    dict. NoPrefix has losses of 'validation'. NoNumber has a loss that is not finite.
    """
    ahead = (outside / 'ahead.py').read_text()
    classes = """
class NoYardsticks(Ahead):
    def yardsticks(self, config):
        return {'val': {'chance': 5.0}}

class NoPrefix(Ahead):
    def yardsticks(self, config):
        return Yardsticks(task='judge', losses={'validation': {'chance': 5.0}})

class NoNumber(Ahead):
    def yardsticks(self, config):
        return Yardsticks(task='judge', losses={'val': {'counts': float('nan')}})
"""
    (outside / 'wrong_tasks.py').write_text(f'{ahead}{classes}')
    yield
    sys.modules.pop('wrong_tasks')


@pytest.mark.parametrize(
    ('task', 'message'),
    [
        (
            'wrong_tasks:NoYardsticks',
            "data.task='wrong_tasks:NoYardsticks' must return Yardsticks, not {'val'",
        ),
        (
            'wrong_tasks:NoPrefix',
            "have losses of 'validation'; the prefixes of splits are val, test",
        ),
        (
            'wrong_tasks:NoNumber',
            "have the loss 'counts' of nan in 'val'; it must be a finite number",
        ),
    ],
)
def test_yardsticks_of_another_form_are_refused(tiny, wrong_tasks, task, message):
    config = tiny(data={'task': task})
    with refused(message):
        yardsticks._measure_group(config, {'data': rows_of(config).identity()})


@pytest.mark.slow
def test_a_translation_is_compared_with_word_by_word_translation():
    """The yardstick of a translation is the BLEU that a word-by-word translation reaches.

    Its dictionary (IBM model 1) is learned from the sentence pairs of the train split.
    """
    config = translator('smoke')
    rows = rows_of(config)

    group = yardsticks._measure_group(config, {'data': data_in_results(rows)})

    # Learn the dictionary from texts. `decode` turns token IDs into text.
    decode = rows.pairs.source.tokenizer.decode
    train_sources, train_targets = rows.pairs.sentences('train')
    train_pairs = [
        (decode(source), decode(target))
        for source, target in zip(train_sources, train_targets, strict=True)
    ]
    dictionary = ibm1.fit(train_pairs)

    # Translate as many test sentences as the config evaluates.
    sources, references = rows.pairs.sentences('test')
    max_sources = config.decode.max_sources
    translations = [dictionary.translate(decode(source)) for source in sources[:max_sources]]
    references = [decode(reference) for reference in references[:max_sources]]
    bleu = translation_scores(translations, references)['bleu']
    assert bleu > 0

    assert group['task'] == 'translation'
    assert group['definition'] == 2
    assert group['bleu']['test'] == pytest.approx(bleu)


def test_a_group_of_an_earlier_definition_is_recorded_again(study, monkeypatch):
    """A recorded group with an earlier version of its definition is measured again.

    A group is the entry of yardsticks.json for one size, corpus and length of training. Measuring
    it needs the data of the study. The version for language models is 1.
    """
    # A group is recorded, and then its definition becomes version 2.
    yardsticks.record(study.path)
    before = recorded_yardsticks(study.path)
    (group_before,) = before['groups']
    monkeypatch.setitem(DEFINITIONS, 'language', 2)
    assert not is_current(group_before)

    # On a machine without the data that results.jsonl names, the group stays unchanged.
    original_results = (study.path / 'results.jsonl').read_bytes()
    name_other_data_in_results(study.path)
    (problem,) = yardsticks.record(study.path)
    assert 'other data on this machine' in problem
    assert recorded_yardsticks(study.path) == before

    # With these data, the group is measured again, with the same losses.
    (study.path / 'results.jsonl').write_bytes(original_results)
    assert yardsticks.record(study.path) == []
    after = recorded_yardsticks(study.path)
    assert after['groups'] == [group_before | {'definition': 2}]
    assert after['runs'] == before['runs']


@pytest.mark.parametrize(
    # The loss at position i is i, from 0.
    ('context', 'loss', 'early', 'late'),
    [
        # mean(0, ..., 16) = 8, the fourth position is 3, and mean(8, ..., 16) = 12.
        pytest.param(17, 8, 3, 12, id='long'),
        # mean(0, ..., 6) = 3. The first half has only three positions, so there is no early loss.
        pytest.param(7, 3, None, None, id='short'),
    ],
)
def test_early_and_late_losses_are_means_over_parts_of_the_context(
    tiny, monkeypatch, context, loss, early, late
):
    """`early` is the loss at the fourth position, `late` the mean loss in the last half."""

    def loss_is_position(params, batch):
        """Replaces the model: the loss of every target is its position. There is one trial."""
        return {'nats_BT': (batch['loss_weights_BT'] * np.arange(context))[None]}

    monkeypatch.setattr(yardsticks, 'stack_program', lambda *_: loss_is_position)
    config = tiny(model={'context': context})
    any_params = {'w': np.zeros(1)}

    (trial,) = yardsticks._measure_trials(config, rows_of(config), any_params)

    assert trial['loss'] == pytest.approx(loss)
    assert trial['early'] == pytest.approx(early)
    assert trial['late'] == pytest.approx(late)
