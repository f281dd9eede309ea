"""Signals that ask a run to stop: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning)."""

import os
import signal
import time
from types import FrameType

REPEAT_S = 1.0  # a terminal and torchrun both pass on one Ctrl-C, at nearly the same time


class StopSignals:
    """Notes the first signal, for the loop to act on; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self.received_s = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        repeated = self.received and time.monotonic() - self.received_s > REPEAT_S
        if number == signal.SIGINT and repeated:
            os._exit(128 + number)
        if not self.received:
            self.received, self.received_s = number, time.monotonic()
