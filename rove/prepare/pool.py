"""Tokenizing in processes: units go out in turn, what became of them comes back in that order.

Each worker has a pipe of its own and threads that receive and send, so that nobody waits for
anybody's turn, and any process can be killed at any moment without another one waiting for the rest
of a message: a pool with shared queues does not have that.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, cast

from rove.prepare.sources import Position, Units
from rove.prepare.units import Encoded, Unit, encode_unit
from rove.tokenizer import Tokenizer

UNITS_PER_WORKER = 2  # on their way: one that is worked on, one that waits


def encode_units(
    tokenizer: Tokenizer,
    units: Units,
    val_fraction: float,
    num_workers: int,
    start_method: str = "spawn",
) -> Generator[tuple[Position, Encoded], None, None]:
    """Yield (position after the unit, what became of it), in order.

    num_workers: processes, ended with the iterator; 1 is this one. ValueError when one dies.
    """
    if num_workers == 1:
        for position, unit in units:
            yield position, encode_unit(tokenizer, unit, val_fraction)
        return
    waiting: deque[tuple[Position, Connection]] = deque()
    with _workers(start_method, tokenizer, val_fraction) as start:
        pipes: list[Connection] = []
        for number, (position, unit) in enumerate(units):
            if len(pipes) < num_workers:  # no more than there are units
                pipes.append(start())
            pipe = pipes[number % num_workers]
            _talk(pipe.send, unit)
            waiting.append((position, pipe))
            if len(waiting) >= UNITS_PER_WORKER * num_workers:
                position, pipe = waiting.popleft()
                yield position, _receive(pipe)
        for position, pipe in waiting:
            yield position, _receive(pipe)


@contextmanager
def _workers(
    start_method: str, tokenizer: Tokenizer, val_fraction: float
) -> Iterator[Callable[[], Connection]]:
    """Yield what starts a process; at the end of the block all are killed, whatever they do."""
    context: Any = get_context(start_method)
    processes: list[Any] = []

    def start() -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, tokenizer, val_fraction))
        # Ctrl-C is the parent's to answer: a process has the mask that it is started under
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        processes.append(process)
        theirs.close()  # so that reading ours ends with the process
        return cast(Connection, ours)

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _talk(action: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except (EOFError, OSError) as error:
        raise ValueError("a tokenizing process died; try fewer --num_workers") from error


def _receive(pipe: Connection) -> Encoded:
    result: Encoded | Exception = _talk(pipe.recv)
    if isinstance(result, Exception):
        raise result
    return result


def _work(pipe: Connection, tokenizer: Tokenizer, val_fraction: float) -> None:
    """Encode what comes until the process is killed."""
    units: SimpleQueue[Unit] = SimpleQueue()
    results: SimpleQueue[Encoded | Exception] = SimpleQueue()
    for action in (
        _end_with_parent,
        lambda: _repeat(lambda: units.put(pipe.recv())),
        lambda: _repeat(lambda: pipe.send(results.get())),
    ):
        threading.Thread(target=action, daemon=True).start()
    while True:
        try:
            results.put(encode_unit(tokenizer, units.get(), val_fraction))
        except Exception as error:
            results.put(error)


def _repeat(action: Callable[[], None]) -> None:
    try:
        while True:
            action()
    except (EOFError, OSError):  # the parent is gone
        os._exit(1)


def _end_with_parent() -> None:  # its pipes stay open in workers that were forked from it
    if parent := parent_process():
        parent.join()
        os._exit(1)
