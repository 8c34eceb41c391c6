"""Tasks of lm-evaluation-harness that lie in files, against log-likelihoods of plain code."""

import json
import math
import sys

import jax
import numpy as np
import pytest

from qkattn.convert import loading

REASON = "pip install -e '.[evaluate]'"

CHOICES = """
task: own_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DIRECTORY/choices.json}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXTS = """
task: own_texts
dataset_path: json
dataset_kwargs: {data_files: {test: DIRECTORY/short.json}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
LAST_WORDS = """
task: own_last_words
dataset_path: json
dataset_kwargs: {data_files: {test: DIRECTORY/texts.json}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{text[:5]}}"
doc_to_target: "{{text[5:8]}}"
target_delimiter: ""
metric_list: [{metric: perplexity}]
"""
COPIES = """
task: own_copies
dataset_path: json
dataset_kwargs: {data_files: {test: DIRECTORY/copies.json}}
output_type: generate_until
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{continuation}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    {'question': 'def f(', 'choices': ['x):', '):', 'class'], 'answer': 0},
    {'question': 'import ', 'choices': ['os', 'zz zz'], 'answer': 1},
    {'question': 'return', 'choices': [' x', ' (', '\n'], 'answer': 1},
]
SHORT_DOCUMENT = {'text': 'import os'}
DOCUMENTS = [{'text': 'def f(x):\n    return x + 1  # one more'}, SHORT_DOCUMENT]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The directory tasks/ with four tasks of lm-evaluation-harness and their data.

    The tasks are own_choices, own_texts, own_last_words and own_copies. Only the data of
    own_copies, copies.json, are missing. `write_copies` adds this file.
    """
    datasets = pytest.importorskip('datasets', reason="pip install -e '.[datasets]'")
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    directory = tmp_path / 'tasks'
    directory.mkdir()
    (directory / 'choices.json').write_text(json.dumps(QUESTIONS))
    (directory / 'texts.json').write_text(json.dumps(DOCUMENTS))
    (directory / 'short.json').write_text(json.dumps([SHORT_DOCUMENT]))

    # Each text defines a task in YAML, with the path of its data.
    for number, task in enumerate((CHOICES, TEXTS, LAST_WORDS, COPIES)):
        task_with_path = task.replace('DIRECTORY', str(directory))
        (directory / f'task{number}.yaml').write_text(task_with_path)
    return directory


@pytest.fixture
def run(small_run, tmp_path):
    """The path of a finished run. The working directory has a link to the run: run/."""
    (tmp_path / 'run').symlink_to(small_run.path)
    return small_run.path


class OneTokenAtATime:
    """Computes log-likelihoods and greedy text with a run's model, in plain code without a cache.

    To predict a token, the whole model is called on the last tokens that fit into its context.
    """

    def __init__(self, run):
        model = loading.load(run).model
        self.context = model.config.context
        self.forward = jax.jit(lambda tokens_BT: model(tokens_BT))

    def next_log_p(self, tokens):
        """Log-probabilities [V] of the token that follows `tokens`."""
        seen = tokens[-self.context :]
        padding = [0] * (self.context - len(seen))
        tokens_BT = np.array([seen + padding])
        logits_BTV = self.forward(tokens_BT)
        last = len(seen) - 1
        logits_V = np.float64(logits_BTV[0, last])
        return logits_V - np.logaddexp.reduce(logits_V)

    def log_likelihood(self, context, text):
        """log p(text | context) in nats. An empty context means: after the separator, byte 0."""
        tokens = list(context.encode() or b'\0')
        nats = 0.0
        for byte in text.encode():
            nats += self.next_log_p(tokens)[byte]
            tokens.append(byte)
        return nats

    def continuation(self, prompt, num_tokens):
        """The greedy continuation of at most `num_tokens`, cut at a separator or line feed."""
        tokens = list(prompt.encode())
        for _ in range(num_tokens):
            next_token = self.next_log_p(tokens).argmax()
            tokens.append(int(next_token))
        new_tokens = tokens[len(prompt) :]
        text = bytes(new_tokens).decode(errors='replace')
        return text.split('\0')[0].split('\n')[0]


def accuracy_on_questions(plain):
    """The share of questions whose most likely choice is the answer."""
    num_correct = 0
    for row in QUESTIONS:
        scores = [plain.log_likelihood(row['question'], choice) for choice in row['choices']]
        if np.argmax(scores) == row['answer']:
            num_correct += 1
    return num_correct / len(QUESTIONS)


def perplexity_of_last_words(plain):
    """The perplexity of three letters, given the five letters before them."""
    nats = []
    for row in DOCUMENTS:
        text = row['text']
        nats.append(plain.log_likelihood(context=text[:5], text=text[5:8]))
    return math.exp(-np.mean(nats))


def write_copies(file, plain):
    """Writes the data of the task own_copies: two prompts with the expected continuations.

    The model writes the first continuation, but not the second one. So half of them match.
    """
    continuation = plain.continuation('def f(', num_tokens=4)
    copies = [
        {'prompt': 'def f(', 'continuation': continuation},
        {'prompt': 'x', 'continuation': 'another'},
    ]
    file.write_text(json.dumps(copies))


def test_tasks_in_files_have_the_results_of_plain_code(printed, tasks, run, tmp_path):
    """`evaluate` runs tasks of lm-evaluation-harness, with the same results as plain code.

    The tasks are files in the directory tasks/. The plain code predicts one token at a time.
    """
    pytest.importorskip('lm_eval', reason=REASON)
    plain = OneTokenAtATime(run)
    write_copies(tasks / 'copies.json', plain)

    names = ('own_choices', 'own_texts', 'own_last_words', 'own_copies')
    flags = ('--task_dir=tasks', f'--tasks={",".join(names)}', '--out=out/all.json')
    text = printed('evaluate', 'run', *flags)

    for name in names:
        assert name in text
    assert text.splitlines()[-1] == 'wrote out/all.json'

    # The run has a tokenizer of bytes, and was trained for 12 steps.
    evaluation = json.loads((tmp_path / 'out/all.json').read_text())
    assert evaluation['qkattn']['tokenizer'] == 'bytes'
    assert evaluation['qkattn']['step'] == 12

    # The harness names a result 'METRIC,FILTER'. The filter is `none` here.
    results = evaluation['results']
    accuracy = accuracy_on_questions(plain)
    assert results['own_choices']['acc,none'] == pytest.approx(accuracy)

    perplexity = perplexity_of_last_words(plain)
    assert results['own_last_words']['perplexity,none'] == pytest.approx(perplexity, rel=1e-4)

    # bits = nats / ln 2
    short_text = SHORT_DOCUMENT['text']
    bits = -plain.log_likelihood(context='', text=short_text) / math.log(2)
    bits_per_byte = bits / len(short_text.encode())
    assert results['own_texts']['bits_per_byte,none'] == pytest.approx(bits_per_byte, rel=1e-4)

    # The model writes the expected continuation of one of the two prompts.
    assert results['own_copies']['exact_match,none'] == 0.5


def test_a_task_that_cannot_be_evaluated_is_one_sentence(script_here, tasks, run):
    """A task without data ends in one sentence, and so does a task whose text has no tokens."""
    pytest.importorskip('lm_eval', reason=REASON)
    # The data of the task own_choices are removed.
    (tasks / 'choices.json').unlink()
    # The task own_texts gets a text with byte 0, which is reserved for separating documents.
    text_with_separator = {'text': 'a\0b and more'}
    (tasks / 'short.json').write_text(json.dumps([text_with_separator]))

    for task, message in (
        ('own_choices', '--tasks=own_choices cannot be read (FileNotFoundError: '),
        ('own_texts', "the text 'a\\x00b and more' cannot be encoded: text holds byte 0"),
    ):
        completed = script_here('evaluate', 'run', '--task_dir=tasks', f'--tasks={task}')

        assert completed.returncode == 2
        assert 'Traceback' not in completed.stderr
        # The harness shows its progress before the last line.
        assert completed.stderr.splitlines()[-1].startswith(message)


@pytest.mark.slow
def test_an_unknown_task_is_named_with_the_nearest_one(script_here, tasks, run):
    """This test is slow, because the harness reads the names of all its tasks."""
    pytest.importorskip('lm_eval', reason=REASON)
    done = script_here('evaluate', 'run', '--task_dir=tasks', '--tasks=own_choice')
    assert done.returncode == 2
    assert 'Traceback' not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        '--tasks=own_choice is no task of the harness or of --task_dir=tasks; did you mean '
        'own_choices?'
    )


def test_a_missing_package_is_named(refusal, run, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lm_eval.utils', None)  # makes its import fail
    sentence = refusal('evaluate', 'run', '--tasks=arc_easy')
    assert sentence.startswith('evaluate needs the package lm_eval')
    assert sentence.endswith("pip install -e '.[evaluate]'")
