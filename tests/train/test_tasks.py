"""Whole runs of every task, what they leave behind, and what may enter a loss."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import Config, MeshConfig
from qkattn.data import pipeline
from qkattn.data.tasks.task_registry import rows_of
from qkattn.metrics import bits_per_byte
from qkattn.train import evaluation, measurements, placement, program, step, train
from tests.train.standard_error import standard_error

PAIRS = [
    (f'{a} {b}', f'{b} und {a}')
    for a in ('one', 'two', 'three', 'four', 'five', 'six')
    for b in ('ox', 'cat', 'hen', 'dog', 'rat')
]


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp('pairs')
    for split, pairs in (('train', PAIRS[:24]), ('validation', PAIRS[24:])):
        for side, language in enumerate(('en', 'de')):
            text = ''.join(f'{pair[side]}\n' for pair in pairs)
            (path / f'{split}.{language}').write_text(text)
    return path


@pytest.fixture
def task(tiny, files, tmp_path_factory):
    """task('masked', model={...}): a tiny run of two trials."""
    cache = str(tmp_path_factory.getbasetemp() / 'task-data')
    own = {
        'language': ({}, {}),
        'masked': ({'kind': 'encoder', 'vocab_size': 257}, {}),
        'translation': (
            {'kind': 'encoder_decoder', 'context': 32, 'source_context': 24},
            {'name': 'parallel', 'path': str(files), 'languages': 'en-de', 'data_dir': cache},
        ),
        'causal probe': ({'context': 7}, {'name': 'recall(pairs=2, keys=4, values=4)'}),
        'labelling probe': (
            {'kind': 'encoder', 'context': 4},
            {'name': 'successor(keys=4, payloads=2)'},
        ),
    }

    def make(name: str, **sections) -> Config:
        model, data = own[name]
        model = {'num_layers': 1, 'd_model': 16, 'scan_unroll': 1} | model
        sections = {
            **sections,
            'model': model | sections.get('model', {}),
            'data': data | sections.get('data', {}),
            'train': {'num_steps': 8} | sections.get('train', {}),
            'decode': {'beam': 2} | sections.get('decode', {}),
        }
        return tiny(**sections)

    return make


TASKS = ['masked', 'translation', 'causal probe', 'labelling probe']


@pytest.mark.parametrize('name', TASKS)
def test_a_run_leaves_plausible_results_and_the_same_ones_again(task, name, tmp_path):
    config = task(name)
    first, second = (train(config, tmp_path / which) for which in 'ab')
    # All but times.
    for a, b in zip(first, second, strict=True):
        differ = {key for key in a if a[key] != b[key]}
        assert differ <= {'train_seconds', 'compile_seconds', 'tokens_per_second'}
    metrics = [(tmp_path / which / 'metrics.jsonl').read_text() for which in 'ab']
    assert metrics[0] == metrics[1]
    assert train(config, tmp_path / 'a') == first  # a finished run

    probe, translation = 'probe' in name, name == 'translation'
    rows = rows_of(config)
    for result in first:
        assert result['status'] == 'finished'
        for prefix in ('val',) if translation else ('val', 'test'):
            loss = result[f'{prefix}_loss']
            assert 0.3 < loss < 1.3 * math.log(config.model.vocab_size)
            assert 0 <= result[f'{prefix}_accuracy'] <= 1 and 0 <= result[f'{prefix}_solved'] <= 1
            size = result[f'{prefix}_bits_per_byte']
            if probe:
                assert size is None
            else:
                split = {'val': 'validation', 'test': 'test'}[prefix]
                assert size == pytest.approx(bits_per_byte(loss, rows.bytes_per_token(split)))
        assert (result['data']['unigram_bits_per_byte'] is None) == probe
        assert result['data']['unigram_loss'] == pytest.approx(rows.unigram_nats('validation'))
        names = {key for key in result if 'bleu' in key or 'exact' in key}
        if translation:
            assert names == {'val_bleu', 'val_bleu_signature', 'val_exact_match'}
            assert result['val_num_sentences'] == 6
            assert 0 <= result['val_bleu'] <= 100 and 0 <= result['val_exact_match'] <= 1
            assert result['test_loss'] is result['test_accuracy'] is None
            assert result['eval_tokens'] == sum(len(de) + 1 for _, de in PAIRS[24:])
        else:
            assert names == set()
        if name == 'masked':
            assert result['eval_tokens'] == 8 * round(0.15 * 16)
            assert result['data']['masking']['rate'] == 0.15
        assert result['cache_floats_per_token'] == (
            0 if config.model.kind == 'encoder' else 64 if translation else 32
        )
    assert first[0]['val_loss'] != first[1]['val_loss']
    records = [json.loads(line) for line in metrics[0].splitlines()]
    assert [r['step'] for r in records if r['kind'] == 'eval'] == [4, 8]
    last = [r for r in records if r['kind'] == 'eval'][-1]
    for field in ('loss', 'accuracy', 'solved'):
        assert last[f'val_{field}'] == [result[f'val_{field}'] for result in first]


def params_of(config):
    return step.init_trial(config, jnp.uint32(0))['params']


@functools.cache
def compiled(config):
    return jax.jit(functools.partial(step.gradients, config))


def loss_and_gradients(config, batch):
    return compiled(config)(params_of(config), jax.tree.map(lambda a: a[None], batch))


def assert_same(got, want, rtol=0.0):
    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())

    jax.tree.map(same, got, want)


def batch_of(config, count=3):
    return pipeline.train_batch(rows_of(config), seed=0, step=0, batch_size=count)


def test_padding_never_enters_a_loss_or_a_gradient(task):
    config = task('translation')
    batch = batch_of(config)
    padding_BT, padding_BS = batch['segments_BT'] == 0, batch['source_segments_BS'] == 0
    assert padding_BT.any() and padding_BS.any()
    want = loss_and_gradients(config, batch)
    other = batch | {
        'tokens_BT': np.where(padding_BT, 77, batch['tokens_BT']),
        'targets_BT': np.where(padding_BT, 99, batch['targets_BT']),
        'source_BS': np.where(padding_BS, 55, batch['source_BS']),
    }
    # Bitwise, but for the embeddings that padding looked up: their gradient is 0 anyhow.
    assert_same(loss_and_gradients(config, other), want, rtol=1e-6)
    real = batch | {'targets_BT': np.where(padding_BT, batch['targets_BT'], 99)}
    assert abs(loss_and_gradients(config, real)[0] - want[0]) > 0.1


@pytest.mark.parametrize('name', ['translation', 'masked', 'causal probe'])
def test_rows_of_padding_and_targets_of_no_weight_change_nothing(task, name):
    config = task(name)
    batch = batch_of(config)
    want = loss_and_gradients(config, batch)
    for others in (jax.tree.map(np.zeros_like, batch), batch):  # padding, or each row twice
        longer = jax.tree.map(lambda *pair: np.concatenate(pair), batch, others)
        assert_same(loss_and_gradients(config, longer), want, rtol=1e-5)
    targets_BT = np.where(batch['loss_weights_BT'] > 0, batch['targets_BT'], np.int32(3))
    assert_same(loss_and_gradients(config, batch | {'targets_BT': targets_BT}), want)


def log_probabilities(config, params, batch):
    logits_BTV = jax.jit(lambda params: step.predict(config, params, batch))(params)
    wide_BTV = np.asarray(logits_BTV, np.float64)
    return wide_BTV - np.log(np.exp(wide_BTV).sum(-1, keepdims=True))


@pytest.mark.parametrize('name', ['translation', 'masked'])
def test_label_smoothing_is_a_mixture_with_the_uniform_distribution(task, name):
    smooth = task(name, train={'label_smoothing': 0.1})
    batch = batch_of(smooth)
    params = params_of(smooth)
    nats_BTV = -log_probabilities(smooth, params, batch)
    # Cross-entropy with 0.9 of the target and 0.1 of everything, word for word.
    total, weight = 0.0, batch['loss_weights_BT'].sum()
    for b, t in zip(*np.nonzero(batch['loss_weights_BT']), strict=True):
        target_V = np.full(nats_BTV.shape[-1], 0.1 / nats_BTV.shape[-1])
        target_V[batch['targets_BT'][b, t]] += 0.9
        total += target_V @ nats_BTV[b, t]
    loss, _ = loss_and_gradients(smooth, batch)
    np.testing.assert_allclose(loss, total / weight, rtol=1e-5)
    plain, _ = loss_and_gradients(task(name), batch)
    assert abs(plain - loss) > 1e-3
    sums = evaluation.measure(smooth, params, batch)
    np.testing.assert_allclose(sums['nats'] / sums['weight'], plain, rtol=1e-5)


@pytest.mark.parametrize('name', ['translation', 'masked', 'labelling probe'])
def test_an_evaluation_is_a_mean_over_targets(task, name, monkeypatch, evaluation_only):
    # 5 rows at a time do not divide the rows that there are.
    config = task(
        name,
        model={'dropout': 0.5},
        train={'batch_size': 5, 'accumulation': 1, 'label_smoothing': 0.2},
        trials={'seeds': (0, 7)},
        data={'eval_sequences': None if name == 'translation' else 12},
    )
    rows = rows_of(config)
    if 'probe' not in name:
        monkeypatch.setattr(rows, 'bytes_per_token', {'validation': 2.0}.__getitem__)
    built = program.build(config)
    state = built.init()
    state['trials']['alive'] = jnp.array([True, True])
    got = measurements.evaluate(config, built, rows, state, 'validation')
    numbers = pipeline.eval_rows(rows, 'validation', config.data.eval_sequences)
    draws_B2 = np.stack([np.zeros_like(numbers), numbers], axis=1).astype(np.uint64)
    batch = rows.read('validation', numbers, draws_B2)
    loss_weights_BT, targets_BT = batch['loss_weights_BT'], batch['targets_BT']
    for x in range(2):
        params = jax.tree.map(lambda a, x=x: a[x], state['trials']['params'])
        found_BTV = log_probabilities(config, params, batch)
        nats_BT = -np.take_along_axis(found_BTV, targets_BT[..., None], -1)[..., 0]
        right_BT = found_BTV.argmax(-1) == targets_BT
        used = loss_weights_BT > 0
        np.testing.assert_allclose(got.values['loss'][x], nats_BT[used].mean(), rtol=1e-5)
        np.testing.assert_allclose(got.values['accuracy'][x], right_BT[used].mean(), rtol=1e-6)
        solved = [right_BT[b, used[b]].all() for b in range(len(used))]
        np.testing.assert_allclose(got.values['solved'][x], np.mean(solved), rtol=1e-6)
        se = standard_error((nats_BT * used).sum(-1), used.sum(-1))
        np.testing.assert_allclose(got.values['loss_se'][x], se, rtol=1e-4)
    assert got.num_targets == loss_weights_BT.sum()
    if 'probe' in name:
        assert got.values['bits_per_byte'] is None
    else:
        bits_X = got.values['loss'] / math.log(2) / 2
        np.testing.assert_allclose(got.values['bits_per_byte'], bits_X, rtol=1e-12)
    state['trials']['alive'] = jnp.array([True, False])
    dead = measurements.evaluate(config, built, rows, state, 'validation')
    assert dead.values['loss'][0] == got.values['loss'][0]
    assert np.isnan([dead.values[name][1] for name in ('loss', 'accuracy', 'solved')]).all()


def test_each_kind_of_dropout_alone_acts_in_training(task):
    batch = jax.tree.map(lambda a: a[None], batch_of(task('masked')))
    hyper = {'seed': jnp.uint32(0), 'learning_rate': 0.0, 'weight_decay': 0.0}

    def loss_of(**fields):
        config = task('masked', model=fields)
        trial = step.init_trial(config, jnp.uint32(0))
        return jax.jit(functools.partial(step.train_trial, config))(0, trial, hyper, batch)[1][
            'loss'
        ]

    plain = loss_of()
    for name in ('dropout', 'attention_dropout', 'activation_dropout'):
        assert abs(loss_of(**{name: 0.5}) - plain) > 1e-4, name


@pytest.mark.parametrize('name', ['masked', 'translation'])
def test_eight_devices_lose_what_one_does(task, name, without_rematerialization):
    config = task(name, train={'num_steps': 3, 'steps_per_dispatch': 3}, trials={'seeds': (0,)})
    rows = rows_of(config)

    def run(mesh):
        split = dataclasses.replace(config, mesh=mesh)
        built = program.build(split, 'vmap')
        part = placement.local_rows(split, built.mesh)
        with pipeline.TrainBatches(
            rows, seeds=[0], batch_size=8, num_steps=3, steps_per_read=3, part=part
        ) as batches:
            (local,) = batches
        state, metrics = built.train(
            built.init(), placement.place_batch(split, built.mesh, local, part)
        )
        reached = measurements.evaluate(split, built, rows, state, 'validation')
        return np.asarray(metrics['loss']), reached

    want, want_reached = run(MeshConfig())
    with without_rematerialization():
        got, got_reached = run(MeshConfig(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(got_reached.values['loss'], want_reached.values['loss'], atol=1e-5)
    assert got_reached.num_targets == want_reached.num_targets
