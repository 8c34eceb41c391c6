"""experiments.benchmark: races, pages, suites; what the peers compute; the script.

`experiments.verify` holds its tables and targets against the recorded rounds.
"""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.benchmark import jax_gpt, reading, record, suites
from experiments.benchmark.race import Row, race
from experiments.benchmark.record import Group
from qkattn.config import ModelConfig, from_json, to_json
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ReportError
from qkattn.model import cost
from qkattn.train import step

RUN = suites.decoder(2, 16, 2, 12, 11, 2)


def test_rows_take_turns_and_those_that_fail_are_left_out(tmp_path, caplog):
    here = 'tests.experiments.works'
    calls = {'file': str(tmp_path / 'calls')}
    rows = [
        Row('a', calls | {'letter': 'a'}, extra={'tokens': 10}, work=f'{here}:writes_letter'),
        Row('b', calls | {'letter': 'b', 'steps': 1e6}, work=f'{here}:writes_letter'),
        *(
            Row(name, work=f'{here}:{name}')
            for name in ('raises_value_error', 'exits_in_second_round')
        ),
    ]
    a, b = race(rows, rounds=3, seconds=0)
    # A call to warm up and a timed one of each as it is built; then the rounds.
    assert (tmp_path / 'calls').read_text() == 'aabb' + 3 * 'ab'
    # All rows run in one process, which is not this one.
    assert a.extra['here'] != os.getpid()
    assert a.extra == b.extra | {'tokens': 10}
    # A call of b is 1e6 steps, one of a is a single step, and rounds hold seconds a step.
    assert len(a.rounds) == 3
    assert b.median < a.median / 1e3
    assert 'raises_value_error is left out: ValueError: no such kernel' in caplog.text
    assert 'exits_in_second_round is left out: BrokenProcessPool' in caplog.text
    assert 'and more' not in caplog.text


def test_a_benchmark_is_read_as_written_and_another_schema_is_refused(tmp_path):
    rows = [Row('fast', {}, [0.1, 0.2, 0.3], {'tokens': 10})]
    record.write(tmp_path, {'machine': {}}, [group := Group('steps', 'rows', rows, 'fast')])
    assert record.read(tmp_path) == [group]
    with pytest.raises(ReportError, match="no group that matches 'steps:.b'"):
        record.block(tmp_path / 'steps:?b')
    assert '| fast | 200 | 150 | 250 | 50 |' in record.block(tmp_path / 'steps:?r*')
    (tmp_path / record.FILE).write_text('{"schema": 2, "machine": {}, "groups": []}')
    with pytest.raises(ReportError, match='its schema is 2'):
        record.block(tmp_path / 'steps:?b')


@pytest.mark.parametrize('scale', suites.SCALES)
def test_every_suite_has_valid_models_and_rows_of_different_names(scale, monkeypatch):
    def check_and_time_as_a_second(rows, **_):
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            if 'model' in row.settings:
                from_json(ModelConfig, row.settings['model'])
        return [Row(row.name, {}, [1.0], row.extra) for row in rows]

    # Nothing is timed or trained.
    monkeypatch.setattr(suites, 'race', check_and_time_as_a_second)
    monkeypatch.setattr(suites.cost, 'training_flops_per_token', lambda model: 8)
    monkeypatch.setattr(suites, '_ablate', lambda *flags: 1.0)
    groups = [g for suite in suites.SUITES.values() for g in suite(suites.SCALES[scale])]
    assert len({group.name for group in groups}) == len(groups) >= 5
    for group in groups:
        if group.reference:
            assert group.row(group.reference)
        assert record.table(group)


@pytest.fixture(scope='module')
def reference():
    """(parameters, gradients, loss) of qkattn, tokens [B, T + 1], and the batch made of them."""
    tokens = np.random.default_rng(0).integers(11, size=(2, 13))
    batch = {'tokens_BT': tokens[:, :-1], 'targets_BT': tokens[:, 1:]}
    batch['loss_weights_BT'] = np.ones(batch['tokens_BT'].shape, np.float32)
    batch = jax.tree.map(lambda a: a[None], batch)
    arrays, definition = jax.tree.flatten(step.init_trial(RUN, 0)['params'])
    # Every gain differs from 1 and from the others, so that a missing or swapped one shows.
    keys = jax.random.split(jax.random.key(1), len(arrays))
    drawn = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(arrays, keys, strict=True)]
    params = definition.unflatten(drawn)
    loss, grads = step.gradients(RUN, params, batch)
    return params, grads, loss, tokens, batch


def with_names_of_jax_gpt(params):
    """The arrays as `jax_gpt` names them."""
    blocks = params['blocks']
    score = blocks['attention']['score']
    value = blocks['attention']['value']
    mlp = blocks['mlp']
    names = {'q': score['w_q_DNH'], 'k': score['w_k_DKH'], 'v': value['w_v_DKH']}
    names |= {'o': value['w_o_NHD'], 'in': mlp['w_in_DF'], 'out': mlp['w_out_FD']}
    names |= {f'{part}_gain': blocks[f'{part}_norm']['g_D'] for part in ('attention', 'mlp')}
    return {
        'embedding': params['w_embedding_VD'],
        'position': params['w_position_TD'],
        'layers': [{n: a[layer] for n, a in names.items()} for layer in range(2)],
        'gain': params['final_norm']['g_D'],
    }


