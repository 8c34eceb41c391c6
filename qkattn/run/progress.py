"""The progress display of a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np
import tqdm

# Fetching the loss more often could stall the accelerator.
_BAR_EVERY_SECONDS = 0.2


class Progress:
    """Steps, loss, tokens per second and time left: a bar on a terminal, plain lines elsewhere.

    `update` may be called after every step: the loss stays on the device until it is shown. In a
    job of several processes only process 0 should create one.
    """

    def __init__(
        self,
        total_steps: int,
        description: str,
        start_step: int = 0,
        tokens_per_step: int | None = None,
        plain_every_seconds: float = 10,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        runs_left: int | None = None,
    ):
        """Shows nothing until the first `update`.

        Args:
          total_steps: the last step of the run.
          description: of the run.
          start_step: steps done before this process started.
          tokens_per_step: summed over trials; None: not shown.
          plain_every_seconds: seconds between lines where `stream` is not a terminal.
          stream: where to write; None: standard error.
          clock: seconds, from any origin.
          runs_left: runs of the study still to run after this one; None: not shown.
        """
        self._total = total_steps
        self._description = description
        self._tokens_per_step = tokens_per_step
        self._runs_left = runs_left
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bar = tqdm.tqdm(
            total=total_steps,
            initial=start_step,
            desc=description,
            unit='step',
            file=self._stream,
            disable=None,
            dynamic_ncols=True,
            mininterval=0,
        )
        self._plain = bool(self._bar.disable)
        self._every_seconds = plain_every_seconds if self._plain else _BAR_EVERY_SECONDS
        self._step = self._shown_step = start_step
        self._loss: Any = None
        self._first: tuple[int, float] | None = None
        self._next_time = -np.inf

    def update(self, step: int, loss: Any = None) -> None:
        """Updates the display.

        Args:
          step: steps done since the start of the run, including resumed ones.
          loss: in nats per token; a number, or an array over trials, whose range is shown.
        """
        now = self._clock()
        # Rates are measured from the first report: the time before it is mostly compilation.
        if self._first is None:
            self._first = (step, now)
        self._step, self._loss = step, loss
        if now >= self._next_time:
            self._show(now)
            self._next_time = now + self._every_seconds

    def close(self) -> None:
        """Shows the last report if it has not been shown; may be called twice."""
        if self._step != self._shown_step:
            self._show(self._clock())
        self._bar.close()

    def __enter__(self) -> 'Progress':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _show(self, now: float) -> None:
        first_step, first_time = self._first or (self._step, now)
        elapsed = now - first_time
        rate = (self._step - first_step) / elapsed if elapsed > 0 else 0.0
        notes = []
        if self._loss is not None:
            notes.append(f'loss {_loss_text(self._loss)}')
        if self._tokens_per_step is not None and rate > 0:
            notes.append(f'{rate * self._tokens_per_step:,.0f} tokens/s')
        if self._runs_left is not None:
            notes.append(f'{self._runs_left} run{"s" * (self._runs_left != 1)} left')
        if self._plain:
            if rate > 0 and self._step < self._total:
                left = tqdm.tqdm.format_interval((self._total - self._step) / rate)
                notes.append(f'{left} to go')
            line = f'{self._description}: step {self._step}/{self._total}'
            print(', '.join([line, *notes]), file=self._stream, flush=True)
        else:
            self._bar.set_postfix_str(', '.join(notes), refresh=False)
            self._bar.update(self._step - self._bar.n)
        self._shown_step = self._step


def _loss_text(loss: Any) -> str:
    values = np.asarray(loss, np.float64).ravel()
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 'not finite'
    low, high = finite.min(), finite.max()
    text = f'{low:.4f}' if values.size == 1 else f'{low:.4f} to {high:.4f}'
    diverged = values.size - finite.size
    return f'{text} ({diverged} of {values.size} trials not finite)' if diverged else text
