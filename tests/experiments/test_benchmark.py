"""experiments.benchmark: races, pages, suites; what the peers compute; the script.

`experiments.verify` holds its tables and targets against the recorded rounds.
"""

import functools
import json
import os
from typing import NamedTuple

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

RUN = suites.decoder(layers=2, width=16, heads=2, context=12, vocabulary=11, batch=2)


def test_rows_take_turns_and_those_that_fail_are_left_out(tmp_path, caplog):
    """`race` times each row of a benchmark in every round, and leaves out rows that fail.

    The work of a row is the function that is called and timed. The work `writes_letter` appends the
    letter of its row to a file.
    """
    module = 'tests.experiments.works'
    file = tmp_path / 'calls'
    a_settings = {'file': str(file), 'letter': 'a'}
    # A call of b counts as a million steps, and a call of a counts as one step.
    b_settings = {'file': str(file), 'letter': 'b', 'steps': 1e6}
    rows = [
        Row('a', a_settings, extra={'tokens': 10}, work=f'{module}:writes_letter'),
        Row('b', b_settings, work=f'{module}:writes_letter'),
        Row('raises_value_error', work=f'{module}:raises_value_error'),
        Row('exits_in_second_round', work=f'{module}:exits_in_second_round'),
    ]

    a, b = race(rows, rounds=3, seconds=0)

    # Building a row calls its work twice. Each of the 3 rounds then calls a and b once.
    assert file.read_text() == 'aa' + 'bb' + 'ab' + 'ab' + 'ab'

    # a and b have the same work, so both run in one process. It is not the test's process.
    process = a.extra['here']
    assert process != os.getpid()
    assert a.extra == {'here': process, 'tokens': 10}
    assert b.extra == {'here': process}

    # Each round gives a time in seconds per step. A call of a takes about as long as a call of b.
    assert len(a.rounds) == 3
    assert b.median < a.median / 1e3

    # A warning quotes only the first line of an error. Here the second line is 'and more'.
    assert 'raises_value_error is left out: ValueError: no such kernel' in caplog.text
    assert 'and more' not in caplog.text

    # The last row ends its own process, so the pool of processes is broken.
    assert 'exits_in_second_round is left out: BrokenProcessPool' in caplog.text


@pytest.fixture
def written_group(tmp_path):
    """A group of rows. The benchmark written to `tmp_path` has only this group."""
    rows = [Row('fast', {}, [0.1, 0.2, 0.3], {'tokens': 10})]
    group = Group('steps', 'rows', rows, 'fast')
    record.write(tmp_path, {'machine': {}}, [group])
    return group


def test_a_benchmark_is_read_as_written(written_group, tmp_path):
    assert record.read(tmp_path) == [written_group]


def test_a_block_holds_the_groups_that_match_a_pattern(written_group, tmp_path):
    assert '| fast | 200 | 150 | 250 | 50 |' in record.block(tmp_path / 'steps:?r*')
    with pytest.raises(ReportError, match="no group that matches 'steps:.b'"):
        record.block(tmp_path / 'steps:?b')


def test_a_benchmark_of_another_schema_is_refused(written_group, tmp_path):
    (tmp_path / record.FILE).write_text('{"schema": 2, "machine": {}, "groups": []}')
    with pytest.raises(ReportError, match='its schema is 2'):
        record.block(tmp_path / 'steps:?b')


