"""Command line scripts, one per job; their logic is in qkattn."""

import sys

from qkattn.jobs import output, signals

# While Python looks for the script of `python -m experiments.NAME`; before imports of seconds.
if sys.argv[0] == '-m':
    output.escape_unencodable()
    module = next((word for word in sys.orig_argv if 'experiments.' in word), '')
    signals.exit_while_starting(module.rpartition('.')[2])
