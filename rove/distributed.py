"""One process or many: what torchrun tells a process, and the few reductions the project needs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_world() -> World:
    """Return what torchrun put into the environment; a lone process without it."""
    rank, size, local = (os.environ.get(k) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return World(int(rank or 0), int(size or 1), int(local or 0))


def connect(world: World, device: torch.device, timeout_s: float) -> None:
    """Join the process group: nccl on GPUs, gloo elsewhere; nothing for a lone process."""
    if world.size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_sum(x: Tensor) -> Tensor:
    """Return the sum of x over ranks, in x's dtype, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather(x: Tensor) -> Tensor:
    """Return x of every rank, stacked: (size, *x.shape)."""
    if not dist.is_initialized():
        return x[None]
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def gather_objects(value: Any) -> list[Any]:
    """Return a plain value of every rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(world: World, action: Callable[[], T]) -> T | None:
    """Return the action's result on rank 0, None elsewhere; its ValueError ends every rank."""
    fault: Exception | None = None
    result = None
    if world.is_main:
        try:
            result = action()
        except (ValueError, OSError) as error:
            fault = error
    if gather_objects(fault is not None)[0] and fault is None:
        raise SystemExit(2)
    if fault is not None:
        raise fault
    return result


def wait_for_all() -> None:
    """Return once every rank has called this."""
    if dist.is_initialized():
        dist.barrier()
