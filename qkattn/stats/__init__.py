"""Statistics: intervals, decisions, sweeps and scaling laws, and losses of counts of text."""
