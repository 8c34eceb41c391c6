"""Yardsticks of a small study, recorded from its data and from the checkpoint of its one run."""

import json
import shutil
import sys

import numpy as np
import pytest

from experiments.claims.protocol import translator
from qkattn.config import to_json
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

PLACE = {'size': 'd_model=32', 'corpus': 'stdlib', 'control': None}
RUN = {'run': 'a', 'variant': 'qk/vo', **PLACE, 'stage': 'verdict', 'directory': 'runs/a'}


@pytest.fixture
def study(small_run, tmp_path):
    """A config, and a study directory with one finished verdict run of it."""
    config, run = small_run
    shutil.copytree(run, tmp_path / 'runs/a')
    (tmp_path / 'study.json').write_text('{"baseline": "qk/vo"}')
    results = read_json(run / 'result.json', [{}])
    planned = RUN | {'config': to_json(config), 'trials': len(results)}
    write_lines(tmp_path / 'plan.jsonl', [planned])
    write_lines(tmp_path / 'results.jsonl', [result | {'run': 'a'} for result in results])
    return config, tmp_path


def recorded_yardsticks(path):
    return read_json(path / YARDSTICKS, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})


def test_counts_are_of_the_rows_that_the_first_trial_saw(study):
    config, path = study
    assert yardsticks.record(path) == []
    (group,) = recorded_yardsticks(path)['groups']
    place = {'run': 'a', 'size': 'd_model=32', 'longer': False, 'task': 'language'}
    place |= {'definition': 1}
    assert group.items() >= (place | {'seen': 1536, 'tokens': 1536}).items()

    # The same counts, from the rows of the 12 steps of seed 0.
    rows = rows_of(config)

    def text(batches):
        return np.concatenate(
            [np.hstack([b['tokens_BT'][:, :1], b['targets_BT']]) for b in batches]
        )

    steps = [pipeline.train_batch(rows, seed=0, step=k, batch_size=8) for k in range(12)]
    evaluated = text(pipeline.eval_batches(rows, 'test', batch_size=8, max_rows=8))
    (nats_OM,) = ngrams.losses(
        *ngrams.preceding(text(steps), 5), [ngrams.preceding(evaluated, 5)], rows.vocab_size
    )
    expected = {f'{order}-gram': nats_M.mean() for order, nats_M in enumerate(nats_OM, start=1)}
    assert group['losses']['test'] == pytest.approx(expected)


def test_the_loss_of_a_checkpoint_is_that_of_the_run(study):
    _, path = study
    assert yardsticks.record(path) == []
    (run,) = recorded_yardsticks(path)['runs']
    results = read_lines(path / 'results.jsonl')
    assert [trial['seed'] for trial in run['trials']] == [0, 1]
    for trial, result in zip(run['trials'], results, strict=True):
        assert trial['loss'] == pytest.approx(result['test_loss'], abs=1e-5)
        assert trial['early'] > 0 < trial['late'] and trial['shuffled'] is None


def test_a_stored_study_has_counts_but_no_trials_from_checkpoints(study):
    _, path = study
    stored.pack(path, path / 'kept')
    assert yardsticks.record(path / 'kept') == []
    yardsticks.record(path)
    (run,) = recorded_yardsticks(path / 'kept')['runs']
    assert recorded_yardsticks(path / 'kept')['groups'] == recorded_yardsticks(path)['groups']
    assert run['trials'] is None and run['why'] == 'it has no checkpoint'


def test_checkpoints_outside_the_study_are_not_read(study):
    _, path = study
    write_lines(path / 'plan.jsonl', [read_lines(path / 'plan.jsonl')[0] | {'directory': '../a'}])
    with pytest.raises(ConfigError, match=r"plan.jsonl, line 1 is damaged \(field 'directory' is"):
        yardsticks.record(path)


def test_recorded_yardsticks_are_kept_where_checkpoints_are_gone(study, monkeypatch):
    _, path = study
    yardsticks.record(path)
    before = (path / YARDSTICKS).read_bytes()
    shutil.rmtree(path / 'runs')  # as of a study that was copied without its checkpoints
    with monkeypatch.context() as patch:
        patch.setattr(yardsticks, '_measure_group', None)
        assert yardsticks.record(path) == [] and (path / YARDSTICKS).read_bytes() == before
    (path / YARDSTICKS).unlink()  # without a checkpoint, only counts are recorded
    assert yardsticks.record(path) == []
    found = recorded_yardsticks(path)
    assert found['groups'][0]['losses']['test'] and found['start']['git']
    place = {'run': 'a', 'variant': 'qk/vo', **PLACE}
    assert found['runs'] == [place | {'trials': None, 'why': 'it has no checkpoint'}]


def test_a_study_whose_data_are_not_here_gets_no_yardsticks(study):
    _, path = study
    results = read_lines(path / 'results.jsonl')
    data = results[0]['data'] | {'version': '2'}
    write_lines(path / 'results.jsonl', [result | {'data': data} for result in results])
    (problem,) = yardsticks.record(path)
    assert problem.startswith("d_model=32, stdlib: data.name='stdlib' gives other data on this")
    assert not (path / YARDSTICKS).exists()


