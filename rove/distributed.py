"""One process or many: what torchrun tells a process, and what ranks say to each other.

Gradients travel in the default group (nccl on GPUs, gloo elsewhere), which gives up after
dist_timeout_s. Everything else travels on the host in a control group of its own, which waits as
long as another rank works (a slow evaluation, rank 0 saving) and fails at once when one dies.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

T = TypeVar("T")
STORE_TIMEOUT = timedelta(minutes=1)  # to reach torchrun's store; if its agent died, twice that
CONNECT_TIMEOUT = timedelta(minutes=10)  # for the other ranks to come
CONTROL_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    local_rank: int
    restarts: int
    """how often torchrun has started these processes again"""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_world() -> World:
    """Return what torchrun put into the environment; a lone process without it."""
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    rank, size, local, restarts = (os.environ.get(key) for key in keys)
    return World(int(rank or 0), int(size or 1), int(local or 0), int(restarts or 0))


class _Control:
    group: Any = None
    store: Any = None


def connect(world: World, device: torch.device, timeout_s: float) -> None:
    """Join the process groups; nothing for a lone process."""
    if world.size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        # torchrun's store outlives a restart: without a prefix ranks can meet dead ones' addresses
        _Control.store, rank, size = next(dist.rendezvous("env://", timeout=STORE_TIMEOUT))
        store = dist.PrefixStore(f"attempt_{world.restarts}", _Control.store)
        store.set(f"here_{rank}", "yes")  # the group's own timeout starts once all have come
        store.wait([f"here_{other}" for other in range(size)], CONNECT_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        _Control.group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)


def say(world: World, line: str) -> None:
    """Print a line on rank 0, above the progress bar.

    A full log disk or a reader that went away is not worth a run: from then on it is silent.
    """
    if world.is_main:
        try:
            tqdm.write(line)
            sys.stdout.flush()
        except OSError:  # what is still in the buffer must go somewhere, or Python exits with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note_start() -> None:
    """Remember, across restarts by torchrun, that this job has begun its run."""
    if _Control.store is not None:
        _Control.store.set("started", "yes")


def has_started() -> bool:
    """Whether this job began its run before torchrun restarted it."""
    return _Control.store is not None and bool(_Control.store.check(["started"]))


def disconnect() -> None:
    """Leave the process groups, once every rank has come here."""
    if dist.is_initialized():
        gather(None)
        dist.destroy_process_group()
        _Control.group = _Control.store = None


def mean_by_tensor(size: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket's gradients over ranks, each tensor by itself: a hook for DDP.

    DDP lays out its buckets anew after the first step of a process, and gloo sums in an order that
    depends on the place in a bucket: a resumed run of three ranks would differ in the last bits.
    """
    bucket.buffer().div_(size)
    works = [dist.all_reduce(grad, async_op=True) for grad in bucket.gradients()]
    done = torch.futures.collect_all([work.get_future() for work in works])
    return done.then(lambda _: bucket.buffer())


def gather(value: T) -> list[T]:
    """Return a plain value of every rank, in rank order; waits for all of them."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_Control.group)
    return values


def largest(value: int) -> int:
    """Return the largest value of any rank."""
    if not dist.is_initialized():
        return value
    x = torch.tensor(value)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=_Control.group)
    return int(x)


def on_main(world: World, action: Callable[[], T]) -> T | None:
    """Return the action's result on rank 0, None elsewhere; its refusal ends every rank."""
    fault: BaseException | None = None
    result = None
    if world.is_main:
        try:
            result = action()
        except (ValueError, OSError, SystemExit) as error:
            fault = error
    if gather(fault is not None)[0] and fault is None:
        raise SystemExit(2)
    if fault is not None:
        try:
            raise fault
        finally:
            del fault  # with it the frames that its traceback holds, and the lock in them
    return result
