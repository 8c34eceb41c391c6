"""Every command as a user runs it: its help, what it prints, and what it writes."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import requests
from jax.stages import Lowered

from examples import gauge_fixing
from experiments.explorer.bench import Bench
from experiments.explorer.symbolic import sympy
from experiments.explorer.worked import worked
from qkattn import __version__
from qkattn.attention import NORMALIZERS, SCORES, VALUES
from qkattn.attention.kernels.choice import KERNELS
from qkattn.config import Config, ModelConfig, Study
from qkattn.config.setting import settings
from qkattn.convert.conversions import CONVERSIONS, Conversion
from qkattn.data.corpora.corpus_registry import CORPORA
from qkattn.data.tasks.probe_tasks import PROBES
from qkattn.data.tasks.task_registry import TASKS
from qkattn.data.tokenizers.tokenizer import CharacterTokenizer as Tokenizer
from qkattn.data.tokenizers.vocabulary import KINDS as TOKENIZERS
from qkattn.jobs import signals
from qkattn.jobs.cli import shipped
from qkattn.jobs.output import EXIT_UNREAD
from qkattn.model import cost
from qkattn.model.blocks import ACTIVATIONS
from qkattn.model.stack import REMAT_POLICIES
from qkattn.model.transformer import KINDS as MODEL_KINDS
from qkattn.storage import ledger, run_directory
from qkattn.storage.records import read_json
from qkattn.storage.sinks import SINKS
from qkattn.train.loop import train
from qkattn.train.optimizer import OPTIMIZERS, SCHEDULES
from tests import studies
from tests.convert.test_published import make_tensors, write_gpt2
from tests.data.datasets import contents, write_texts
from tests.experiments.conftest import save_model
from tests.lanes import slow_except
from tests.processes import ROOT, other_modes, start_python, umask, wait_for_results
from tests.test_readme import README, between

SCRIPTS = [name for name in shipped('experiments') if not name.startswith('_')]
CONFIGS = {'train': Config, 'ablate': Study}


@pytest.fixture
def run(small_run, tmp_path):
    """`small_run`, with a link to its directory: run/ in the working directory."""
    (tmp_path / 'run').symlink_to(small_run.path)
    return small_run


# Help, and what nobody reads


def test_version_is_printed(printed):
    assert printed('--version') == f'{__version__}\n'


def test_help_lists_all_scripts_and_configs_with_their_first_line(printed):
    """`qkattn --help` lists each script and config with the first line of the file's docstring."""
    text = printed('--help')

    # Without arguments, the command prints its help as well.
    assert printed() == text
    for line in text.splitlines():
        assert len(line) <= 80

    # Joining the lines undoes the line breaks within long entries.
    one_line = ' '.join(text.split())
    scripts = ROOT.glob('experiments/[a-z]*.py')
    configs = ROOT.glob('configs/**/[a-z]*.py')
    for path in (*scripts, *configs):
        # The listed name omits the first folder: configs/claims/lm_rank.py is claims/lm_rank.
        path_without_suffix = path.relative_to(ROOT).with_suffix('').as_posix()
        _, _, name = path_without_suffix.partition('/')
        first_line = path.read_text().splitlines()[0]
        summary = first_line.strip('"')
        assert f' {name} {summary}' in one_line


def flag_entries(text):
    """Maps each flag in a help text to its explanation, e.g. {'out': 'where to write; ...'}."""
    explanations = {}
    for entry in f'\n{text}'.split('\n  --')[1:]:
        name, _, description = entry.partition(':')
        first_paragraph = description.split('\n\n')[0]
        explanations[name] = ' '.join(first_paragraph.split())
    return explanations


@pytest.mark.parametrize('name', SCRIPTS)
def test_every_flag_is_explained_with_its_default(printed, name):
    """The help of the script `name` explains each flag and gives its default."""
    text = printed(name, '-h')

    for line in text.splitlines():
        assert len(line) <= 80
    flags = flag_entries(text)
    assert flags
    for explanation in flags.values():
        assert '; default ' in explanation

    # Only these scripts read a config file.
    has_config = name in ('train', 'ablate', 'prepare_data')
    assert ('config' in flags) == has_config

    # train and ablate also have a flag for each setting, such as --config.train.num_steps.
    if name in CONFIGS:
        for field, setting in settings(CONFIGS[name]).items():
            # An explanation reads 'KIND; default VALUE DOC'. Some go on with ' Names: ...'.
            kind, _, rest = flags[f'config.{field}'].partition('; default ')
            default_and_doc, _, _ = rest.partition(' Names: ')
            assert kind

            # The setting's definition has the same default and text.
            doc = ' '.join(setting.doc.split())
            assert default_and_doc == f'{setting.default!r} {doc}'


# The registries whose names the help lists, by setting.
REGISTRIES = {
    'model.score': [SCORES],
    'model.value': [VALUES],
    'model.normalizer': [NORMALIZERS],
    'data.name': [CORPORA, PROBES],
    'data.tokenizer': [TOKENIZERS],
    'data.task': [TASKS],
    'optimizer.name': [OPTIMIZERS],
    'optimizer.schedule': [SCHEDULES],
    'train.sinks': [SINKS],
}


@pytest.mark.parametrize(('name', 'prefix'), [('train', ''), ('ablate', 'base.')])
def test_help_lists_the_names_of_every_registry(printed, name, prefix):
    """The help of a setting lists all registered names, such as all datasets for data.name.

    In a study, the settings of a run begin with `base.`, e.g. --config.base.data.name.
    """
    text = printed(name, '-h')

    names_by_flag = {}
    for flag, explanation in flag_entries(text).items():
        _, _, names = explanation.partition(' Names: ')
        if names:
            names_by_flag[flag] = names

    # `REGISTRIES` maps a setting to the registries that contain its names.
    expected = {}
    for field, registries in REGISTRIES.items():
        names = ', '.join(itertools.chain(*registries))
        expected[f'config.{prefix}{field}'] = f'{names}.'
    assert names_by_flag == expected


