"""The command `qkattn`, which runs the scripts of experiments.

qkattn --help                                                 # lists the commands and the configs
qkattn ablate --config=quickstart --workdir=runs/quickstart   # = python -m experiments.ablate ...
"""

import ast
import importlib.util
import runpy
import sys
import textwrap
from pathlib import Path

from qkattn.jobs import output, signals

# Signals are handled before the imports below, which take seconds.
if __name__ == '__main__' or Path(sys.argv[0]).name == 'qkattn':
    output.escape_unencodable()
    script_name = sys.argv[1] if len(sys.argv) > 1 else ''
    signals.exit_while_starting(script_name)

# `pip install qkattn` does not install the packages of the commands.
if importlib.util.find_spec('ml_collections') is None:
    sentence = "commands need the packages of the laboratory: pip install 'qkattn[lab]'\n"
    output.say(sentence, sys.stderr)
    sys.exit(signals.EXIT_CONFIG)

from absl import flags

from qkattn import __version__
from qkattn.jobs import cli

# The width of the column of names in the help.
_NAME_WIDTH = 26


def main() -> None:
    """Runs a script of experiments: `qkattn train --flag` runs experiments/train.py with --flag.

    Without arguments or with --help, prints the help. With --version, prints the version.
    """
    scripts = cli.shipped('experiments')
    command, *arguments = sys.argv[1:] or ['--help']
    if command in ('--version', '--help', '-h', 'help'):
        text = __version__ if command == '--version' else _help(scripts)
        # The reader may close the pipe early, as in `qkattn --help | head`.
        with output.exit_if_reader_gone():
            print(text)
        return
    if command not in scripts:
        cli.exit_with(f'unknown command {command!r}; known: {", ".join(scripts)}')

    sys.argv = [f'qkattn {command}', *arguments]
    # Settings may name code in the working directory. Python's option -P (safe_path) forbids it.
    if not sys.flags.safe_path:
        sys.path.insert(0, '')
    # Scripts import each other as `experiments.NAME`.
    experiments_directory = scripts['train'].parent
    sys.path.append(str(experiments_directory.parent))
    runpy.run_path(str(scripts[command]), run_name='__main__')


def _help(scripts: dict[str, Path]) -> str:
    """Returns the help: the name and first docstring line of each command and config."""
    configs_title = 'configs, as --config=NAME; --config=FILE.py is one of your own'
    files_by_title = {'commands': scripts, configs_title: cli.shipped_configs()}
    lines = ['usage: qkattn COMMAND [--FLAG=VALUE ...]; qkattn COMMAND --help lists the flags']
    for title, files in files_by_title.items():
        lines.append(f'\n{title}')
        for name, path in files.items():
            # Parsing the files is faster than importing them.
            module = ast.parse(path.read_text('utf-8'))
            docstring = ast.get_docstring(module) or ''
            first_line = docstring.partition('\n')[0]
            lines += textwrap.wrap(
                f'  {name:<{_NAME_WIDTH}} {first_line}',
                flags.get_help_width(),
                subsequent_indent=' ' * (_NAME_WIDTH + 3),
                break_on_hyphens=False,
            )
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