@pytest.mark.parametrize('scale', suites.SCALES)
def test_every_suite_has_valid_models_and_distinct_names(scale, monkeypatch):
    """At every scale, all models are valid, and names of groups and of their rows are distinct.

    A suite yields groups of rows, and a row is a program to time. Nothing is timed or trained here.
    """

    def check_and_time_as_a_second(rows, **_):
        """Replaces race: checks names and models, and gives each row a time of one second."""
        names = {row.name for row in rows}
        assert len(names) == len(rows)
        for row in rows:
            if 'model' in row.settings:
                # Raises an error if the model is not valid.
                from_json(ModelConfig, row.settings['model'])
        return [Row(row.name, {}, [1.0], row.extra) for row in rows]

    # Counting FLOPs and running a study take long, so both are replaced by constants.
    monkeypatch.setattr(suites, 'race', check_and_time_as_a_second)
    monkeypatch.setattr(suites.cost, 'training_flops_per_token', lambda model: 8)
    monkeypatch.setattr(suites, '_ablate', lambda *flags: 1.0)
    groups = []
    for suite in suites.SUITES.values():
        groups.extend(suite(suites.SCALES[scale]))

    # There are 5 suites, and each has at least one group.
    assert len(groups) >= 5
    group_names = {group.name for group in groups}
    assert len(group_names) == len(groups)

    # The reference of a group is the row with which other rows are compared.
    for group in groups:
        if group.reference:
            assert group.row(group.reference)
        assert record.table(group)


class Reference(NamedTuple):
    """Parameters and tokens, with the loss and gradients that qkattn computes from both."""

    params: dict
    grads: dict
    loss: jax.Array
    tokens: np.ndarray  # [B, T + 1]
    batch: dict  # inputs and targets made of the tokens, with an axis for one microbatch


@pytest.fixture(scope='module')
def reference():
    """Parameters and random tokens of a small decoder, with the loss and gradients of qkattn.

    The benchmark's models in plain JAX and in PyTorch must give the same loss and gradients.
    """
    # 2 rows of 13 tokens give 12 inputs each. The target of an input is the next token.
    tokens = np.random.default_rng(0).integers(11, size=(2, 13))
    inputs_BT = tokens[:, :-1]
    microbatch = {
        'tokens_BT': inputs_BT,
        'targets_BT': tokens[:, 1:],
        'loss_weights_BT': np.ones(inputs_BT.shape, np.float32),
    }
    # The leading axis of a batch counts microbatches. This batch has one.
    batch = {name: array[None] for name, array in microbatch.items()}

    # Gains of norms start at 1. With noise, a missing or swapped gain changes the loss.
    initial_params = step.init_trial(RUN, 0)['params']
    arrays, definition = jax.tree.flatten(initial_params)
    keys = jax.random.split(jax.random.key(1), len(arrays))
    noisy_arrays = []
    for array, key in zip(arrays, keys, strict=True):
        noise = 0.1 * jax.random.normal(key, array.shape)
        noisy_arrays.append(array + noise)
    params = definition.unflatten(noisy_arrays)

    loss, grads = step.gradients(RUN, params, batch)
    return Reference(params, grads, loss, tokens, batch)


def as_jax_gpt(params):
    """Converts qkattn's parameters or gradients to the structure of `jax_gpt`.

    `jax_gpt` is the same model in plain JAX. qkattn stacks the arrays of all layers along a first
    axis. `jax_gpt` has a dictionary of arrays for each layer.
    """
    blocks = params['blocks']
    score = blocks['attention']['score']
    value = blocks['attention']['value']
    stacked = {
        'q': score['w_q_DNH'],
        'k': score['w_k_DKH'],
        'v': value['w_v_DKH'],
        'o': value['w_o_NHD'],
        'in': blocks['mlp']['w_in_DF'],
        'out': blocks['mlp']['w_out_FD'],
        'attention_gain': blocks['attention_norm']['g_D'],
        'mlp_gain': blocks['mlp_norm']['g_D'],
    }

    layers = []
    for layer in range(RUN.model.num_layers):
        arrays_of_layer = {name: array[layer] for name, array in stacked.items()}
        layers.append(arrays_of_layer)
    return {
        'embedding': params['w_embedding_VD'],
        'position': params['w_position_TD'],
        'layers': layers,
        'gain': params['final_norm']['g_D'],
    }


