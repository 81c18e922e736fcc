"""A run of the command line in a process of its own that can be killed: forked, not started.

To import everything takes longer than the commands do on small models, so that one process imports
it once, computes nothing, and forks. What a kill leaves on disk is the same.

Two things are not as in a run of its own. Clocks and memory meters of exported graphs stand still:
their figures differ from run to run, and what `--quantize auto` chooses hangs on them; all else
that a killed run writes must be as if it had not been killed. And torch's tracer, which writes
nothing and takes most of an export, traces the same weights once (`Traced`).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import onnx_ir as ir
from transformers.exporters.exporter_onnx import OnnxExporter

from .points import Points, install

_WAIT_S: Final = 600.0
"""For a run that is not to be killed; who takes longer hangs."""
_POLL_S: Final = 0.002
_EXPORTER: Final[Any] = OnnxExporter


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: What it exited with; -9: killed.
        points: The write points that it passed, in words.
        said: What it printed, stdout and stderr.
    """

    code: int
    seconds: float
    points: list[str]
    said: str

    @property
    def killed(self) -> bool:
        """Whether it was killed."""
        return self.code == -signal.SIGKILL


class Traced:
    """Stands for transformers' exporter: what it has traced of the same weights is read again."""

    folder: ClassVar[Path]

    def export(self, model: Any, sample: Any, config: Any) -> Any:
        """Returns what has the traced graph as its `program`."""
        digest = hashlib.sha256(str(config).encode())
        for name, weight in model.state_dict().items():
            digest.update(name.encode() + weight.numpy().tobytes())
        path = self.folder / f"{digest.hexdigest()[:16]}.onnx"
        if not path.is_file():
            self.folder.mkdir(exist_ok=True)
            own = path.with_suffix(f".{os.getpid()}")
            ir.save(_EXPORTER().export(model, sample, config).program, own, format="protobuf")
            own.rename(path)
        return SimpleNamespace(program=ir.load(path, format="protobuf"))


def command(
    arguments: Sequence[str], root: Path, *, kill_at: int = 0, kill_after_s: float = _WAIT_S
) -> Ended:
    """Returns how `quantkit ARGUMENTS` ended, killed at a point below `root`, or at a time.

    Raises:
        TimeoutError: it was not to be killed by the clock, and has not ended after ten minutes.
    """
    return forked(lambda: _run(arguments), root, kill_at=kill_at, kill_after_s=kill_after_s)


def forked(
    work: Callable[[], object], root: Path, *, kill_at: int = 0, kill_after_s: float = _WAIT_S
) -> Ended:
    """Returns how some work ended in a child; see `command`."""
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as talk:
        begun = time.perf_counter()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _be_child(work, Points(root=str(root), kill_at=kill_at, log=log.fileno()), talk)
        status = _wait(child, begun + kill_after_s)
        seconds = time.perf_counter() - begun
        if kill_after_s >= _WAIT_S and seconds >= _WAIT_S:
            raise TimeoutError(f"a run did not end within {_WAIT_S:g} s")
        log.seek(0)
        talk.seek(0)
        return Ended(
            code=os.waitstatus_to_exitcode(status),
            seconds=seconds,
            points=log.read().decode().splitlines(),
            said=talk.read().decode(errors="replace"),
        )


def _wait(child: int, until: float) -> int:
    """Returns the status of a child, which is killed with its own children when it is time."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if time.perf_counter() >= until:
            break
        time.sleep(_POLL_S)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to lead a group yet, or has just ended
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _be_child(work: Callable[[], object], points: Points, talk: Any) -> None:
    code = 1
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(talk.fileno(), number)
        install(points)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _run(arguments: Sequence[str]) -> None:
    from quantkit.cli import main
    from quantkit.exporting import float_export, proof
    from quantkit.search import judge

    float_export.OnnxExporter = Traced  # type: ignore[misc, assignment]
    proof.latencies_of = lambda *_: {"float": 2.0, "quantized": 1.0}
    proof.memory_of = lambda *_: {"float": 2_000_000, "quantized": 1_000_000}
    judge.paired_latency = lambda *_: (2.0, 1.0)
    sys.argv = ["quantkit", *arguments]
    main()


def import_all() -> None:
    """Imports what any command imports, so that its children need not."""
    import accelerate  # noqa: F401
    import onnxruntime  # noqa: F401
    import vl_convert  # noqa: F401

    import quantkit.api.verbs
    import quantkit.cli.commands
    import quantkit.pipelines
    import quantkit.reporting  # noqa: F401
