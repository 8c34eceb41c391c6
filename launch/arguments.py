"""Command lines of launchers: own flags, then `-- train|ablate FLAGS...`. Standard library only."""

import argparse
import re
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_CONFIG = 2
COMMANDS = ('train', 'ablate')


def leave(sentence: str, code: int = EXIT_CONFIG) -> NoReturn:
    """Ends the launcher with one sentence on standard error; 2 is a wrong command line."""
    print(sentence, file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence; flags are written out in full."""

    def __init__(self, doc: str) -> None:
        super().__init__(
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        leave(f'{message}; --help lists the flags')


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own flags and the command behind `--` ([] without one).

    A command that is not one of COMMANDS ends the launcher.
    """
    at = argv.index('--') if '--' in argv else len(argv)
    flags, command = argv[:at], argv[at + 1 :]
    for flag in flags:  # argparse drops a value that is --
        if flag.partition('=')[2] == '--':
            leave(f'{flag} has no value; -- alone begins the command')
    if at == len(argv):
        return flags, []
    if not command or command[0] not in COMMANDS:
        given = f'is {command[0]!r}' if command else 'is missing'
        leave(f'the command behind -- {given}; valid are {" and ".join(COMMANDS)}')
    return flags, command


def require(command: list[str], workers: int | None = None) -> None:
    """Ends the launcher without a command, without its directory, or if workers share no study."""
    if not command:
        leave('no command; give it behind --, as in -- train --config=CONFIG --workdir=DIRECTORY')
    if workers and command[0] == 'train':
        leave(f'--workers={workers} share a study, but the command is train')
    names = [flag.lstrip('-').partition('=')[0] for flag in command if flag.startswith('-')]
    if 'workdir' not in names:
        leave('the command has no --workdir=DIRECTORY, from which a job that is restarted resumes')


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
