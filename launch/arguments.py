"""Command lines of launchers: own flags, then `-- train|ablate FLAGS...`. Standard library only."""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

EXIT_CONFIG = 2
COMMANDS = ('train', 'ablate')


def exit_with(sentence: str, code: int = EXIT_CONFIG) -> NoReturn:
    """Prints a sentence to standard error and exits; code 2 means a wrong command line."""
    print(sentence, file=sys.stderr)
    sys.exit(code)


def require_program(tool: str, hint: str) -> None:
    """Ends the launcher if a program is not installed."""
    if not shutil.which(tool):
        exit_with(f'{tool} is not installed; {hint}')


def run_program(command: list[str], **settings: Any) -> 'subprocess.CompletedProcess[str]':
    """Calls `subprocess.run` in text mode, and replaces invalid UTF-8."""
    return subprocess.run(command, encoding='utf-8', errors='replace', **settings)


def check_workdir_lasts(
    options: argparse.Namespace, *, storage: str, machines: str, other_paths: Sequence[str] = ()
) -> None:
    """Warns if --workdir is lost when the job's machines are deleted.

    With --workers, which must share the directory, this is an error that ends the launcher.

    Args:
        options: The flags of the launcher.
        storage: What would last, for the message: 'a gs:// directory'.
        machines: What is deleted, for the message: 'hosts'.
        other_paths: Directories that last, with a slash at the end, besides gs://.
    """
    # '/runs/' contains '/runs' and '/runs/a', but not '/runs2'.
    persistent_paths = ('gs://', *other_paths)
    is_persistent = f'{options.workdir}/'.startswith(persistent_paths)
    if is_persistent or not options.command:
        return
    reason = f'--workdir={options.workdir}: without {storage}, '
    if getattr(options, 'workers', None):
        exit_with(f'{reason}--workers={options.workers} share no study')
    print(f'note: {reason}results end with the {machines}', file=sys.stderr)


def at_least(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers of at least `least`, for `add_argument(type=...)`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least {least}')
        return int(text)

    return parse


def variable(text: str) -> str:
    """Checks that a text is NAME=VALUE of an environment variable, and returns it."""
    if not re.fullmatch('[A-Za-z_][A-Za-z0-9_]*=.*', text, re.DOTALL):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return text


def label(text: str) -> str:
    """Checks that clouds and Kubernetes accept a name, even with a suffix, and returns it."""
    if not re.fullmatch('[a-z]([-a-z0-9]{0,38}[a-z0-9])?', text):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not 1 to 40 lower-case letters, digits and inner hyphens'
        )
    return text


def flag(text: str, parser: Callable[[str], Any] = str, default: Any = None, **more: Any) -> dict:
    """Returns the arguments of `add_argument` for a flag whose help is `text`."""
    return {'help': text, 'type': parser, 'default': default, **more}


def switch(text: str) -> dict:
    """Returns the arguments of `add_argument` for a flag without a value."""
    return {'help': text, 'action': 'store_true'}


ENV = flag('NAME=VALUE', variable, [], action='append')
WORKERS = flag('jobs that share a study', at_least(1))
DRY_RUN = switch('print what would be done, and do nothing')


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with(f'{message}; --help lists the flags')


def read_command_line(doc: str, flags: dict[str, dict], argv: list[str]) -> argparse.Namespace:
    """Reads the flags of a launcher, and the command after `--`. A mistake ends the launcher.

    Args:
        doc: The text of --help.
        flags: The arguments of `add_argument` for each flag, from `flag` or `switch`.
        argv: The command line without the program.

    Returns:
        The flags, `command` and `workdir`. For example, `--nodes=2 -- train --workdir=runs/a` has
        nodes=2, command=['train', '--workdir=runs/a'] and workdir='runs/a'. Without `--`, command
        is [] and workdir is ''.
    """
    parser = _Parser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, settings in flags.items():
        parser.add_argument(name, **settings)

    own_flags, command = _split_at_dashes(argv)
    options = parser.parse_args(own_flags)
    options.command = command
    workers = getattr(options, 'workers', None)  # some launchers do not have this flag
    if workers and command[:1] == ['train']:
        exit_with(f'--workers={workers} share a study, but the command is train')
    options.workdir = _workdir_of(command) if command else ''
    return options


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at `--`; returns the launcher's flags and the command.

    Without `--`, the command is []. A missing or unknown command ends the launcher.
    """
    has_command = '--' in argv
    num_flags = argv.index('--') if has_command else len(argv)
    own_flags = argv[:num_flags]
    command = argv[num_flags + 1 :]

    for argument in own_flags:
        _, _, value = argument.partition('=')
        # argparse would drop the value '--'.
        if value == '--':
            exit_with(f'{argument} has no value; -- alone begins the command')
    if has_command and not command:
        exit_with(f'the command after -- is missing; valid: {" and ".join(COMMANDS)}')
    if has_command and command[0] not in COMMANDS:
        exit_with(f'the command after -- is {command[0]!r}; valid: {" and ".join(COMMANDS)}')
    return own_flags, command


def _workdir_of(command: list[str]) -> str:
    """Returns the --workdir of a command; a command without one ends the launcher."""
    # Both `--workdir=runs/a` and `--workdir runs/a` match in lines of one argument each.
    workdir = re.search('^--?workdir[=\n](.+)$', '\n'.join(command), re.MULTILINE)
    if workdir is None:
        exit_with(
            'the command has no --workdir=DIRECTORY, from which a job that is restarted resumes'
        )
    return workdir[1]


def require_command(options: argparse.Namespace) -> None:
    """Ends the launcher if no command is given."""
    if not options.command:
        exit_with(
            'no command; give it after --, as in -- train --config=CONFIG --workdir=DIRECTORY'
        )