@pytest.mark.parametrize(
    ('field', 'known'),
    [
        ('model.kind', MODEL_KINDS),
        ('model.activation', ACTIVATIONS),
        ('model.kernel', KERNELS),
        ('model.remat', ['none', *REMAT_POLICIES]),
    ],
)
def test_the_values_of_a_setting_are_those_that_the_code_knows(field, known):
    kind = settings(Config)[field].kind
    assert typing.get_args(kind) == tuple(known)


@pytest.mark.parametrize('command', [('variants', '--markdown'), ('train', '--help')])
def test_a_script_whose_output_nobody_reads_ends_quietly(script_here, unread, monkeypatch, command):
    monkeypatch.setattr(sys, 'stdout', unread)
    done = script_here(*command)
    assert done.returncode == EXIT_UNREAD
    assert done.stderr == ''


def test_a_character_that_the_encoding_lacks_is_escaped():
    source = 'from qkattn.jobs import output; output.escape_unencodable(); print("±")'
    process = start_python(source, PYTHONIOENCODING='ascii')

    code, printed, errors = wait_for_results([process])[0]
    assert code == 0
    assert printed == '\\xb1\n'
    assert errors == ''


# Signals before the main function of a script runs

# The end of the message on an interrupt, if running the same command again resumes the work.
RESUMES = '; the same command resumes from what is saved'
# `prepare_data` starts over, so the message does not promise to resume.
NOTHING_TO_SAVE = 'stopped with nothing to save; run the same command again'

# Saved as sitecustomize.py, this makes the import of jax wait a minute and swallow interrupts.
SLOW_IMPORT = """
import sys, time
class Waiting:
    def find_spec(self, name, *_):
        if name == 'jax':
            print('importing', file=sys.stderr, flush=True)
            try:
                time.sleep(60)
            except BaseException:
                pass
sys.meta_path.insert(0, Waiting())
"""


