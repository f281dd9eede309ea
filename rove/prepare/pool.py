"""Tokenizing in processes: units go out in order, what became of them comes back in order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from typing import Any

from rove.prepare.sources import Position, Units
from rove.prepare.units import Encoded, Unit, encode_unit
from rove.tokenizer import Tokenizer


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
    context, settings = get_context(start_method), (tokenizer, val_fraction)
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, settings)
    waiting: deque[tuple[Position, Future[Encoded]]] = deque()
    try:
        for position, unit in units:
            waiting.append((position, pool.submit(_encode_in_worker, unit)))
            if len(waiting) > 2 * num_workers:
                position, future = waiting.popleft()
                yield position, future.result()
        for position, future in waiting:
            yield position, future.result()
    except BrokenProcessPool as error:
        raise ValueError("a tokenizing process died; try fewer --num_workers") from error
    except BaseException:  # an error, Ctrl-C, or a caller that wants no more: nobody waits
        for process in active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: dict[str, Any] = {}  # a worker's own settings, sent once


def _start_worker(tokenizer: Tokenizer, val_fraction: float) -> None:
    def end_with_parent() -> None:  # a killed parent leaves its queues open, so they do not tell
        if parent := parent_process():
            parent.join()
            os._exit(1)

    _worker.update(tokenizer=tokenizer, val_fraction=val_fraction)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends its workers
    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode_in_worker(unit: Unit) -> Encoded:
    return encode_unit(_worker["tokenizer"], unit, _worker["val_fraction"])
