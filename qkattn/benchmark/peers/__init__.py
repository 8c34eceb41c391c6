"""Other implementations of the same language model, and qkattn itself, as works to time."""
