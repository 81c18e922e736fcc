"""Several processes that share one job: who I am, and how results come together.

torchrun and `accelerate launch` tell each process its rank by environment variables (RANK,
WORLD_SIZE, LOCAL_RANK; under mpirun those of the MPI library); a process that finds none is alone.

What is exchanged are results: small, on the CPU, pickled. They travel over gloo whatever the
model runs on, in a group of our own where the caller already has one (of NCCL, say), so that no
GPU has to be set for it.

What ends a process whose peers fail:

* an error that a peer raises in shared work (`everywhere`, `at_first`) is raised in all;
* a peer that is killed closes its connections: whoever waits for it, or comes to wait, gets a
  `QuantkitError` at once; torchrun also ends the others. The time limits below are the last resort.

Nothing here loads torch before there are several processes: the command line asks who may talk.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

from quantkit.errors import InputError, QuantkitError

T = TypeVar("T")

_MEET: Final = timedelta(minutes=10)
"""For all processes to have started; torch's default is 30 minutes."""
_WAIT: Final = timedelta(days=7)
"""For the slowest process's share: one without data waits for all of it."""
_MPI: Final = (
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
)
_SHARED: Final = ("stats", "calibrate", "sweep", "train")
"""Commands whose work several processes share."""
_START: Final = "start several processes with torchrun --nproc-per-node N -m quantkit ..."


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those that share the job.

    All of them must make the same calls in the same order.

    Attributes:
        rank: From 0; `count`: how many there are; `local_rank`: the rank on this machine.
        group: What they talk through, of torch.distributed; None where there is one process.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def mine(self, index: int) -> bool:
        """Returns whether the piece of work with this index is this process's."""
        return index % self.count == self.rank

    def own_device(self, device: str) -> str:
        """Returns the device this process computes on, and makes it torch's current one.

        `cuda` among several processes is the GPU with this process's local rank.

        Raises:
            InputError: there is no such GPU.
        """
        if device != "cuda" or self.count == 1:
            return device
        import torch

        if self.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"process {self.rank} would compute on cuda:{self.local_rank}, and torch sees "
                f"{torch.cuda.device_count()} GPUs: start as many processes as there are GPUs."
            )
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

    def everywhere(self, work: Callable[[], T]) -> T:
        """Returns what this process's `work` returned, after all have done theirs.

        Where it raised in some, all raise: each its own error, the rest that of the lowest rank.
        """
        if self.count == 1:
            return work()
        import torch.distributed as dist

        value, own = None, None
        try:
            value = work()
        except Exception as error:
            own = error
        raised: list[Exception | None] = [None] * self.count
        with self._talking():
            dist.all_gather_object(raised, _portable(own), group=self.group)
        if own is not None:
            raise own
        for rank, theirs in enumerate(raised):
            if theirs is not None:
                raise _from_rank(theirs, rank)
        return cast(T, value)

    def at_first(self, work: Callable[[], T]) -> T:
        """Returns what the first process's `work` returned, everywhere; it runs only there.

        An error that it raises is raised everywhere, so that nobody waits for it.
        """
        if self.count == 1:
            return work()
        import torch.distributed as dist

        value, own = None, None
        if self.is_first:
            try:
                value = work()
            except Exception as error:
                own = error
        box: list[Any] = [value, _portable(own)]
        with self._talking():
            dist.broadcast_object_list(box, src=0, group=self.group)
        if own is not None:
            raise own
        if box[1] is not None:
            raise box[1]
        return cast(T, box[0])

    def gather(self, value: T) -> Iterator[T]:
        """Yields every process's value by rank at the first process, and nothing at the others.

        One after the other: whoever merges as they come holds two values and one pickle,
        however many processes there are. The first must take all of them.
        """
        if self.is_first:
            yield value
        if self.count == 1:
            return
        import torch.distributed as dist

        if not self.is_first:
            with self._talking():
                dist.send_object_list([value], dst=0, group=self.group)
            return
        for rank in range(1, self.count):
            box: list[Any] = [None]
            with self._talking():
                dist.recv_object_list(box, src=rank, group=self.group)
            yield box.pop()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Turns a broken connection into an error that says what it means."""
        try:
            yield
        except RuntimeError as error:  # what gloo raises; it has no class of its own
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            first = re.sub(r"^\[[^\]]*\]\s*", "", first)  # where gloo was built
            raise QuantkitError(
                f"process {self.rank} lost the other processes of the job, of which at least one "
                f"ended early; look for its own message above ({first[:120]})."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the launcher says: rank, number of processes, rank on this machine."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0


def launched(environ: Mapping[str, str] = os.environ) -> Launched:
    """Returns this process's place as the environment names it; alone where it names none.

    Raises:
        InputError: the environment names half of it, or nonsense.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    if "MASTER_ADDR" in environ and not any(name in environ for name in names[:2]):
        names = next((mpi for mpi in _MPI if mpi[0] in environ), names)
    size, rank, local = (environ.get(name, "").strip() for name in names)
    if size in ("", "1") and rank in ("", "0") and (size or not rank):
        return Launched()
    for name, value, other in ((names[0], size, names[1]), (names[1], rank, names[0])):
        if not value:
            raise InputError(
                f"{other} is set to {environ.get(other, '')!r}, but {name} is not set: {_START}, "
                f"or unset {other}."
            )
    for name, value in ((names[0], size), (names[1], rank), (names[2], local or rank)):
        if not (value.isascii() and value.isdigit()):
            raise InputError(f"{name} is {value!r}: expected a whole number; {_START}.")
    found = Launched(rank=int(rank), count=int(size), local_rank=int(local or rank))
    if found.rank >= found.count:
        raise InputError(
            f"{names[1]} is {rank} and {names[0]} {size}: expected a rank from 0 to "
            f"{max(found.count - 1, 0)}; {_START}."
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise InputError(f"{names[0]} is {size}, but {name} is not set: {_START}.")
    return found


def may_talk(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process is the one of its job that talks and shows results."""
    try:
        return launched(environ).rank == 0
    except InputError:
        return True  # there is no job yet, and somebody has to say so


def lone_launch(environ: Mapping[str, str] = os.environ) -> str:
    """Returns one sentence where several processes were asked for and one was started, else "".

    `accelerate launch --cpu` starts a single process, whatever --num_processes says, unless it is
    given an MPI host file; what it leaves in the environment tells.
    """
    asked = environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in environ
    try:
        is_alone = launched(environ).count == 1
    except InputError:
        return ""
    if not asked or not is_alone:
        return ""
    return (
        "note: accelerate launch --cpu started one process only (it starts more by MPI alone). "
        "For N processes: torchrun --nproc-per-node N -m quantkit ..., or accelerate launch "
        "--multi_gpu --num_processes N -m quantkit ..., which needs no GPU."
    )


def require_shared(command: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses several processes for a command of one: each would write the same files.

    Raises:
        InputError: a launcher started more than one.
    """
    count = launched(environ).count
    if count > 1 and command not in _SHARED:
        raise InputError(
            f"quantkit {command} is the work of one process, and {count} were started, which would "
            f"write the same files: start it alone. Several processes share {', '.join(_SHARED)}."
        )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the end: for what would swallow it.

    A KeyboardInterrupt that is raised inside a callback from C, as numba makes them when it loads
    compiled code, is printed and forgotten.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread
        return
    before = signal.getsignal(signal.SIGINT)
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


@contextmanager
def joined() -> Iterator[Processes]:
    """Yields this process's place; joins the group the environment names, and leaves it after.

    Where torch.distributed is already set up, all of its processes must come here.

    Raises:
        InputError: the environment names half a group.
        QuantkitError: the others did not come.
    """
    import torch.distributed as dist

    place = launched()
    is_given = dist.is_available() and dist.is_initialized()
    if (dist.get_world_size() if is_given else place.count) == 1:
        yield Processes()
        return
    if not is_given:
        try:
            dist.init_process_group("gloo", rank=place.rank, world_size=place.count, timeout=_MEET)
        except (RuntimeError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise QuantkitError(
                f"process {place.rank} of {place.count} cannot meet the others at "
                f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {first[:200]}"
            ) from error
    group = dist.new_group(backend="gloo", timeout=_WAIT)
    try:
        yield Processes(
            rank=dist.get_rank(),
            count=dist.get_world_size(),
            local_rank=place.local_rank if place.count > 1 else dist.get_rank(),
            group=group,
        )
    finally:
        dist.destroy_process_group(group if is_given else None)


def _portable(error: Exception | None) -> Exception | None:
    """Returns the error, or where it cannot be pickled one that says the same."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _from_rank(error: Exception, rank: int) -> Exception:
    """Returns the error of another process, with its rank in the message."""
    if isinstance(error, QuantkitError):
        return type(error)(f"process {rank}: {error}")
    error.add_note(f"(raised in process {rank}, whose own traceback is above or below)")
    return error
