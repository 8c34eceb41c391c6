"""What is shown from the first line of a script to its main function: imports take seconds."""

import contextlib

from qkattn.jobs.progress import waiting

_shown = contextlib.ExitStack()


def begin() -> None:
    """Says after a while that the script is starting."""
    _shown.enter_context(waiting('qkattn', 'starting'))


def end() -> None:
    """The script has something else to say; may be called without `begin`."""
    _shown.close()