@pytest.mark.parametrize(
    ('command', 'number', 'code', 'sentence'),
    [
        ('ablate', signal.SIGTERM, 75, NOTHING_TO_SAVE),
        ('prepare_data', signal.SIGTERM, 75, NOTHING_TO_SAVE),
        ('ablate --dry_run', signal.SIGINT, 130, 'interrupted'),
    ],
)
def test_a_signal_during_imports_ends_a_script_in_one_line(
    command, number, code, sentence, tmp_path
):
    """A script that gets a signal while it imports jax ends at once, with one line.

    SIGTERM ends ablate and prepare_data with exit code 75, which tells launchers to repeat the
    command. Ctrl-C (SIGINT) ends a dry run with the usual exit code 130.
    """
    # Python runs sitecustomize.py when it starts. The import of jax then prints 'importing',
    # waits, and swallows interrupts.
    (tmp_path / 'sitecustomize.py').write_text(SLOW_IMPORT)
    process = subprocess.Popen(
        [sys.executable, '-m', 'qkattn', *command.split()],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        # The signal is sent once the import has begun.
        for line in process.stderr:
            if line.startswith('importing'):
                break
        else:
            pytest.fail('it ended before it imported jax')
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == code
    # `errors` is what the process printed after 'importing'.
    assert errors == f'{sentence}\n'


@pytest.mark.parametrize(
    ('command', 'interrupted_call', 'advice'),
    [
        ('variants', 'study.variant_tables.text', ''),
        ('train', 'train.program_cache.keep_programs', RESUMES),
        ('train --config=run.py --dry_run', 'train.program_cache.keep_programs', ''),
        ('claims', 'train.program_cache.keep_programs', RESUMES),
        ('claims --dry_run', 'train.program_cache.keep_programs', ''),
    ],
)
def test_an_interrupt_has_no_traceback(script_here, monkeypatch, command, interrupted_call, advice):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(f'qkattn.{interrupted_call}', interrupted)
    done = script_here(*command.split())
    assert done.returncode == 130
    assert done.stderr == f'interrupted{advice}\n'


def test_resumable_scripts_are_those_that_exit_on_a_signal():
    exiting = set()
    for name, path in shipped('experiments').items():
        if '\n@signals.exit_on_signal' in path.read_text():
            exiting.add(name)
    assert exiting == set(signals.RESUMABLE)


# Runs and their models

# A run of 20 steps on a probe task, with a metric from outside the package.
RECALL = """
--config.data.name=recall(pairs=2) --config.data.eval_sequences=8 --config.model.context=7
--config.model.num_layers=1 --config.model.num_heads=2 --config.model.d_model=16
--config.optimizer.warmup_steps=2 --config.train.num_steps=20 --config.train.batch_size=4
--config.train.steps_per_dispatch=5 --config.train.log_every=5 --config.train.eval_every=10
--config.train.checkpoint_every=20 --config.train.lifting=map --config.trials.seeds=(0,1)
--config.train.metrics=('confidence:top(k=3)',)
"""


def test_training_prints_where_its_results_are(script_here, printed, tmp_path, outside):
    """Training ends with its losses, the paths of its results, and a command that exports them.

    `RECALL` trains two seeds for 20 steps and evaluates them every 10 steps. The metric `top 3` is
    defined in the user's module confidence.py, which the fixture `outside` writes.
    """
    completed = script_here('train', '--config=run.py', '--workdir=out', *RECALL.split())
    assert completed.returncode == 0, completed.stderr

    # The progress is on standard error. It shows the smallest and largest loss of both seeds.
    loss = r'\d\.\d{4} to \d\.\d{4} nats/token'
    for logged in (
        f'step 10/20: validation loss {loss}\n',
        f'step 20/20: validation loss {loss}\n',
        f'train: step 20/20, validation loss {loss}, .* 100%, loss {loss}',
    ):
        assert re.search(f'^{logged}', completed.stderr, re.MULTILINE)

    # The results of each seed are on standard output, with the user's metric `top 3`.
    lines = completed.stdout.splitlines()
    for line in lines:
        assert len(line) <= 100
    losses = r'^  validation loss \d\.\d{4} nats/token, .* top 3 \d+\.\d\d %'
    assert re.search(losses, completed.stdout, re.MULTILINE)

    # Each of the three lines before the last one has a name and a path.
    for line in lines[-4:-1]:
        _, path = line.split()
        assert (tmp_path / path).exists()

    # The last line is 'to export   qkattn convert ARGUMENTS --out=DIRECTORY'.
    words = lines[-1].split()
    assert words[:4] == ['to', 'export', 'qkattn', 'convert']
    assert words[-1] == '--out=DIRECTORY'

    # The command to export also runs without the module confidence.py.
    (outside / 'confidence.py').unlink()
    del sys.modules['confidence']
    arguments = words[4:-1]
    printed('convert', *arguments, '--out=exported')
    assert (tmp_path / 'exported/model.safetensors').exists()


def forbid_compiling(monkeypatch):
    monkeypatch.setattr(Lowered, 'compile', lambda *_, **__: pytest.fail('it compiles'))


def forbid_downloading(monkeypatch):
    monkeypatch.setattr(requests, 'get', lambda *_, **__: pytest.fail('it downloads'))


def lines_with_single_spaces(text):
    return [' '.join(line.split()) for line in text.splitlines()]


def test_a_run_is_counted_without_compiling(printed, tmp_path, monkeypatch):
    """A dry run of training prints the cost of the run. Nothing is compiled or written.

    The config `small` trains 3 seeds for 600 steps, each step on 16 rows of 64 tokens.
    """
    forbid_compiling(monkeypatch)

    text = printed('train', '--config=small', '--dry_run')

    tokens_per_step = 3 * 16 * 64
    num_tokens = 600 * tokens_per_step
    flops = 2_752_512 * num_tokens  # FLOPs per token, for forward and backward pass
    # The first four lines describe the config.
    lines_of_cost = lines_with_single_spaces(text)[4:]
    assert lines_of_cost == [
        'parameters 434,816 of each trial',
        'trials 3',
        f'tokens per step {tokens_per_step:,} of all trials',
        'steps 600',
        f'tokens {num_tokens:,} of all trials and steps',
        f'FLOPs {flops:,} of all trials and steps: 5.07e+12',
    ]
    # Only the two files of the fixture `files` are in the directory.
    assert {path.name for path in tmp_path.iterdir()} == {'run.py', 'study.py'}


@pytest.mark.slow
def test_the_arms_of_a_study_are_described_on_a_pod(printed):
    text = printed('ablate', '--config=study.py', '--dry_run=h100-1x2', '--config.base.mesh.data=2')

    table = text.split('\n\n')[1].splitlines()
    # Three lines of header come first. A row begins with a variant, its 3 trials, and the tokens
    # per step: 3 trials * 4 rows * 16 tokens = 192.
    baseline, arm = table[3:5]
    assert baseline.split()[:3] == ['qk/vo', '3', '192']
    assert arm.split()[:3] == ['shared_qk/vo', '3', '192']
    assert 'compiled by XLA for CPU, partitioned over 2 fake devices' in table


@pytest.mark.slow
def test_a_config_is_described_on_a_pod_that_is_not_there(printed, tmp_path):
    """A dry run for a pod of TPUs prints how much memory a run needs, without any TPU.

    v5e-2x4 is a pod of 2 x 4 TPU chips, here replaced by fake CPU devices. The config `small` has 3
    trials.
    """
    smaller = ('--config.model.num_layers=1', '--config.train.lifting=map')
    pod = ('--dry_run=v5e-2x4', '--config.mesh.data=8')

    text = printed('train', '--config=small', *pod, *smaller)

    lines = lines_with_single_spaces(text)
    assert lines[0] == 'v5e-2x4: 8 TPU chips'
    num_parameters = 237_952  # of `small` with one layer
    num_bytes = 3 * 4 * num_parameters  # 3 trials in float32
    assert f'parameters {num_parameters:,} of 3 trials each' in lines
    assert f'parameters {num_bytes:,} 2.72 MiB' in lines

    # A chip of a TPU v5e has 16 GiB of memory (HBM).
    hbm_bytes = 16 * 2**30
    assert any(line.startswith(f'HBM per device {hbm_bytes:,} 16.00 GiB,') for line in lines)

    # Nothing is written. Only the two files of the fixture `files` are in the directory.
    assert {path.name for path in tmp_path.iterdir()} == {'run.py', 'study.py'}


@pytest.fixture
def generate(printed, run):
    """Generates text with the model of run/."""

    def generated(*flags, num_tokens=12):
        return printed('generate', '--source=run', f'--num_tokens={num_tokens}', *flags)

    return generated


def test_a_run_writes_a_document_by_default(script_here, generate):
    done = script_here('generate', 'run')

    assert done.stderr.splitlines()[-1] == (
        'run: qk/vo, step 12, trial 0 of 2 (seed=0 learning_rate=0.01 weight_decay=0.0005)'
    )
    # The context of 16 holds the separator and 15 tokens, from which a 16th token is predicted.
    assert done.stdout == generate('--temperature=0.8', num_tokens=16)
    assert done.stdout.strip()


def test_a_run_continues_a_prompt(generate):
    prompt = '--prompt=def f'
    text = generate(prompt, '--seed=5')

    assert text.startswith('def f')
    assert len(text.encode()) > len('def f\n')
    assert generate(prompt, '--seed=5', '--trial=1') != text
    assert generate(prompt) != text  # with seed 0


def test_a_run_continues_a_prompt_of_token_ids(generate):
    ids = generate('--prompt_tokens=100 101 102 32 102').split()
    assert len(ids) == 12


def test_a_converted_run_generates_the_same_text(refusal, printed, run):
    """A model whose W_Q and W_K are merged into one matrix generates the same text.

    The run has two models. The second one, trial 1, is converted and written to merged/.
    """
    convert = ('convert', '--source=run', '--trial=1', '--apply=merge', '--out=merged')
    text = printed(*convert)

    # The variant is now merged/vo instead of qk/vo. Only rounding changes the logits.
    assert 'merge: merged/vo, largest relative logit change' in text
    text_after = text.split('logit change ')[1]
    logit_change = float(text_after.split()[0])
    assert logit_change < 1e-4
    assert 'without optimizer state' in text

    # At temperature 0, a model always takes the most likely token.
    data = f'--data={run.config.data.name}'
    greedy = ('--prompt=def f(', '--num_tokens=10', '--temperature=0', data)
    text_of_run = printed('generate', '--source=run', '--trial=1', *greedy)
    assert printed('generate', '--source=merged', *greedy) == text_of_run

    # The same conversion does not overwrite merged/.
    assert '--out=merged is not empty' in refusal(*convert)

    # merged/ records that it comes from trial 1. So `analyze` compares it with trial 1 of run/.
    text = printed('analyze', '--source=merged', '--reference=run')
    assert 'drift from run, trial 1: qk/vo\n' in text


def test_a_conversion_without_out_is_described(printed, run):
    text = printed('convert', '--source=run', '--apply=truncate(rank=2)')
    assert 'layer 0: truncate(rank=2) leaves out' in text
    assert 'wrote' not in text


def test_only_a_truncation_of_the_package_leaves_out_the_least(printed, tmp_path, monkeypatch):
    """A lossy conversion from outside may leave out more than the smallest singular values."""

    def forget(layer):
        return layer, 0.5

    conversion = Conversion(forget, 'QK', lossy=True)
    monkeypatch.setattr(gauge_fixing, 'FORGET', conversion, raising=False)
    save_model(tmp_path / 'source', ModelConfig(d_model=16, num_layers=1, context=8))

    text = printed('convert', 'source', '--apply=examples.gauge_fixing:FORGET')

    # The line ends after the error that `forget` returned.
    assert 'FORGET leaves out 5.000e-01 of the norm of the matrices\n' in text


def test_a_conversion_that_does_not_fit_is_refused(refusal, run):
    sentence = refusal('convert', '--source=run', '--apply=merge', '--apply=unmerge(rank=1)')
    assert 'unmerge(rank=1) cannot be applied: layer 0' in sentence


def test_a_run_written_for_transformers_generates_the_same_text(printed, run, tmp_path):
    """A run exported in the GPT-2 format of the package transformers generates the same text."""
    text = printed('convert', 'run', '--layout=transformers', '--out=gpt2')

    assert text.splitlines()[-1] == 'wrote gpt2, a GPT-2 in the layout of transformers'
    files = {path.name for path in (tmp_path / 'gpt2').iterdir()}
    assert files == {
        'model.safetensors',
        'config.json',
        'tokenizer.json',
        'tokenizer_config.json',
    }

    # At temperature 0, a model always takes the most likely token.
    greedy = ('--prompt=def f(', '--num_tokens=10', '--temperature=0')
    text_of_gpt2 = printed('generate', 'gpt2', *greedy, f'--data={run.config.data.name}')
    text_of_run = printed('generate', 'run', *greedy)
    assert text_of_gpt2 == text_of_run

    # The tokenizer of a run comes from its recorded data. gpt2/ does not record its data.
    text = printed('convert', 'gpt2', '--layout=transformers', '--out=again')
    assert text.splitlines()[-1].startswith('without tokenizer.json: the source is not a run')


@pytest.mark.parametrize(
    ('conversion', 'message'),
    [
        ('merge_vo', 'merge_vo cannot be applied: it changes logits by '),
        ('fold_gains', 'fold_gains cannot be applied: in a post-norm model'),
    ],
)
def test_an_exact_conversion_that_changes_logits_writes_nothing(
    refusal, tmp_path, monkeypatch, conversion, message
):
    """A conversion that should keep the logits is refused if it would change them.

    fold_gains moves the gains of norms into matrices, which changes the logits of a post-norm
    model.
    """

    def double_w_o(layer):
        """Replaces merge_vo by a faulty conversion, which doubles W_O."""
        layer.value.w_o_NHD[...] *= 2
        return layer

    monkeypatch.setitem(CONVERSIONS, 'merge_vo', Conversion(double_w_o, 'OV'))
    sizes = {'d_model': 16, 'num_layers': 1, 'context': 8, 'vocab_size': 20}
    save_model(tmp_path / 'source', ModelConfig(norm_position='post', **sizes))

    # The first conversion, merge, is exact here. The second one is refused.
    conversions = ('--apply=merge', f'--apply={conversion}')
    sentence = refusal('convert', '--source=source', *conversions, '--out=no')

    assert message in sentence
    assert not (tmp_path / 'no').exists()


def test_a_run_is_analyzed_on_its_own_data(printed, run):
    text = printed('analyze', 'run')
    assert text.startswith('run, trial 0: qk/vo, 1 layer\n')
    assert 'attention 0' in text
    assert 'drift' not in text


def test_a_run_is_analyzed_on_a_text(refusal, printed, run, tmp_path):
    """`analyze` measures the attention of a model with one layer, and writes numbers and figures.

    A[n] is the matrix of the logits of head n, and B[n] is the matrix of its output. Drift is the
    distance of a matrix from the same matrix in the reference model.
    """
    flags = ('--text=def f(x):', '--trial=1', '--reference=run', '--out=out')
    text = printed('analyze', '--source=run', *flags)

    # Both files have the same rows. The run was trained for 12 steps.
    out = tmp_path / 'out'
    table = pd.read_csv(out / 'analysis.csv')
    analysis = read_json(out / 'analysis.json', {})
    assert len(table) == len(analysis['rows'])
    assert analysis['step'] == 12
    assert analysis['trial'] == 1

    # The run is its own reference, so its matrices do not drift.
    values = {key: rows['value'] for key, rows in table.groupby(['quantity', 'subject'])}
    assert (values['drift', 'A'] == 0).all()
    assert (values['drift', 'B'] == 0).all()

    # The last line names the directory. The line above is the layer's row of a table.
    # The row shows means over heads. Only the induction score is the maximum over heads.
    printed_row = text.splitlines()[-2].split()
    for number in (
        values['effective_rank', 'A'].mean(),
        values['entropy', 'pattern'].mean(),
        values['induction_score', 'pattern'].max(),
    ):
        assert f'{number:.3g}' in printed_row

    figures = {path.stem for path in out.glob('*.png')}
    assert figures == {
        'singular_values_A',
        'singular_values_B',
        'heads_A',
        'heads_B',
        'heads_pattern',
        'maps',
    }

    # A second analysis does not overwrite the first.
    assert 'already holds an analysis' in refusal('analyze', '--source=run', '--out=out')


SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'context': 12, 'vocab_size': 257}


