"""Several processes that share one job: who I am, and how results come together.

`accelerate launch` and `torchrun` tell each process its rank by environment variables; a process
that finds none is alone. What is gathered is merged in the order of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from quantkit.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those that share the job."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def mine(self, index: int) -> bool:
        """Returns whether the piece of work with this index is this process's."""
        return index % self.count == self.rank

    def gather(self, value: T) -> list[T]:
        """Returns every process's value by rank at the first process, and [] at the others."""
        if self.count == 1:
            return [value]
        found: list[Any] | None = [None] * self.count if self.is_first else None
        dist.gather_object(value, found)
        return found or []

    def at_first(self, work: Callable[[], T]) -> T:
        """Returns what the first process's `work` returned, everywhere; it runs only there.

        An error that it raises is raised everywhere, so that nobody waits for it.
        """
        if self.count == 1:
            return work()
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = work()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box)
        if box[1] is not None:
            raise box[1]
        return cast(T, box[0])


@contextmanager
def joined() -> Iterator[Processes]:
    """Yields this process's place; joins the group the environment names, and leaves it after.

    Raises:
        InputError: the environment names a group without saying which rank this is.
    """
    if dist.is_available() and dist.is_initialized():
        yield Processes(rank=dist.get_rank(), count=dist.get_world_size())
        return
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise InputError(
            f"WORLD_SIZE is {count}, but RANK or MASTER_ADDR is not set: start several processes "
            "with `accelerate launch -m quantkit ...` or torchrun, or unset WORLD_SIZE."
        )
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Processes(rank=dist.get_rank(), count=dist.get_world_size())
    finally:
        dist.destroy_process_group()
