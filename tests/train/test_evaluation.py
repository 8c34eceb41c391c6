"""What an evaluation makes of the sums that a program returns."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from qkattn import metrics
from qkattn.config import MeshConfig
from qkattn.data.tasks import repeats
from qkattn.data.tasks.task_registry import rows_of
from qkattn.model import cost
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.train import evaluation, measurements, results, sharding, step, train
from tests.train.standard_error import standard_error


def measured(nats_BT, loss_weights_BT):
    """The sums of the rows of one batch, as computed in float32 inside a program."""
    nats_BT, weights_BT = np.float32(nats_BT), np.float32(loss_weights_BT)
    correct_BT = np.zeros(nats_BT.shape, bool)
    return jax.jit(lambda *arrays: metrics.row_sums(metrics.Predictions(None, *arrays)))(
        weights_BT, nats_BT, correct_BT
    )


def joined(batches):
    """Sums [R, 1] of the rows of P batches, as an evaluation of one trial holds them."""
    return {
        name: np.concatenate([np.float64(sums[name]) for sums in batches])[:, None]
        for name in batches[0]
    }


@pytest.mark.parametrize('spread', [1.0, 0.1, 0.003])
@pytest.mark.parametrize('unequal', [False, True])
def test_the_standard_error_is_that_of_a_ratio_over_rows(spread, unequal):
    """Rows of 256 targets at 3 nats, which differ much or hardly at all."""
    rng = np.random.default_rng(0)
    nats_PBT = 3 + spread * (rng.normal(size=(5, 16, 1)) + rng.normal(size=(5, 16, 256)))
    lengths_PB = rng.integers(1, 257, (5, 16)) if unequal else np.full((5, 16), 256)
    weights_PBT = (np.arange(256) < lengths_PB[..., None]).astype(np.float32)
    weights_PBT[4, 7:] = 0  # rows of padding
    sums = joined([measured(*pair) for pair in zip(nats_PBT, weights_PBT, strict=True)])
    nats_PB = (np.float32(nats_PBT).astype(np.float64) * weights_PBT).sum(-1)
    want = standard_error(nats_PB.ravel(), weights_PBT.sum(-1).ravel())
    np.testing.assert_allclose(metrics.standard_error(sums), [want], rtol=1e-4)


def test_a_single_row_has_no_standard_error_and_equal_rows_have_none_to_speak_of():
    one, weights = np.array([[1.0, 2.0], [9.0, 9.0]]), np.array([[1.0, 1.0], [0.0, 0.0]])
    assert np.isnan(metrics.standard_error(joined([measured(one, weights)]))).all()
    same = measured(np.full((2, 2), 1.5), np.ones((2, 2)))
    assert metrics.standard_error(joined([same])) == [0.0]


def stub(answer, num_trials=2):
    """A program whose trials all predict what `answer(tokens_BT)`, logits_BTV, says."""
    sums = jax.jit(lambda batch: evaluation.measure(None, None, batch))

    def evaluate(state, batch):
        found = sums({**batch, 'logits_BTV': answer(np.asarray(batch['tokens_BT']))})
        return {
            name: np.repeat(np.asarray(a)[None], num_trials, axis=0) for name, a in found.items()
        }

    return SimpleNamespace(mesh=sharding.make_mesh(MeshConfig()), evaluate=evaluate)


@pytest.fixture
def stubbed(monkeypatch):
    def on_targets(config, params, batch, measure):
        return measure(batch['logits_BTV'], batch['targets_BT'])

    monkeypatch.setattr(step, 'on_targets', on_targets)
    return stub


def copying(half, sure):
    """A model that predicts what stood H - 1 positions ago, its logit `sure` above the others."""

    def answer(tokens_BT):
        again_BT = np.roll(tokens_BT, half - 1, axis=1)
        again_BT[:, : half - 1] = 0
        return np.where(again_BT[..., None] == np.arange(256), np.float32(sure), np.float32(0))

    return answer


def induction_of(*args):
    found = measurements.induction(*args)
    return found and SimpleNamespace(
        gain_X=found['val_induction_gain'], accuracy_X=found['val_induction_accuracy']
    )


def alive(*flags):
    return {'step': np.int32(7), 'trials': {'alive': np.array(flags), 'params': {}}}


@pytest.mark.parametrize('context', [16, 17])
def test_a_model_that_copies_gains_and_one_that_does_not_does_not(tiny, stubbed, context):
    config = tiny(model={'context': context}, train={'batch_size': 24, 'accumulation': 1})
    rows, half = rows_of(config), (context + 1) // 2
    found = induction_of(config, stubbed(copying(half, 30.0)), rows, alive(True, True))
    np.testing.assert_allclose(found.accuracy_X, [1, 1])
    # The first copy was never seen before: token 0 is guessed, which no text holds.
    np.testing.assert_allclose(found.gain_X, 30, atol=0.01)
    # Half a guess: the gain is the difference of two closed forms.
    half_sure = induction_of(config, stubbed(copying(half, 5.0)), rows, alive(True, True))
    np.testing.assert_allclose(half_sure.gain_X, 5, rtol=1e-5)
    # Blind to its window: every copy costs the same, and only one token is ever right.
    r_BH = repeats.sequences(rows)
    values, counts = np.unique(r_BH[:, 1:], return_counts=True)
    common = values[counts.argmax()]
    always = np.zeros((24, context, 256), np.float32)
    always[..., common] = 3.0
    blind = induction_of(config, stubbed(lambda _: always), rows, alive(True, False))
    np.testing.assert_allclose(blind.gain_X, [0, np.nan], atol=1e-6)
    part = counts.max() / r_BH[:, 1:].size
    np.testing.assert_allclose(blind.accuracy_X, [part, np.nan], rtol=1e-6)


def test_every_arm_is_shown_the_same(tiny):
    """Whatever its width, depth, heads, variant and batches."""
    shown = []
    for model, train_fields in (
        ({}, {}),
        ({'d_model': 64, 'num_layers': 1, 'num_heads': 4}, {'batch_size': 2, 'accumulation': 1}),
    ):
        config = tiny(model=model, train=train_fields)
        seen = []

        def evaluate(state, batch, seen=seen):
            seen.append(jax.tree.map(np.asarray, batch))
            return {name: np.ones((2, 1)) for name in ('nats', 'correct', 'weight')}

        fake = SimpleNamespace(mesh=sharding.make_mesh(MeshConfig()), evaluate=evaluate)
        induction_of(config, fake, rows_of(config), alive(True, True))
        # 64 rows fill the batches of both sizes: one copy after the other.
        shown.append({name: np.concatenate([b[name] for b in seen]) for name in seen[0]})
    assert shown[0]['tokens_BT'].shape == (128, 16)
    for name, array in shown[0].items():
        np.testing.assert_array_equal(array, shown[1][name])


@pytest.mark.parametrize(
    'sections',
    [
        {'model': {'kind': 'encoder', 'vocab_size': 257}},
        {'model': {'kind': 'encoder', 'vocab_size': 257}, 'data': {'mask_rate': 0.99}},
        {'model': {'context': 7}},
        {'model': {'context': 7}, 'data': {'name': 'recall(pairs=2, keys=4, values=4)'}},
        {'model': {'context': 32}, 'data': {'name': 'induction'}},
    ],
    ids=['encoder', 'all masked', 'short', 'short probe', 'probe'],
)
def test_where_repeats_mean_nothing_there_is_no_probe(tiny, sections):
    config = tiny(**sections)
    assert induction_of(config, None, rows_of(config), alive(True, True)) is None


def test_a_run_leaves_both_in_its_results_and_a_diverged_trial_neither(tiny, tmp_path):
    config = tiny(
        model={'num_layers': 1, 'd_model': 16},
        trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)},
        train={'num_steps': 4},
    )
    fine, diverged = train(config, tmp_path / 'run')
    assert fine['eval_rows'] == diverged['eval_rows'] == 8
    assert fine['eval_tokens'] == fine['test_tokens'] == 8 * 16
    names = ('val_loss_se', 'test_loss_se', 'val_induction_gain', 'val_induction_accuracy')
    assert [diverged[name] for name in names] == [None] * 4
    assert all(math.isfinite(fine[name]) for name in names)
    assert 0 < fine['val_loss_se'] < 0.5 and 0 <= fine['val_induction_accuracy'] <= 1
    records = read_metrics(tmp_path / 'run/metrics.jsonl')
    (record,) = [record for record in records if record['kind'] == 'eval']
    assert set(record) == {
        *('kind', 'step', 'val_loss', 'val_bits_per_byte', 'val_accuracy', 'val_solved')
    }
    final = records[-1]
    own = {'kind': 'final', 'step': 4, 'eval_tokens': 128, 'test_tokens': 128}
    assert own.items() <= final.items()
    assert final['trials'] == [fine['trial'], diverged['trial']]
    measured = metrics.result_fields().keys() & fine.keys()
    assert final.keys() == measured | own.keys() | {'trials'} and 'test_solved' in measured
    for name in measured:
        assert final[name] == [fine[name], diverged[name]]
    splits = read_json(tmp_path / 'run/documents.json', {})
    for split, prefix in metrics.PREFIXES.items():
        found = splits[split]
        assert sum(found['tokens']) == 8 * 16 and all(t % 16 == 0 for t in found['tokens'])
        assert len(set(found['documents'])) == len(found['tokens']) > 4
        assert all(name.endswith('.py') for name in found['documents'])
        nats, none = found['nats']
        assert none is None and len(nats) == len(found['tokens'])
        assert math.isclose(sum(nats) / (8 * 16), fine[f'{prefix}_loss'], rel_tol=1e-12)


def test_rows_without_documents_are_dealt_out_and_empty_clusters_left_out(tiny):
    config = tiny(model={'context': 7}, data={'name': 'recall(pairs=2)', 'eval_sequences': 300})
    nats_R = np.arange(304.0)
    targets_R = np.where(np.arange(304) < 256, 2.0, 0.0)
    targets_R[5::128] = 0
    reached = values_of(loss=np.array([1.0]))
    reached = dataclasses.replace(reached, nats_RX=nats_R[:, None], targets_R=targets_R)
    found = measurements.by_document(config, rows_of(config), 'test', reached)
    assert found['documents'] == [str(c) for c in range(128) if c != 5]
    assert found['tokens'] == [4] * 127
    sums = [sum(nats_R[c:300:128]) for c in range(128) if c != 5]
    assert found['nats'] == [sums]


def values_of(**metrics_X):
    """An evaluation with these metrics; the others are not defined."""
    return measurements.Evaluation(
        values={name: None for name in metrics.EVALUATED} | metrics_X,
        num_targets=16,
        num_rows=1,
        nats_RX=16 * metrics_X['loss'][None],
        targets_R=np.array([16.0]),
    )


def test_a_metric_without_a_value_is_null_and_a_measurement_that_does_not_apply_absent(tiny):
    config = tiny(model={'context': 7}, trials={'seeds': (0,)})
    one = values_of(loss=np.array([2.0]), loss_se=np.array([np.nan]))
    (result,) = results.of_trials(
        config, None, rows_of(config), alive(True), {'validation': one}, {}, {}, [None]
    )
    assert result['val_loss_se'] is result['test_loss_se'] is result['val_bits_per_byte'] is None
    assert not [name for name in result if 'induction' in name or 'bleu' in name]
    assert result['val_loss'] == 2.0 and result['eval_rows'] == 1
    assert result['num_steps'] == 7 and result['status'] == 'finished'
    assert result['parameters'] == cost.count(config.model)


def test_a_loss_that_is_not_finite_is_a_divergence_however_late(tiny, monkeypatch):
    """The gradient of the last step was finite, the parameters after it are not."""
    config = tiny(trials={'seeds': (0, 1)})
    values_X = np.array([2.0, np.inf])
    late = values_of(loss=values_X, accuracy=np.array([0.5, 0.0]))
    probe = {'val_induction_gain': values_X}
    monkeypatch.setattr(results, 'STACK_MEASUREMENTS', (lambda *_: probe, lambda *_: None))
    fine, diverged = results.of_trials(
        config,
        None,
        rows_of(config),
        alive(True, True),
        {'validation': late, 'test': late},
        {},
        {},
        [None, None],
    )
    assert (fine['status'], diverged['status']) == ('finished', 'diverged')
    assert (fine['diverged_at'], diverged['diverged_at']) == (None, 7)
    for name in ('val_loss', 'test_accuracy', 'val_induction_gain'):
        assert fine[name] is not None and diverged[name] is None


@pytest.mark.parametrize(
    ('diverged_at', 'said'),
    [
        ([None, None], None),
        ([1200, None], '1 of 2 trials diverged: seed 0 at learning rate 0.1 at step 1,200'),
        (
            [3],
            'the only trial diverged, the run has no losses: seed 0 at learning rate 0.1 at step '
            '3; lower trials.learning_rates',
        ),
        (
            [1, 1, 2, 2, 3, 3],
            'all 6 trials diverged, the run has no losses: seed 0 at learning rate 0.1 at step 1, '
            'seed 1 at learning rate 0.1 at step 1, seed 2 at learning rate 0.1 at step 2, seed 3 '
            'at learning rate 0.1 at step 2, 2 more; lower trials.learning_rates',
        ),
    ],
)
def test_diverged_trials_are_told_at_the_end(diverged_at, said, caplog):
    found = [
        {
            'trial': {'seed': seed, 'learning_rate': 0.1},
            'status': 'finished' if at is None else 'diverged',
            'diverged_at': at,
        }
        for seed, at in enumerate(diverged_at)
    ]
    results.warn_of_diverged('runs/a', found)
    assert [of.message for of in caplog.records] == ([f'runs/a: {said}'] if said else [])