@pytest.mark.slow
def test_a_score_that_is_not_bilinear_is_analyzed(printed, tmp_path):
    save_model(tmp_path / 'nonlinear', ModelConfig(score='nonlinear_query', **SIZES))
    text = printed('analyze', '--source=nonlinear', '--tokens=1 2 3')
    assert 'attention 0, attention 1: not bilinear, so there is no matrix A[n]' in text


@pytest.mark.slow
def test_an_encoder_decoder_is_analyzed(printed, tmp_path):
    save_model(tmp_path / 'pair', ModelConfig(kind='encoder_decoder', **SIZES))
    text = printed('analyze', 'pair', '--out=pair_out')
    assert 'cross_attention 1' in text
    assert 'encoder/attention 0' in text
    assert (tmp_path / 'pair_out/singular_values_A_cross.png').exists()


@pytest.mark.slow
def test_a_published_gpt2_is_analyzed_without_data(printed, tmp_path):
    """Without a text, `analyze` omits quantities that need one, such as the entropy of patterns."""
    write_gpt2(tmp_path / 'gpt2', make_tensors())
    text = printed('analyze', 'gpt2')
    assert 'induction' in text
    assert 'entropy' not in text


@pytest.mark.slow
def test_prepared_tokens_are_trained_on(printed, tiny, tmp_path):
    """`prepare_data` turns texts into a directory of tokens, and a run trains on this directory.

    Training and generating leave the directory unchanged.
    """
    # files/ has the texts of three splits.
    write_texts(tmp_path / 'files')
    data = ('--config.data.name=text', '--config.data.path=files')
    tokenizer = '--config.data.tokenizer=characters'
    tokens_path = tmp_path / 'prepared'

    text = printed('prepare_data', '--config=run.py', '--out=prepared', *data, tokenizer)

    # The last line is the command that trains on the tokens.
    settings_of_tokens = '--config.data.name=tokens --config.data.path=prepared'
    assert text.splitlines()[-1] == (
        f'to train: qkattn train --config=run.py {settings_of_tokens} --workdir=DIRECTORY'
    )

    # Training needs no data cache, so `data_dir` may be a directory that does not exist.
    files_before = contents(tokens_path)
    data = {'name': 'tokens', 'path': 'prepared', 'data_dir': '/absent'}
    result, _ = train(tiny(data=data, model={'num_layers': 1}), tmp_path / 'run')
    assert contents(tokens_path) == files_before

    # The result has the fingerprints and the tokenizer of tokens.json.
    index = json.loads(files_before['tokens.json'])
    fingerprints = {split: info['fingerprint'] for split, info in index['splits'].items()}
    assert result['data']['fingerprints'] == fingerprints
    assert result['data']['tokenizer'] == index['tokenizer_name']

    # Bits per byte need the length of the texts in bytes, which the token files record.
    assert result['val_bits_per_byte'] > 0
    # `unigram_loss` is the loss of a model that knows only the frequency of each token.
    # With more than ten different characters, this loss is above 1 nat per token.
    assert result['data']['unigram_loss'] > 1

    text = printed('generate', 'run', '--prompt=train ', '--num_tokens=8')
    assert text.startswith('train ')
    assert contents(tokens_path) == files_before