def as_torch_gpt(params):
    """Converts parameters or gradients of `jax_gpt` to the names and shapes of `torch_gpt`.

    `torch_gpt` is the same model in PyTorch, where weights have the axes [out, in]. So matrices are
    transposed. The matrices of queries, keys and values are concatenated.
    """
    d_model = RUN.model.d_model
    arrays = {
        'embedding': params['embedding'],
        'position': params['position'],
        'norm': params['gain'],
    }
    for number, layer in enumerate(params['layers']):
        # All heads together are d_model wide.
        q, k, v, o = [layer[name].reshape(d_model, d_model).T for name in ('q', 'k', 'v', 'o')]
        block = f'blocks.{number}'
        arrays[f'{block}.attention_norm'] = layer['attention_gain']
        arrays[f'{block}.qkv'] = np.concatenate([q, k, v])
        arrays[f'{block}.out'] = o
        arrays[f'{block}.mlp_norm'] = layer['mlp_gain']
        arrays[f'{block}.mlp_in'] = layer['in'].T
        arrays[f'{block}.mlp_out'] = layer['out'].T
    return {f'{name}.weight': np.asarray(array) for name, array in arrays.items()}


def assert_agree(result, expected):
    """Asserts that entries agree up to 1e-5 times the entry, plus 1e-5 times the largest entry."""
    largest = max(np.abs(array).max() for array in jax.tree.leaves(expected))

    def assert_close(array, expected_array):
        np.testing.assert_allclose(array, expected_array, rtol=1e-5, atol=1e-5 * largest)

    jax.tree.map(assert_close, result, expected)


@pytest.mark.slow
def test_functional_jax_takes_the_same_step(reference):
    """`jax_gpt`, the benchmark's model in plain JAX, trains in the same way as qkattn's model.

    From the same parameters and tokens, both models compute the same loss and gradients. One step
    of AdamW then gives the same new parameters.
    """
    model = to_json(RUN.model)
    params = as_jax_gpt(reference.params)
    grads = as_jax_gpt(reference.grads)
    initial = jax_gpt.init(model, jax.random.key(0))
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, params)

    # Loss and gradients of `jax_gpt` are compared with the loss and gradients of qkattn.
    loss_of = functools.partial(jax_gpt.loss, model)
    loss_and_grads = jax.value_and_grad(loss_of)(params, reference.tokens)
    assert_agree(loss_and_grads, (reference.loss, grads))

    # `jax_gpt` takes a step of AdamW.
    optimizer = jax_gpt.optimizer()
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    params_after = optax.apply_updates(params, updates)

    # qkattn takes a step from the reference's parameters. `alive` means: not diverged.
    trial = step.init_trial(RUN, 0) | {'params': reference.params, 'alive': True}
    # `jax_gpt` has a constant learning rate of 1e-3, and a weight decay of 0.1.
    # qkattn reaches the full learning rate at the end of its warm-up.
    hyper = {'seed': 0, 'learning_rate': 1e-3, 'weight_decay': 0.1}
    peak_step = RUN.optimizer.warmup_steps
    trial_after, _ = step.train_trial(RUN, peak_step, trial, hyper, reference.batch)
    assert_agree(params_after, as_jax_gpt(trial_after['params']))


@pytest.mark.slow
def test_torch_computes_the_same_gradients(reference):
    """With the same parameters, the benchmark's PyTorch model has qkattn's loss and gradients."""
    torch = pytest.importorskip('torch', exc_type=ImportError)
    from experiments.benchmark import torch_gpt

    model = torch_gpt.GPT(to_json(RUN.model))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == cost.count(RUN.model)['total']

    # The reference's parameters are renamed for PyTorch and loaded into the model.
    arrays = as_torch_gpt(as_jax_gpt(reference.params))
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})

    # `backward` computes the gradients.
    loss = model(torch.tensor(reference.tokens))
    loss.backward()

    assert loss.item() == pytest.approx(float(reference.loss), rel=1e-5)
    grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert_agree(grads, as_torch_gpt(as_jax_gpt(reference.grads)))