def test_a_checkpoint_of_another_training_is_not_measured(study):
    _, path = study
    results = read_lines(path / 'results.jsonl')
    write_lines(path / 'results.jsonl', [result | {'test_loss': 1.0} for result in results])
    assert yardsticks.record(path) == []
    (run,) = recorded_yardsticks(path)['runs']
    assert run['trials'] is None and run['why'].endswith(', its result 1.0000')
    write_lines(path / 'results.jsonl', results[:1])
    assert yardsticks.record(path) == []
    (run,) = recorded_yardsticks(path)['runs']
    assert (run['trials'], run['why']) == (None, 'results of its trials are missing')


def test_the_yardstick_of_a_probe_is_chance(tiny):
    data = {'name': 'recall(pairs=2)', 'eval_sequences': None, 'data_dir': None}
    config = tiny(model={'context': 7}, data=data)
    data = json.loads(json.dumps(rows_of(config).identity()))
    group = yardsticks._measure_group(config, {'data': data})
    chance = rows_of(config).unigram_nats('test')
    assert group['task'] == 'probe' and group['losses']['test'] == {'chance': chance}


def test_a_masked_text_is_counted_by_its_visible_neighbours(tiny):
    config = tiny(model={'kind': 'encoder', 'vocab_size': 257})
    rows = rows_of(config)
    counts = rows.yardsticks(config)
    losses = list(counts.losses['test'].values())
    assert isinstance(rows, MaskedRows) and counts.task == 'masked' and counts.tokens == 1536
    assert len(losses) == 6 and losses[1] < losses[0] - 0.1


def test_a_task_from_outside_has_yardsticks_of_its_own(tiny, outside):
    config = tiny(data={'task': 'ahead:Ahead'})
    rows = rows_of(config)
    group = yardsticks._measure_group(config, {'data': rows.identity()})
    assert (group['task'], group['definition'], group['tokens']) == ('ahead', 1, None)
    assert group['losses']['test'] == {'frequencies': rows.unigram_nats('test')}
    assert is_current(group)


JUDGES = """
class Dict(Ahead):
    def yardsticks(self, config):
        return {'val': {'chance': 5.0}}
class Validation(Ahead):
    def yardsticks(self, config):
        return Yardsticks(task='judge', losses={'validation': {'chance': 5.0}})
"""


def test_yardsticks_of_another_form_are_refused(tiny, outside):
    source = (outside / 'ahead.py').read_text()
    (outside / 'judges.py').write_text(f'{source}{JUDGES}')
    for name, says in (
        ('Dict', "data.task='judges:Dict' must return Yardsticks, not {'val'"),
        ('Validation', "have losses of 'validation'; the prefixes of splits are val, test"),
    ):
        config = tiny(data={'task': f'judges:{name}'})
        with refused(says):
            yardsticks._measure_group(config, {'data': rows_of(config).identity()})
    sys.modules.pop('judges')


@pytest.mark.slow
def test_a_translation_is_compared_with_word_by_word_translation():
    config = translator('smoke')
    rows = rows_of(config)
    group = yardsticks._measure_group(config, {'data': json.loads(json.dumps(rows.identity()))})
    assert group['task'] == 'translation' and group['definition'] == 2
    # A dictionary is learned from the pairs of training, and translates the test sources.
    texts = [[*map(rows.pairs.source.tokenizer.decode, s)] for s in rows.pairs.sentences('test')]
    train = [[*map(rows.pairs.source.tokenizer.decode, s)] for s in rows.pairs.sentences('train')]
    dictionary = ibm1.fit(list(zip(*train, strict=True)))
    number = config.decode.max_sources
    translations = [dictionary.translate(source) for source in texts[0][:number]]
    expected = translation_scores(translations, texts[1][:number])['bleu']
    assert group['bleu']['test'] == pytest.approx(expected) and expected > 0


def test_a_group_of_an_earlier_definition_is_recorded_again(study, monkeypatch):
    """Where its data are missing, it is kept, and a problem says that it is outdated."""
    _, path = study
    yardsticks.record(path)
    before = recorded_yardsticks(path)
    monkeypatch.setitem(DEFINITIONS, 'language', 2)
    assert not is_current(before['groups'][0])

    # Results name other data than this machine has: nothing is recorded.
    results = read_lines(path / 'results.jsonl')
    other = [result | {'data': result['data'] | {'version': '2'}} for result in results]
    write_lines(path / 'results.jsonl', other)
    (problem,) = yardsticks.record(path)
    assert 'other data on this machine' in problem and recorded_yardsticks(path) == before

    # With the right data, the group is recorded by its new definition.
    write_lines(path / 'results.jsonl', results)
    assert yardsticks.record(path) == []
    after = recorded_yardsticks(path)
    assert after['groups'] == [before['groups'][0] | {'definition': 2}]
    assert after['runs'] == before['runs']


@pytest.mark.parametrize(('context', 'expected'), [(17, (8, 3, 12)), (7, (3, None, None))])
def test_early_and_late_losses_are_means_over_parts_of_the_context(
    tiny, monkeypatch, context, expected
):
    """Every target has its position as its loss, so that means of positions are expected."""

    def measure(params, batch):
        return {'nats_BT': (batch['loss_weights_BT'] * np.arange(context))[None]}

    monkeypatch.setattr(yardsticks, 'stack_program', lambda *_: measure)
    config = tiny(model={'context': context})
    (trial,) = yardsticks._measure_trials(config, rows_of(config), {'w': np.zeros(1)})
    assert (trial['loss'], trial['early'], trial['late']) == pytest.approx(expected)