def test_the_one_document_of_a_split_is_counted_in_the_singular(printed, tmp_path):
    """A text file is cut into three splits of one document each. The tokens are its bytes."""
    (tmp_path / 'book.txt').write_text('nine letters\n' * 100)
    data = ('--config.data.name=text', '--config.data.path=book.txt')
    text = printed('prepare_data', '--config=run.py', '--out=prepared', *data)
    # A line has 13 bytes. The test split is the last 4 lines and a separator.
    assert 'test: 53 tokens, 1 document, 53 bytes' in text


SMALL = (
    'model.num_layers=1 model.num_heads=2 model.d_model=16 model.context=16 '
    'optimizer.warmup_steps=2 train.num_steps=5 train.batch_size=4 train.steps_per_dispatch=5 '
    'train.log_every=5 train.eval_every=5 train.checkpoint_every=5 train.lifting=map '
    'data.eval_sequences=4'
)
SETTINGS_OF_TOKENS = [
    'data.tokenizer=characters',
    'data.tokenizer=bpe data.tokenizer_size=300 data.lowercase=True',
    'data.tokenizer=nibbles:Nibbles(high_first=False)',
    'model.kind=encoder',
    'model.vocab_size=512',
]


@pytest.mark.parametrize(
    'settings',
    slow_except(
        ['data.tokenizer=bpe data.tokenizer_size=300 data.lowercase=True'], SETTINGS_OF_TOKENS
    ),
)
def test_the_command_that_prepare_data_prints_trains(printed, outside, tmp_path, settings):
    """The command that `prepare_data` prints last trains a model on the prepared tokens.

    The command ends with --workdir=DIRECTORY, where a user would insert a path. The test runs the
    command unchanged, because the word DIRECTORY is also a valid path.
    """
    # The config own.py has the settings in `SMALL` and in `settings`.
    write_texts(tmp_path / 'my files')
    lines = ''
    for setting in [*SMALL.split(), 'data.name=text', *settings.split()]:
        name, value = name_and_literal(setting)
        lines += f'    config.{name} = {value}\n'
    (tmp_path / 'own.py').write_text(OWN_CONFIG.format(lines=lines))

    # The printed command has to quote the names with spaces.
    flags = ('--config=own.py', '--config.data.path=my files', '--out=my tokens')
    last_line = printed('prepare_data', *flags).splitlines()[-1]

    assert last_line.startswith('to train: ')
    command, script, *arguments = shlex.split(last_line.removeprefix('to train: '))
    assert command == 'qkattn'
    assert script == 'train'
    assert arguments[-1] == '--workdir=DIRECTORY'
    assert 'validation loss' in printed('train', *arguments)


OWN_CONFIG = """
from qkattn.config import Config, to_config_dict

def get_config():
    config = to_config_dict(Config())
{lines}    return config
"""


def name_and_literal(setting):
    """Splits a setting into its name and the Python literal of its value.

    For example, 'data.name=text' becomes ('data.name', "'text'").
    """
    name, _, value = setting.partition('=')
    is_literal = value.isdecimal() or value == 'True'
    return name, value if is_literal else repr(value)


