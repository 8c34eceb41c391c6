"""The command `qkattn`, which is also `python -m qkattn`: runs a script of experiments.

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

if __name__ == '__main__' or Path(sys.argv[0]).name == 'qkattn':  # before imports that take seconds
    output.escape_unencodable()
    signals.exit_while_starting(''.join(sys.argv[1:2]))

if importlib.util.find_spec('ml_collections') is None:  # `pip install qkattn`, without extras
    sentence = "commands need the packages of the laboratory: pip install 'qkattn[lab]'\n"
    output.say(sentence, sys.stderr)
    sys.exit(signals.EXIT_CONFIG)

from absl import flags

from qkattn import __version__
from qkattn.jobs import cli


def main() -> None:
    """Runs the script that the first argument names with the arguments behind it."""
    scripts = cli.shipped('experiments')
    name, *arguments = sys.argv[1:] or ['--help']
    if name in ('--version', '--help', '-h', 'help'):
        with output.ending_unread():
            print(__version__ if name == '--version' else _help(scripts))
    elif name in scripts:
        sys.argv = [f'qkattn {name}', *arguments]
        if not sys.flags.safe_path:
            sys.path.insert(0, '')  # as with -m: import paths name files of the working directory
        sys.path.append(str(scripts['train'].parents[1]))  # of experiments
        runpy.run_path(str(scripts[name]), run_name='__main__')
    else:
        cli.exit_with(f'unknown command {name!r}; known: {", ".join(scripts)}')


def _help(scripts: dict[str, Path]) -> str:
    """The commands and configs, each with the first line of its docstring; none is run."""
    lines = ['usage: qkattn COMMAND [--FLAG=VALUE ...]; qkattn COMMAND --help lists the flags']
    configs = 'configs, as --config=NAME; --config=FILE.py is one of your own'
    for title, files in (('commands', scripts), (configs, cli.shipped_configs())):
        lines.append(f'\n{title}')
        for name, path in files.items():
            text = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
            about = f'  {name:<26} ' + text.partition('\n')[0]
            lines += textwrap.wrap(
                about, flags.get_help_width(), subsequent_indent=' ' * 29, break_on_hyphens=False
            )
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
