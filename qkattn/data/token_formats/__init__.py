"""Token files of other tools."""