def test_explore_prints_the_worked_equations_of_a_variant(printed):
    pytest.importorskip('sympy', reason="pip install -e '.[explore]'")
    expected = worked(Bench('shared_qk/no_vo'))
    assert printed('explore', '--variant=shared_qk/no_vo') == expected


def test_the_package_that_explore_needs_is_named(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sympy', None)  # makes its import fail
    sympy.cache_clear()
    sentence = refusal('explore', '--variant=qk/vo')
    sympy.cache_clear()
    assert sentence == "explore needs the package sympy: pip install -e '.[explore]'"


NOT_PREPARED = [
    'name=tiny_shakespeare',
    'name=tfds:lm1b',
    'name=hf:owner/set',
    'name=tokens path=absent',
]


@pytest.mark.parametrize('data', slow_except(NOT_PREPARED[:1], NOT_PREPARED))
def test_a_dry_run_says_that_data_are_not_prepared_here(printed, tmp_path, monkeypatch, data):
    """A dry run of a study warns about missing data, and does not download or prepare the data.

    `data` is a string of data settings, such as 'name=tokens path=absent'.
    """
    forbid_downloading(monkeypatch)
    # The cache of prepared data is a directory that does not exist.
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'data'))
    flags = [f'--config.base.data.{setting}' for setting in data.split()]

    text = printed('ablate', '--config=study.py', '--dry_run', *flags)

    warning = 'WARNING data are not checked, as they are not prepared on this machine: '
    assert warning in text
    assert not (tmp_path / 'data').exists()


def test_a_dry_run_says_that_a_further_corpus_is_not_prepared(printed, data_dir, monkeypatch):
    """The training data stdlib are prepared, but the further corpus tiny_shakespeare is not."""
    forbid_downloading(monkeypatch)
    monkeypatch.setenv('QKATTN_DATA', data_dir)
    flags = ('--config.base.data.evaluate=("tiny_shakespeare",)', '--config.base.data.name=stdlib')

    text = printed('ablate', '--config=study.py', '--dry_run', *flags)

    assert "not prepared on this machine: data.evaluate='tiny_shakespeare': " in text


# Studies


@pytest.fixture
def study(tmp_path):
    """The directory study/ in the working directory: a study of the baseline with two seeds.

    Nothing is trained. The records have the true parameter and FLOP counts of their config, because
    `experiments.verify` recomputes these counts.
    """
    config = studies.run_config(studies.trial_record('qk/vo'))
    parameters = cost.count(config.model)
    counts = {
        'parameters': parameters,
        # The baseline has its target number of parameters, so the residual is 0.
        'target_parameters': parameters['total'],
        'residual': 0.0,
        'flops_per_token': cost.flops_per_token(config.model),
        'cache_floats_per_token': cost.cache_floats_per_token(config.model),
    }
    records = [studies.trial_record('qk/vo', seed=seed, **counts) for seed in (0, 1)]
    return studies.write_study(tmp_path / 'study', studies.named_by_hash(records))


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--accept=commits'], "accept=commits needs a reason, why=''"),
        (['--accept=commits,dirty', '--why=x'], "accept='dirty' must be uncommitted or commits"),
        (['--why=x'], "--why='x' is a reason without --accept"),
        (['--accept=commits', '--why=x', '--export=.'], 'holds something other than an export of'),
    ],
)
def test_a_wrong_acceptance_is_refused(study, refusal, flags, message):
    assert message in refusal('report', '--study=study', *flags)
    assert not ledger.read(study / 'ledger.jsonl').accepted


def test_a_study_is_exported_with_what_was_accepted(study, printed):
    """The ledger.jsonl of an exported study records which flaws its author accepted, and why.

    `uncommitted` accepts runs of uncommitted code. `commits` accepts runs of different commits.
    """
    accept = ('--accept=uncommitted,commits', '--why=docs alone differ')
    printed('report', '--study=study', *accept, '--export=exported/study')

    exported_ledger = ledger.read(study.parent / 'exported/study/ledger.jsonl')
    assert exported_ledger.accepted == {
        'uncommitted': 'docs alone differ',
        'commits': 'docs alone differ',
    }

    # Both seeds belong to one run.
    text = printed('verify', '--results=exported', '--pages=')
    assert 'numbers agree with the logs, the costs of 1 run with the configs' in text


@pytest.mark.parametrize('name', ['flops_per_token', 'cache_floats_per_token'])
def test_counts_that_the_config_does_not_give_are_refused(study, refusal, name):
    lines = studies.read_lines(study / 'results.jsonl')
    for line in lines:
        line[name] += 1
    studies.write_lines(study / 'results.jsonl', lines)

    sentence = refusal('verify', '--results=.', '--pages=')

    assert f'has {name} ' in sentence
    assert 'but its config gives' in sentence


def test_an_ablation_trains_what_is_missing(script_here, tmp_path, monkeypatch):
    """If a variant is added to a study, only the new variant is trained.

    The first call trains the baseline qk/vo with three seeds. The second call adds a variant from a
    module outside the package.
    """
    flags = ('--config=study.py', '--workdir=out', '--workers=1')
    group_may_write = 0o002  # umask: the group may write new files, other users may not
    with umask(group_may_write):
        first = script_here('ablate', *flags, '--config.variants=("qk/vo",)')

    # The log of Orbax, the library that saves checkpoints, is not shown.
    assert first.returncode == 0, first.stderr
    assert 'orbax' not in first.stderr
    assert 'Traceback' not in first.stderr

    # All files have the mode that follows from the umask.
    out = tmp_path / 'out'
    assert not other_modes(out, group_may_write)

    # One run has trained all three seeds.
    baseline_trials = [('qk/vo', 0), ('qk/vo', 1), ('qk/vo', 2)]
    assert variants_and_seeds(out) == baseline_trials
    (result_of_baseline,) = out.glob('runs/*/result.json')
    time_of_baseline = result_of_baseline.stat().st_mtime_ns

    variant = outside_variant(tmp_path, monkeypatch)
    second = script_here('ablate', *flags, f'--config.variants=("qk/vo", "{variant}")')
    assert second.returncode == 0, second.stderr

    # The baseline was not trained again: its result is unchanged, and it was started once.
    assert result_of_baseline.stat().st_mtime_ns == time_of_baseline
    provenance = read_json(result_of_baseline.with_name('provenance.json'), {})
    assert len(provenance['starts']) == 1

    # results.jsonl has the trials of both variants.
    variant_trials = [(variant, 0), (variant, 1), (variant, 2)]
    assert variants_and_seeds(out) == baseline_trials + variant_trials
    results = studies.read_lines(out / 'results.jsonl')
    for result in results:
        assert result['status'] == 'finished'
        assert result['data']['fingerprints']
    # The machine is named in provenance.json of a run, but not in results.jsonl.
    assert 'hostname' not in results[0]['provenance']
    assert_reported(out, second.stdout, variant)


