"""Command lines of launchers: own flags, then `-- train|ablate FLAGS...`. Standard library only."""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

EXIT_CONFIG = 2
COMMANDS = ('train', 'ablate')


def leave(sentence: str, code: int = EXIT_CONFIG) -> NoReturn:
    """Ends the launcher with one sentence on standard error; 2 is a wrong command line."""
    print(sentence, file=sys.stderr)
    sys.exit(code)


def need(tool: str, hint: str) -> None:
    """Ends the launcher where a program is not installed."""
    if not shutil.which(tool):
        leave(f'{tool} is not installed; {hint}')


def run_program(command: list[str], **settings: Any) -> 'subprocess.CompletedProcess[str]':
    """`subprocess.run` with text, in which bytes that are not UTF-8 are replaced."""
    return subprocess.run(command, encoding='utf-8', errors='replace', **settings)


def check_kept(options: argparse.Namespace, storage: str, owners: str, *places: str) -> None:
    """Says that results end with the hosts where --workdir is in no bucket and none of `places`.

    Ends the launcher where workers would share nothing.
    """
    if options.command and not options.workdir.startswith(('gs://', *places)):
        lost = f'--workdir={options.workdir}: without {storage}, '
        if getattr(options, 'workers', None):
            leave(f'{lost}--workers={options.workers} share no study')
        print(f'note: {lost}results end with the {owners}', file=sys.stderr)


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers that are large enough."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least {least}')
        return int(text)

    return parse


def variable(text: str) -> str:
    """NAME=VALUE of an environment variable."""
    if not re.fullmatch('[A-Za-z_][A-Za-z0-9_]*=.*', text, re.DOTALL):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return text


def label(text: str) -> str:
    """A name that clouds and Kubernetes accept, with room for what they append."""
    if not re.fullmatch('[a-z]([-a-z0-9]{0,38}[a-z0-9])?', text):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not 1 to 40 lower-case letters, digits and inner hyphens'
        )
    return text


def flag(text: str, kind: Callable[[str], Any] = str, default: Any = None, **more: Any) -> dict:
    """A flag: its help, what parses its value, its default, and more of `add_argument`."""
    return {'help': text, 'type': kind, 'default': default, **more}


def switch(text: str) -> dict:
    """A flag without a value."""
    return {'help': text, 'action': 'store_true'}


ENV = flag('NAME=VALUE', variable, [], action='append')
WORKERS = flag('jobs that share a study', whole(1))
DRY_RUN = switch('print what would be done, and do nothing')


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        leave(f'{message}; --help lists the flags')


def read(doc: str, flags: dict[str, dict], argv: list[str]) -> argparse.Namespace:
    """The command line: the values of `flags`, and `command`, what follows `--` or [].

    A mistake ends the launcher with one sentence: an unknown flag, a wrong value, a command that is
    not one of COMMANDS or has no directory; workers that share no study.
    """
    at = argv.index('--') if '--' in argv else len(argv)
    parser = _Parser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, settings in flags.items():
        parser.add_argument(name, **settings)
    for argument in argv[:at]:  # argparse drops a value that is --
        if argument.partition('=')[2] == '--':
            leave(f'{argument} has no value; -- alone begins the command')
    command = argv[at + 1 :]
    if at < len(argv) and command[:1] not in [[name] for name in COMMANDS]:
        given = f'is {command[0]!r}' if command else 'is missing'
        leave(f'the command after -- {given}; valid: {" and ".join(COMMANDS)}')
    options = parser.parse_args(argv[:at])
    options.command = command
    workers = getattr(options, 'workers', None)
    if workers and command[:1] == ['train']:
        leave(f'--workers={workers} share a study, but the command is train')
    found = re.search('^--?workdir[=\n](.+)$', '\n'.join(command), re.MULTILINE)
    if command and not found:
        leave('the command has no --workdir=DIRECTORY, from which a job that is restarted resumes')
    options.workdir = found[1] if found else ''
    return options


def require_command(options: argparse.Namespace) -> None:
    """Ends the launcher without a command."""
    if not options.command:
        leave('no command; give it after --, as in -- train --config=CONFIG --workdir=DIRECTORY')
