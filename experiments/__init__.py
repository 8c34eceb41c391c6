"""Command line scripts, one per job; their logic is in qkattn."""

import sys

from qkattn.jobs import output, signals

# `python -m experiments.NAME` imports this package first, while sys.argv[0] is '-m'. Signals are
# handled before the slow imports of the script begin.
if sys.argv[0] == '-m':
    output.escape_unencodable()
    module = next((word for word in sys.orig_argv if 'experiments.' in word), '')
    signals.exit_while_starting(module.rpartition('.')[2])