@pytest.mark.slow
def test_two_workers_share_an_ablation(script_here, tmp_path):
    """Two processes share the runs of a study, and each run is trained once.

    The config study.py defines a study named `small`. Its variants are qk/vo and shared_qk/vo, with
    three seeds each.
    """
    completed = script_here('ablate', '--config=study.py', '--workdir=out', '--workers=2')

    assert completed.returncode == 0, completed.stderr
    assert 'small: workers on this machine: 2' in completed.stderr
    out = tmp_path / 'out'
    baseline_trials = [('qk/vo', 0), ('qk/vo', 1), ('qk/vo', 2)]
    shared_trials = [('shared_qk/vo', 0), ('shared_qk/vo', 1), ('shared_qk/vo', 2)]
    assert variants_and_seeds(out) == baseline_trials + shared_trials

    # provenance.json lists all starts of a run. Here each run has one.
    for path in out.glob('runs/*/provenance.json'):
        provenance = read_json(path, {})
        assert len(provenance['starts']) == 1
    assert_reported(out, completed.stdout, 'shared_qk/vo')


def variants_and_seeds(study):
    """The variant and the seed of each result of a study."""
    results = studies.read_lines(study / 'results.jsonl')
    return [(result['variant'], result['trial']['seed']) for result in results]


def outside_variant(directory, monkeypatch):
    """Makes the example module of the README importable, and returns the name of its variant."""
    code = between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')
    (directory / 'signed_diagonal.py').write_text(code)
    monkeypatch.syspath_prepend(directory)
    return 'signed_diagonal:SignedDiagonal/vo'


def assert_reported(study, printed, variant):
    """Asserts that the report is written, and printed in lines of at most 100 characters."""
    assert (study / 'report.html').stat().st_size > 10_000
    assert variant in printed
    assert 'report:' in printed
    report = printed.split('study small')[1].split('all columns')[0]
    for line in report.splitlines():
        assert len(line) <= 100


# The columns are 2 runs, 6 trials, and tokens:
# 2 variants * 3 seeds * 40 steps * 4 rows * 16 tokens = 15,360 = 1.54e+04
TOTAL = r'\ntotal +2 +6 +1.54e\+04 +\S+'


def assert_only_configs(directory):
    """Asserts that a dry run has written no files, except the bytecode of the configs."""
    names = {path.name for path in directory.iterdir() if path.suffix != '.py'}
    assert names <= {'__pycache__'}


def test_a_dry_run_writes_and_compiles_nothing(printed, tmp_path, monkeypatch):
    forbid_compiling(monkeypatch)
    text = printed('ablate', '--config=study.py', '--dry_run')
    assert 'small: 2 arms' in text
    assert 'residual' in text
    assert re.search(rf'{TOTAL}\n', text)
    assert_only_configs(tmp_path)


def test_an_ablation_prints_its_cost_before_it_trains(printed, monkeypatch):
    def start(study, workdir, *_):
        print('training starts')
        return workdir

    monkeypatch.setattr('qkattn.study.local_workers.run', start)
    monkeypatch.setattr('qkattn.report.show_report', lambda _: 'a report')

    text = printed('ablate', '--config=study.py', '--workdir=out')

    before_training, _, _ = text.partition('training starts')
    assert re.search(rf'{TOTAL}\n', before_training)


@pytest.mark.slow
def test_a_dry_run_that_measures_writes_nothing(printed, tmp_path):
    text = printed('ablate', '--config=study.py', '--dry_run', '--measure')
    assert 'small: 2 arms' in text
    assert 'residual' in text
    assert re.search(rf'{TOTAL} +0:00:\d\d\n', text)
    assert_only_configs(tmp_path)


TUNED = (
    '--config.tuning.seeds=(100,)',
    '--config.base.trials.learning_rates=(0.001, 0.002, 0.004)',
    '--config.base.data.eval_sequences=2048',  # enough for the 100 documents of a verdict
)


@pytest.mark.parametrize(
    ('is_dirty', 'flags', 'is_warned'),
    [
        pytest.param(True, TUNED, True, id='tuned, uncommitted'),
        pytest.param(False, TUNED, False, id='tuned, committed', marks=pytest.mark.slow),
        pytest.param(True, (), False, id='untuned, uncommitted', marks=pytest.mark.slow),
    ],
)
def test_a_tuned_study_of_uncommitted_code_has_a_warning(
    script_here, monkeypatch, is_dirty, flags, is_warned
):
    monkeypatch.setattr(run_directory, 'git_state', lambda: {'dirty': is_dirty})

    done = script_here('ablate', '--config=study.py', '--dry_run', *flags)

    assert done.returncode == 0, done.stderr
    warning = 'files are changed or untracked, which withholds verdicts'
    assert (warning in done.stderr) == is_warned


# Translation


class Translator(NamedTuple):
    """A finished run and the results of its trials."""

    path: Path
    results: list[dict]


def write_reversed_words(directory):
    """Writes random words (language en) and the reversed words (language xx): BAD becomes dab.

    The files are train.en, train.xx, validation.en and validation.xx, with one word per line. Words
    have 2 to 5 letters from a to h. The validation files have 100 words.
    """
    rng = np.random.default_rng(0)
    letters = list('abcdefgh')
    different_words = set()
    for _ in range(4000):
        length = rng.integers(2, 6)
        word = ''.join(rng.choice(letters, length))
        different_words.add(word)
    words = sorted(different_words)
    rng.shuffle(words)

    splits = {'validation': words[:100], 'train': words[100:]}
    for split, words_of_split in splits.items():
        upper_case_words = [word.upper() for word in words_of_split]
        reversed_words = [word[::-1] for word in words_of_split]
        (directory / f'{split}.en').write_text('\n'.join(upper_case_words))
        (directory / f'{split}.xx').write_text('\n'.join(reversed_words))


