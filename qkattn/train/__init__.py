"""Training a stack of trials: sharded step, loop, checkpoints."""

from qkattn.train.loop import train

__all__ = ['train']
