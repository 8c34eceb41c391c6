"""Processes: command lines, signals, the machine, and jobs of several processes."""