# Sections of the config of `translator`, without its data.
TRANSLATOR_CONFIG = {
    'model': {'kind': 'encoder_decoder', 'num_layers': 1, 'vocab_size': 16, 'scan_unroll': 1},
    'optimizer': {'warmup_steps': 2},
    'train': {
        'num_steps': 100,
        'steps_per_dispatch': 50,
        'log_every': 50,
        'eval_every': 100,
        'checkpoint_every': 100,
        'batch_size': 32,
        'accumulation': 1,
        'lifting': 'vmap',
    },
    # Each learning rate is a trial. The second rate is too low to learn anything.
    'trials': {'seeds': (0,), 'learning_rates': (1e-2, 1e-6), 'weight_decays': (0.0,)},
    'decode': {'beam': 2},
}


@pytest.fixture(scope='session')
def translator(tiny, tmp_path_factory):
    """A finished run that translates a word by reversing it: bad becomes dab.

    The first trial has learned this. The second trial has learned nothing, because its learning
    rate is 1e-6.
    """
    path = tmp_path_factory.mktemp('translate')
    write_reversed_words(path)
    data = {
        'name': 'parallel',
        'path': str(path),
        'languages': 'en-xx',
        'eval_sequences': 64,
        'data_dir': str(path / 'cache'),
        'tokenizer': 'characters',
        'lowercase': True,
    }
    config = tiny(data=data, **TRANSLATOR_CONFIG)
    results = train(config, path / 'run')
    return Translator(path / 'run', results)


def test_reversal_is_learned_from_files(translator):
    trained, untrained = translator.results
    assert trained['val_exact_match'] >= 0.85
    assert trained['val_chrf'] > 85
    assert trained['val_accuracy'] > 0.85
    assert trained['val_loss'] < 0.3
    assert untrained['val_exact_match'] == 0


def test_a_split_without_files_has_no_results(translator):
    result = translator.results[0]
    assert result['test_loss'] is None
    assert result['test_accuracy'] is None
    assert 'test_bleu' not in result


def test_text_is_translated_line_by_line(printed, translator):
    translate = ('translate', f'--source={translator.path}')
    text = '--text=bad\ncafe'
    assert printed(*translate, text) == 'dab\nefac\n'
    # The second trial has learned nothing.
    assert 'efac' not in printed(*translate, text, '--trial=1', '--beam=1')


def test_a_file_is_translated_line_by_line(printed, translator, tmp_path):
    """Text is lower-cased before it is translated. Lines without words give empty lines."""
    (tmp_path / 'in.en').write_text('\ufeffBAD\n\n   \ncafe')
    output = printed('translate', f'--source={translator.path}', '--file=in.en')
    assert output == 'dab\n\n\nefac\n'


@pytest.mark.parametrize(
    ('content', 'lines'),
    [
        pytest.param(b'bad\rcafe\nfed\n', ['bad\rcafe', 'fed'], id='carriage return'),
        pytest.param(b'bad\r\n\r\ncafe\r\n', ['bad', '', 'cafe'], id='Windows'),
        pytest.param(
            'a\x0bb\x0cc\x1cd\x85e\u2028f'.encode(),
            ['a\x0bb\x0cc\x1cd\x85e\u2028f'],
            id='other separators',
        ),
    ],
)
def test_a_line_ends_at_a_line_feed_alone(
    printed, translator, tmp_path, monkeypatch, content, lines
):
    """Line i of the output is the translation of line i of the file.

    A line of the file ends only at a line feed, or at a carriage return with a line feed. Other
    separators stay within their line.
    """
    translated_lines = []

    def encode(self, text):
        """Replaces the tokenizer's `encode`, and records each line to translate."""
        translated_lines.append(text)
        return [0]

    def decode(self, ids):
        """Makes every translation contain a line feed, which the script prints as a space."""
        return 'x\ny'

    monkeypatch.setattr(Tokenizer, 'encode', encode)
    monkeypatch.setattr(Tokenizer, 'decode', decode)
    (tmp_path / 'in.en').write_bytes(content)

    output = printed('translate', f'--source={translator.path}', '--file=in.en')

    # Empty lines are not translated, but each gives a line of output.
    assert translated_lines == [line for line in lines if line]
    assert output.count('\n') == len(lines)


def test_translate_scores_a_split_as_the_run_did(printed, translator):
    source = f'--source={translator.path}'
    scores = json.loads(printed('translate', source, '--score=validation', '--trial=1'))

    assert scores['split'] == 'validation'
    assert scores['beam'] == 2
    result = translator.results[1]
    for name in ('bleu', 'chrf', 'exact_match', 'num_sentences'):
        assert scores[name] == pytest.approx(result[f'val_{name}'])


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ([], 'must hold at least one sentence'),
        (['--text=a', '--file=in.en'], '--text and --file exclude each other'),
        (['--text=abcdefghabcdefgha'], 'source 1 has 17 tokens, but model.source_context=16'),
        (['--score=test'], '--score=test must be one of train, validation'),
        (['--score=validation', '--text=a'], '--score and --text exclude each other'),
    ],
)
def test_a_wrong_translation_is_one_sentence(refusal, translator, flags, message):
    assert message in refusal('translate', f'--source={translator.path}', *flags)


@pytest.fixture
def run_with_changed_texts(translator):
    """The path of the run `translator`, after the new word zebu was added to its training files."""
    directory = translator.path.parent
    texts = {}
    for name in ('train.en', 'train.xx'):
        texts[name] = (directory / name).read_text()
        (directory / name).write_text(f'{texts[name]}\nzebu')
    yield translator.path
    for name, text in texts.items():
        (directory / name).write_text(text)


def test_a_vocabulary_that_the_run_did_not_have_is_refused(script_here, run_with_changed_texts):
    done = script_here('translate', f'--source={run_with_changed_texts}', '--text=a')
    assert done.returncode == 2
    assert 'was trained with the tokenizer characters-' in done.stderr
