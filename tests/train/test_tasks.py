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
from qkattn.metrics import TIMES, bits_per_byte
from qkattn.model import with_params
from qkattn.train import evaluation, measurements, placement, program, step, train
from qkattn.train.clock import PARTS
from tests.lanes import only
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


@pytest.mark.usefixtures('programs_kept')
# In tests/experiments, test_translate_script.py trains a translator, test_train_script.py a probe.
@pytest.mark.parametrize(
    'name',
    only(['masked'], ['masked', 'translation', 'causal probe', 'labelling probe']),
)
def test_a_run_leaves_plausible_results_and_the_same_ones_again(task, name, tmp_path):
    config = task(name)
    first, second = (train(config, tmp_path / which) for which in 'ab')
    # All but times.
    for a, b in zip(first, second, strict=True):
        differ = {key for key in a if a[key] != b[key]}
        assert differ <= TIMES.keys() <= a.keys()
        # Not their sum: devices may be without work because the input is late.
        assert all(0 <= a[part] < a['train_seconds'] for part in PARTS)
        assert any(a[part] for part in PARTS)
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


def batch_of(config):
    """Six rows, of which the last three are padding."""
    batch = pipeline.train_batch(rows_of(config), seed=0, step=0, batch_size=3)
    return jax.tree.map(lambda a: np.concatenate([a, np.zeros_like(a)]), batch)


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
    # Each row twice is the same mean only if rows of padding add nothing to sum or weight.
    twice = jax.tree.map(lambda a: np.concatenate([a[:3], a[:3]]), batch)
    assert_same(loss_and_gradients(config, twice), want, rtol=1e-5)
    targets_BT = np.where(batch['loss_weights_BT'] > 0, batch['targets_BT'], np.int32(3))
    assert_same(loss_and_gradients(config, batch | {'targets_BT': targets_BT}), want)


@functools.cache
def predicting(config):
    inputs = batch_of(config).keys() - {'targets_BT', 'loss_weights_BT'}

    def predict(params, batch):
        return with_params(config.model, params)(**{name: batch[name] for name in inputs})

    return jax.jit(predict)


def log_probabilities(config, params, batch):
    logits_BTV = predicting(config)(params, batch)
    wide_BTV = np.asarray(logits_BTV, np.float64)
    return wide_BTV - np.log(np.exp(wide_BTV).sum(-1, keepdims=True))


def test_label_smoothing_is_a_mixture_with_the_uniform_distribution(tiny, monkeypatch):
    def on_targets(config, params, batch, measure, key=None):
        return measure(batch['logits'], batch['targets_BT'])

    monkeypatch.setattr(step, 'on_targets', on_targets)
    rng = np.random.default_rng(0)
    batch = {
        'logits': rng.normal(size=(3, 5, 7)).astype(np.float32),
        'targets_BT': rng.integers(0, 7, (3, 5)),
        'loss_weights_BT': rng.integers(0, 2, (3, 5)).astype(np.float32),
    }
    smooth = tiny(train={'label_smoothing': 0.1})
    nats_BTV = -np.log(np.exp(batch['logits']) / np.exp(batch['logits']).sum(-1, keepdims=True))
    # Cross-entropy with 0.9 of the target and 0.1 of everything, word for word.
    want, plain = 0.0, 0.0
    for b, t in zip(*np.nonzero(batch['loss_weights_BT']), strict=True):
        target_V = np.eye(7)[batch['targets_BT'][b, t]]
        want += (0.9 * target_V + 0.1 / 7) @ nats_BTV[b, t]
        plain += target_V @ nats_BTV[b, t]
    np.testing.assert_allclose(step.loss_sum(smooth, None, batch), want, rtol=1e-5)
    np.testing.assert_allclose(step.loss_sum(tiny(), None, batch), plain, rtol=1e-5)
    nats_B = evaluation.measure(smooth, None, batch)['nats']
    np.testing.assert_allclose(nats_B.sum(), plain, rtol=1e-5)
    assert abs(plain - want) > 1e-2