def with_names_of_torch_gpt(params):
    """The arrays of `jax_gpt` as `torch_gpt` names and transposes them: linear layers [out, in]."""
    arrays = {'embedding': params['embedding'], 'position': params['position']}
    arrays['norm'] = params['gain']
    for number, layer in enumerate(params['layers']):
        block = {'attention_norm': layer['attention_gain'], 'mlp_norm': layer['mlp_gain']}
        block['qkv'] = np.concatenate([layer[name].reshape(16, 16).T for name in 'qkv'])
        block['out'] = layer['o'].reshape(16, 16).T
        block |= {'mlp_in': layer['in'].T, 'mlp_out': layer['out'].T}
        arrays |= {f'blocks.{number}.{name}': array for name, array in block.items()}
    return {f'{name}.weight': np.asarray(array) for name, array in arrays.items()}


def assert_agree(result, expected):
    tolerance = 1e-5 * max(np.abs(e).max() for e in jax.tree.leaves(expected))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=tolerance)
    jax.tree.map(close, result, expected)


@pytest.mark.slow
def test_functional_jax_takes_the_same_step(reference):
    """Loss, gradients and one AdamW step of `jax_gpt` are those of qkattn's training step."""
    params, grads, loss, tokens, batch = reference
    model = to_json(RUN.model)
    # Parameters of qkattn by the names of jax_gpt.
    theirs = with_names_of_jax_gpt(params)
    fresh = jax_gpt.init(model, jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, theirs)
    result = jax.value_and_grad(functools.partial(jax_gpt.loss, model))(theirs, tokens)
    assert_agree(result, (loss, with_names_of_jax_gpt(grads)))
    optimizer = jax_gpt.optimizer()
    updates, _ = optimizer.update(with_names_of_jax_gpt(grads), optimizer.init(theirs), theirs)
    trial = step.init_trial(RUN, 0) | {'params': params, 'alive': True}
    # Behind the warm-up, at the beginning of the decay, the learning rate is the peak.
    hyper = {'seed': 0, 'learning_rate': 1e-3, 'weight_decay': 0.1}
    after, _ = step.train_trial(RUN, RUN.optimizer.warmup_steps, trial, hyper, batch)
    assert_agree(optax.apply_updates(theirs, updates), with_names_of_jax_gpt(after['params']))


@pytest.mark.slow
def test_torch_computes_the_same_gradients(reference):
    torch = pytest.importorskip('torch', exc_type=ImportError)
    from experiments.benchmark import torch_gpt

    params, grads, loss, tokens, _ = reference
    model = torch_gpt.GPT(to_json(RUN.model))
    assert sum(p.numel() for p in model.parameters()) == cost.count(RUN.model)['total']
    arrays = with_names_of_torch_gpt(with_names_of_jax_gpt(params))
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})

    # From equal parameters and tokens, the loss and all gradients agree.
    result = model(torch.tensor(tokens))
    result.backward()
    assert result.item() == pytest.approx(float(loss), rel=1e-5)
    assert_agree(
        {n: p.grad.numpy() for n, p in model.named_parameters()},
        with_names_of_torch_gpt(with_names_of_jax_gpt(grads)),
    )


@pytest.mark.slow
def test_a_stack_counts_the_steps_of_every_trial():
    run = suites.with_changes(RUN, steps_per_dispatch=2, trials=3, lifting='map')
    stack = suites.train(to_json(run))
    assert stack.steps == 2 * 3
    assert stack.run(1)['loss'].shape == (2, 3)


def test_the_cache_is_as_large_as_the_cost_predicts():
    work = suites.greedy(to_json(RUN.model), rows=2, prompt=2, tokens=3)
    assert work.extra['cache_bytes'] == 4 * 2 * 12 * cost.cache_floats_per_token(RUN.model)
    assert (work.steps, work.extra['tokens']) == (3, 2)


def test_rows_are_read_at_random_from_all_shards(tmp_path, monkeypatch):
    rows_read = []
    windows = TokenDataset.windows

    def recorded(self, split, first_B, size):
        rows_read.extend(first_B.tolist())
        return windows(self, split, first_B, size)

    monkeypatch.setattr(TokenDataset, 'windows', recorded)

    # 10 steps of 16 rows of 1,024 tokens, from 3 files of 40,000.
    work = reading.batches(str(tmp_path / 'shards'), shards=3, ids=40_000, context=1024)
    work.run(1)
    assert work.extra == {'tokens': 16 * 1024}
    assert work.steps == 10
    assert {first // 40_000 for first in rows_read} == {0, 1, 2}
    assert rows_read != sorted(rows_read)


def test_sparse_shards_take_no_disk(tmp_path):
    reading.batches(str(tmp_path / 'a'), shards=2, ids=1_000_000, context=256, sparse=True).run(1)
    sizes = [path.stat() for path in (tmp_path / 'a').iterdir()]
    assert [size.st_size for size in sizes] == 2 * [1024 + 2_000_000]
    assert all(size.st_blocks * 512 < 100_000 for size in sizes)


@pytest.mark.slow
def test_the_smallest_run_measures_every_row(printed, tmp_path):
    printed('benchmark', f'--suite={",".join(suites.SUITES)}', '--scale=smoke', '--out=out')
    groups = json.loads((tmp_path / 'out/benchmark.json').read_text())['groups']
    assert {group['suite'] for group in groups} == {*suites.SUITES}
    rows = [row for group in groups for row in group['rows']]
    assert len(rows) >= 15
    assert all(row['rounds'] for row in rows)
