"""The command `qkattn`, or `python -m qkattn`, which runs a script of experiments.

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

# The imports below take seconds, so signals are handled before them.
if __name__ == '__main__' or Path(sys.argv[0]).name == 'qkattn':
    output.escape_unencodable()
    script_name = sys.argv[1] if len(sys.argv) > 1 else ''
    signals.exit_while_starting(script_name)

# `pip install qkattn` without extras does not install the packages of the commands.
if importlib.util.find_spec('ml_collections') is None:
    sentence = "commands need the packages of the laboratory: pip install 'qkattn[lab]'\n"
    output.say(sentence, sys.stderr)
    sys.exit(signals.EXIT_CONFIG)

from absl import flags

from qkattn import __version__
from qkattn.jobs import cli

# Characters of the column of names in the help.
_NAME_WIDTH = 26


def main() -> None:
    """Runs the script that the first argument names, with the other arguments.

    Without arguments, or with --help, it prints the commands and configs instead; with --version
    the version.
    """
    scripts = cli.shipped('experiments')
    name, *arguments = sys.argv[1:] or ['--help']
    if name in ('--version', '--help', '-h', 'help'):
        with output.ending_unread():
            print(__version__ if name == '--version' else _help(scripts))
        return
    if name not in scripts:
        cli.exit_with(f'unknown command {name!r}; known: {", ".join(scripts)}')

    sys.argv = [f'qkattn {name}', *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, '')  # as `python -m` does, for import paths of the working directory
    directory_of_experiments = scripts['train'].parents[1]
    sys.path.append(str(directory_of_experiments))
    runpy.run_path(str(scripts[name]), run_name='__main__')


def _help(scripts: dict[str, Path]) -> str:
    """Returns the names of commands and configs, with the first line of each one's docstring.

    The files are parsed, not imported.
    """
    files_by_title = {
        'commands': scripts,
        'configs, as --config=NAME; --config=FILE.py is one of your own': cli.shipped_configs(),
    }
    lines = ['usage: qkattn COMMAND [--FLAG=VALUE ...]; qkattn COMMAND --help lists the flags']
    for title, files in files_by_title.items():
        lines.append(f'\n{title}')
        for name, path in files.items():
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
