"""Evaluates a language model on tasks of EleutherAI's lm-evaluation-harness.

python -m experiments.evaluate runs/small --tasks=arc_easy --out=runs/arc.json
python -m experiments.evaluate runs/small --task_dir=tasks --tasks=my_task

The source is any that experiments.convert reads; of a run, the newest checkpoint and the first
trial that has not diverged are used. The tokenizer is that of the run's data, or that of --data for
a source without data. Needs the extra: pip install -e '.[evaluate]'. Tasks of the harness download
their data and may run code of their authors; those of --task_dir are YAML files of your own.
"""

import contextlib
import difflib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from absl import flags

from qkattn.config import to_json
from qkattn.config.imports import load_extra
from qkattn.convert import loading
from qkattn.data.corpora.corpus import explain_read_errors
from qkattn.decode.harness import for_harness
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.model import Decoder, Encoder
from qkattn.storage.files import as_path, make_directory, write_atomic
from qkattn.train.program_cache import keep_programs

log = logging.getLogger('qkattn.evaluate')

SOURCE = cli.define_path('source', None, 'Model to evaluate; --source= may be left out.')
TASKS = flags.DEFINE_list('tasks', [], 'Tasks or groups of tasks, by name.')
TASK_DIR = cli.define_path('task_dir', None, 'Directory of tasks of your own, as YAML files.')
DATA = cli.define_data()
TRIAL = cli.define_trial()
IMPORTS = cli.define_imports()
NUM_FEWSHOT = flags.DEFINE_integer(
    'num_fewshot', None, 'Examples before each question; default: as the task says.', lower_bound=0
)
LIMIT = flags.DEFINE_integer(
    'limit', None, 'Questions of each task, the first ones; default: all.', lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer('batch_size', 32, 'Texts of a batch.', lower_bound=1)
OUT = cli.define_path('out', None, 'JSON file for the results.')

# Bootstrap samples for standard errors without a formula, e.g. of perplexity.
BOOTSTRAP_DRAWS = 1000


def main() -> None:
    """Scores a decoder on --tasks; prints tables, and writes the results to --out as JSON."""
    keep_programs()
    if not TASKS.value:
        raise ConfigError('--tasks=NAME,... is required, e.g. --tasks=lambada_openai')
    out = None if OUT.value is None else checked_file(cli.required(OUT))
    source = loading.load(cli.required(SOURCE), imports=IMPORTS.value)
    trial = source.check_trial(TRIAL.value)
    model = source.models[trial]
    if not isinstance(model, Decoder) or isinstance(model, Encoder):
        raise ConfigError(
            f'--source={SOURCE.value} is a model of kind {model.config.kind!r}; only a decoder '
            'scores and continues texts'
        )
    utils = load_extra('lm_eval.utils', 'evaluate')
    tokenizer = loading.tokenizer_for(source, DATA.value, '--data=FILE of its tokenizer')
    if source.config is not None:
        log.info('%s', source.state(trial))
    harness_model = for_harness(model, tokenizer, batch_size=BATCH_SIZE.value)
    results = evaluated(harness_model)
    model_and_source = {
        'source': str(source.path),
        'trial': trial,
        'step': source.step,
        'diverged': not source.alive[trial],
        'model': to_json(model.config),
        'tokenizer': tokenizer.name,
    }
    print(utils.make_table(results))
    if results.get('groups'):
        print(utils.make_table(results, 'groups'))
    if out is not None:
        content = {'qkattn': model_and_source, **results}
        text = json.dumps(content, default=utils.handle_non_serializable)
        write_atomic(out, text + '\n')
        print(f'wrote {out}')


def checked_file(path: str) -> Path:
    """Returns the path of --out, where a new file must be writable."""
    file = as_path(path)
    if file.exists():
        raise ConfigError(f'--out={file} exists; give another file')
    make_directory(file.parent, name='the directory of --out')
    return file


def evaluated(model: Any) -> dict[str, Any]:
    """Returns the harness's results for --tasks, without samples."""
    evaluator = load_extra('lm_eval.evaluator', 'evaluate')
    # Forks may hang, because JAX is multithreaded.
    os.environ['DISABLE_MULTIPROC'] = '1'
    # The harness prints its progress, but standard output is for the results.
    with contextlib.redirect_stdout(sys.stderr):
        manager, tasks = loaded_tasks()
        return evaluator.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=NUM_FEWSHOT.value,
            batch_size=BATCH_SIZE.value,
            limit=LIMIT.value,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=False,
        )


def loaded_tasks() -> tuple[Any, list[Any]]:
    """Returns the harness's task manager, and the tasks and groups that --tasks names.

    Raises:
        ConfigError: A name is unknown, data cannot be read, or a task runs code written by the
            model.
    """
    manager = manager_of_tasks()
    for name in TASKS.value:
        if name not in manager.all_tasks:
            close_names = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f'; did you mean {close_names[0]}?' if close_names else ''
            raise ConfigError(
                f'--tasks={name} is no task of the harness or of --task_dir={TASK_DIR.value}{hint}'
            )
    advice = 'data of tasks are downloaded, or files that a task in --task_dir names'
    # The harness and its data library raise exceptions of any kind.
    with explain_read_errors(f'--tasks={",".join(TASKS.value)}', advice, Exception):
        loaded = manager.load(TASKS.value)
    for name, task in loaded['tasks'].items():
        if getattr(task, 'UNSAFE_CODE', False):
            raise ConfigError(f'--tasks={name} runs code written by the model, which is refused')

    # A group includes its members, which are also loaded on their own.
    members: set[str] = set()
    for names in loaded['group_map'].values():
        members.update(names)
    task_by_name = loaded['groups'] | loaded['tasks']
    return manager, [task for name, task in task_by_name.items() if name not in members]


def manager_of_tasks() -> Any:
    """Returns the harness's task manager, which knows the tasks of --task_dir.

    Unless these are all that --tasks names, it also knows the harness's own tasks.
    """
    tasks = load_extra('lm_eval.tasks', 'evaluate')
    directory = TASK_DIR.value
    if directory is not None:
        if not as_path(directory).is_dir():
            raise ConfigError(f'--task_dir={directory} is no directory; give one of YAML files')
        manager_of_directory = tasks.TaskManager(include_path=directory, include_defaults=False)
        are_all_in_directory = set(TASKS.value) <= set(manager_of_directory.all_tasks)
        if are_all_in_directory:
            return manager_of_directory
    # This also reads the files of all tasks of the harness, which takes half a minute.
    return tasks.TaskManager(include_path=directory)


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)
