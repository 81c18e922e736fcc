"""Write points: the moments at which what a run has on disk changes, numbered, each a place to die.

Python's own ways to a file are wrapped, in the process that is to die and nowhere else: what opens,
closes, moves, removes, cuts or syncs a file below one folder passes a point before or behind it. At
the close of a file that was written a run dies with half of what it wrote, as if the processor had
stopped between two writes. Writers outside of Python (safetensors, tokenizers) pass one behind
their call, and die there with half of their file.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_WRITES: Final = os.O_WRONLY | os.O_RDWR
_SUFFIX: Final = re.compile(r"(?<=[^/])([.-])[a-z0-9_]{8}(?=/|$)")
"""What tempfile puts behind a name, another one in each run."""


@dataclass
class Points:
    """The points that a process has passed.

    Attributes:
        root: Only files below it count.
        kill_at: The number of the point to die at, from 1; 0: none.
        log: Open file that takes a line a point: what happens, and to which file.
    """

    root: str
    kill_at: int
    log: int
    passed: int = 0

    def passing(self, what: str, path: Any, spoil: Callable[[], object] | None = None) -> None:
        """Counts a point, and dies there where it is the one.

        Args:
            spoil: What is done to the file before.
        """
        name = self._below(path)
        if name is None:
            return
        self.passed += 1
        os.write(self.log, f"{what} {name}\n".encode(errors="replace"))
        if self.passed == self.kill_at:
            if spoil is not None:
                spoil()
            os.killpg(0, signal.SIGKILL)
            time.sleep(60)  # the signal is on its way

    def _below(self, path: Any) -> str | None:
        """Returns the path below the root, without what differs from run to run."""
        found = os.path.abspath(os.fsdecode(path))
        if not found.startswith(self.root + os.sep):
            return None
        return _SUFFIX.sub(r"\1*", found[len(self.root) + 1 :])


def install(points: Points) -> None:
    """Wraps this process's ways to a file; there is no way back."""
    _wrap_moves(points)
    _wrap_files(points)
    _wrap_foreign(points)


def _wrap_moves(points: Points) -> None:
    for name in ("replace", "rename"):
        setattr(os, name, _moving(points, getattr(os, name)))
    for name in ("unlink", "remove", "rmdir", "mkdir", "truncate"):
        setattr(os, name, _changing(points, name, getattr(os, name)))


def _moving(points: Points, plain: Callable[..., Any]) -> Callable[..., Any]:
    def moved(source: Any, target: Any, **more: Any) -> Any:
        points.passing("before the move to", target)
        plain(source, target, **more)
        points.passing("after the move to", target)

    return moved


def _changing(points: Points, what: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def changed(path: Any, *given: Any, **more: Any) -> Any:
        plain(path, *given, **more)
        if isinstance(path, int):
            return
        base = more.get("dir_fd")
        if base is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{base}"), os.fsdecode(path))
        points.passing(f"after {what} of", path)

    return changed


def _wrap_files(points: Points) -> None:
    plain_open, plain_os_open, plain_fsync = io.open, os.open, os.fsync

    def opened(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        found = plain_open(file, mode, *given, **more)
        if not set(mode) & set("wxa"):
            return found
        path = os.readlink(f"/proc/self/fd/{found.fileno()}")
        if not isinstance(file, int):
            points.passing("behind the opening of", path)
        begun = os.fstat(found.fileno()).st_size
        plain_close = found.close

        def close() -> None:
            if not found.closed:
                found.flush()
                points.passing("half of", path, lambda: _halve(path, begun))
            plain_close()

        found.close = close
        return found

    def os_opened(path: Any, flags: int, *given: Any, **more: Any) -> int:
        handle = plain_os_open(path, flags, *given, **more)
        if flags & _WRITES and flags & os.O_CREAT:
            points.passing("behind the opening of", os.readlink(f"/proc/self/fd/{handle}"))
        return handle

    def synced(handle: Any) -> None:
        plain_fsync(handle)
        points.passing("all of", os.readlink(f"/proc/self/fd/{int(handle)}"))

    io.open = builtins.open = opened  # type: ignore[assignment]
    os.open, os.fsync = os_opened, synced  # type: ignore[assignment]


def _wrap_foreign(points: Points) -> None:
    import safetensors.torch
    from transformers import PreTrainedTokenizerBase

    plain_serialize = safetensors.torch.serialize_file
    plain_save = PreTrainedTokenizerBase.save_pretrained

    def serialized(tensors: Any, filename: Any, *given: Any, **more: Any) -> None:
        plain_serialize(tensors, filename, *given, **more)
        points.passing("half of", filename, lambda: _halve(filename))

    def saved(self: Any, folder: Any, *given: Any, **more: Any) -> Any:
        found = plain_save(self, folder, *given, **more)
        file = Path(folder) / "tokenizer.json"
        points.passing("half of", file, lambda: _halve(file))
        return found

    safetensors.torch.serialize_file = serialized
    PreTrainedTokenizerBase.save_pretrained = saved  # type: ignore[method-assign]


def _halve(path: Any, begun: int = 0) -> None:
    """Cuts off half of what was written behind `begun`."""
    with io.FileIO(os.fsdecode(path), "r+") as file:
        file.truncate(begun + (os.path.getsize(path) - begun) // 2)
