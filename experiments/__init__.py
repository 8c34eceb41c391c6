"""Command line scripts, one per job; their logic is in qkattn."""

import sys

from qkattn.jobs import signals

# While Python looks for the script of `python -m experiments.NAME`; before imports of seconds.
if sys.argv[0] == '-m':
    module = next((word for word in sys.orig_argv if 'experiments.' in word), '')
    signals.exit_while_starting(module.rpartition('.')[2])

from qkattn.jobs.display import show_starting
from qkattn.jobs.machine import keep_freed_memory

if sys.argv[0] == '-m':
    keep_freed_memory()  # before there are other threads, that of the display too
    show_starting()