@pytest.mark.slow
def test_a_stack_counts_the_steps_of_every_trial():
    run = suites.with_changes(RUN, steps_per_dispatch=2, trials=3, lifting='map')
    stack = suites.train(to_json(run))
    assert stack.steps == 2 * 3
    losses = stack.run(1)['loss']
    assert losses.shape == (2, 3)


def test_the_cache_is_as_large_as_the_cost_predicts():
    """The cache of keys and values takes the memory that `cost` predicts per token.

    `greedy` continues `num_rows` prompts. The cache has room for the full context of each row.
    """
    num_rows = 2
    num_tokens = 3
    work = suites.greedy(to_json(RUN.model), rows=num_rows, prompt=2, tokens=num_tokens)

    bytes_per_float = 4
    floats_per_token = cost.cache_floats_per_token(RUN.model)
    num_cached_tokens = num_rows * RUN.model.context
    assert work.extra['cache_bytes'] == bytes_per_float * num_cached_tokens * floats_per_token

    # A step generates one token in every row.
    assert work.steps == num_tokens
    assert work.extra['tokens'] == num_rows


def test_rows_are_read_at_random_from_all_shards(tmp_path, monkeypatch):
    """The benchmark of reading takes rows of tokens from random positions in all shards (files)."""
    first_tokens = []  # the position of the first token of each row, in reading order
    windows = TokenDataset.windows

    def recorded(self, split, first_B, size):
        """Reads B rows, and records the position of each row's first token."""
        first_tokens.extend(first_B.tolist())
        return windows(self, split, first_B, size)

    monkeypatch.setattr(TokenDataset, 'windows', recorded)
    shard_size = 40_000  # tokens
    work = reading.batches(str(tmp_path / 'shards'), shards=3, ids=shard_size, context=1024)
    work.run(1)

    # One call reads 10 batches of 16 rows, each of 1024 tokens. A batch counts as a step.
    assert work.steps == 10
    assert work.extra == {'tokens': 16 * 1024}

    # Positions run through all shards: shard i holds i * shard_size to (i + 1) * shard_size - 1.
    shards_read = {first // shard_size for first in first_tokens}
    assert shards_read == {0, 1, 2}
    assert first_tokens != sorted(first_tokens)


def test_sparse_shards_take_no_disk(tmp_path):
    """Sparse shards hold zeros. Each file has its full size, but its ids take no disk blocks."""
    num_shards = 2
    ids_per_shard = 1_000_000
    folder = tmp_path / 'shards'

    work = reading.batches(
        str(folder), shards=num_shards, ids=ids_per_shard, context=256, sparse=True
    )
    work.run(1)  # reads batches from the shards

    shards = list(folder.iterdir())
    assert len(shards) == num_shards
    header_bytes = 1024
    bytes_per_id = 2
    for shard in shards:
        status = shard.stat()
        assert status.st_size == header_bytes + bytes_per_id * ids_per_shard
        # A block of st_blocks has 512 bytes. Stored ids would take 2 * 1_000_000 bytes.
        bytes_on_disk = 512 * status.st_blocks
        assert bytes_on_disk < 100_000


@pytest.mark.slow
def test_the_smallest_run_measures_every_row(printed, tmp_path):
    """A benchmark at the smallest scale, `smoke`, writes the times of every row of every suite."""
    all_suites = ','.join(suites.SUITES)
    printed('benchmark', f'--suite={all_suites}', '--scale=smoke', '--out=out')

    benchmark = json.loads((tmp_path / 'out/benchmark.json').read_text())
    groups = benchmark['groups']
    assert {group['suite'] for group in groups} == set(suites.SUITES)

    rows = []
    for group in groups:
        rows.extend(group['rows'])
    # There would be fewer than 15 rows if failing rows had been left out.
    assert len(rows) >= 15
    # `rounds` has the time of each round.
    for row in rows:
        assert row['rounds']