@pytest.mark.parametrize(
    'name', only(['masked', 'labelling probe'], ['translation', 'masked', 'labelling probe'])
)
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
        np.testing.assert_allclose(
            got.nats_RX[: len(used), x], (nats_BT * used).sum(-1), rtol=1e-5, atol=1e-5
        )
    assert got.num_targets == got.targets_R.sum() == loss_weights_BT.sum()
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
    def loss_of(**fields):
        config = task('masked', model=fields)
        loss = jax.jit(functools.partial(step.loss_sum, config))
        # A training step draws random numbers only for a model that drops.
        return loss(params, batch, jax.random.key(0) if config.model.drops else None)

    config = task('masked')
    params, batch = params_of(config), batch_of(config)
    plain = loss_of()
    for name in ('dropout', 'attention_dropout', 'activation_dropout'):
        assert abs(loss_of(**{name: 0.5}) - plain) > 1e-3, name


def reached(config, mesh, lifting):
    """Program, state, training losses and evaluations after three steps."""
    split = dataclasses.replace(config, mesh=mesh)
    built, rows = program.build(split, lifting), rows_of(split)
    part = placement.local_share(split, built.mesh).rows
    seeds = [trial['seed'] for trial in config.trials.trials()]
    (local,) = pipeline.train_batches(
        rows, seeds=seeds, batch_size=8, num_steps=3, steps_per_read=3, part=part
    )
    state, metrics = built.train(built.init(), placement.place_batch(split, built.mesh, local))
    evaluation = measurements.evaluate(split, built, rows, state, 'validation')
    return (
        built,
        state,
        {
            'loss': metrics['loss'],
            'val_loss': evaluation.values['loss'],
            'rows': evaluation.num_rows,
            'targets': evaluation.num_targets,
            'row_loss': evaluation.nats_RX / np.maximum(evaluation.targets_R, 1)[:, None],
            **(measurements.induction(split, built, rows, state) or {}),
        },
        evaluation.values['loss_se'],
    )


@pytest.fixture(scope='module')
def one_device():
    """What is reached on one device, by config."""
    return functools.cache(lambda config: reached(config, MeshConfig(), 'vmap'))


SPREAD = [
    ('language', MeshConfig(trial=2, fsdp=2, tensor=2), 'vmap'),
    ('masked', MeshConfig(data=2, fsdp=2, tensor=2), 'vmap'),
    # tests/train/test_processes.py maps over trials.
    ('language', MeshConfig(data=2, fsdp=2, tensor=2), 'map'),
    ('translation', MeshConfig(data=2, fsdp=2, tensor=2), 'vmap'),
    ('language', MeshConfig(trial=2, data=2, tensor=2), 'map'),
    ('language', MeshConfig(trial=2, data=2, tensor=2), 'vmap'),
    ('language', MeshConfig(trial=2, fsdp=2, tensor=2), 'map'),
    ('language', MeshConfig(data=4), 'map'),
    ('language', MeshConfig(fsdp=4, tensor=2), 'map'),
]


@pytest.mark.parametrize(
    ('name', 'mesh', 'lifting'),
    only(SPREAD[:1], SPREAD),
    ids=lambda m: m if isinstance(m, str) else f'{m.trial}{m.data}{m.fsdp}{m.tensor}',
)
def test_eight_devices_reach_what_one_does(
    task, one_device, name, mesh, lifting, without_rematerialization
):
    # XLA rematerializes in a scan over several layers of an encoder of 257 tokens.
    layers = 1 if name == 'masked' else 2
    config = task(
        name, model={'num_layers': layers}, train={'num_steps': 3, 'steps_per_dispatch': 3}
    )
    *_, want, want_se = one_device(config)
    with without_rematerialization():
        built, state, got, got_se = reached(config, mesh, lifting)
    assert got.keys() == want.keys() and ('val_induction_gain' in got) == (name == 'language')
    for key in want:
        atol = 2e-3 if key == 'val_induction_accuracy' else 1e-5
        np.testing.assert_allclose(got[key], want[key], atol=atol, rtol=0, err_msg=key)
    np.testing.assert_allclose(got_se, want_se, rtol=1e-4)
    for leaf, planned in zip(
        jax.tree.leaves(state), jax.tree.leaves(built.abstract_state), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
