"""`with record(model) as recording:` measures whatever the program runs through its model.

For a model that no folder holds, data that no slice describes, or a forward pass in the middle of
other work. Gradients, modes and devices stay as they are.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.outliers.assemble import Assembly
from quantkit.outliers.collect import DEFAULT_POINTS, QUANTILES
from quantkit.outliers.maps import RowSampling
from quantkit.outliers.recording import Recording
from quantkit.probes import attach, has_point
from quantkit.results import DataInfo, Stats
from quantkit.results.environment import environment


@dataclass
class Session:
    """What `record` yields; `stats()` says what was seen so far.

    Attributes:
        forwards: Calls of the model; `sequences`: rows of their first tensors.
    """

    loaded: LoadedModel
    recording: Recording
    quantiles: Sequence[float]
    count_masked: bool
    rows: int | None
    seed: int
    forwards: int = 0
    sequences: int = 0
    _open: int = field(default=0, repr=False)

    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Starts a forward pass: its sequences are counted from those before."""
        self.recording.begin(self.sequences)
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0)
        self._open = len(next(tensors, ()))

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Ends it."""
        self.recording.end()
        self.forwards += 1
        self.sequences += self._open

    def stats(self) -> Stats:
        """Returns the statistics of every forward pass so far.

        Raises:
            InputError: the model has not run yet.
        """
        if not self.forwards:
            raise InputError("nothing was recorded: run the model inside `with record(model)`.")
        assembly = Assembly(
            recording=self.recording,
            token=lambda sequence, position: None,
            quantiles=self.quantiles,
            count_masked=self.count_masked,
        )
        return Stats(
            model=self.loaded.info(),
            data=DataInfo(
                source="recorded in a program",
                sha256="",
                sequences=self.sequences,
                seq_len=0,
                tokens=0,
                batch_size=0,
                bos="never",
                block_hashes=[],
                skipped_blocks=0,
                python=platform.python_version(),
            ),
            environment=environment(),
            summary=assembly.summary(),
            points=assembly.points(),
            sampled_rows=self.rows,
            seed=self.seed,
            differential=assembly.differential(),
            hits=assembly.hits(),
            warnings=self.recording.nonfinite(),
        )


@contextmanager
def record(
    model: nn.Module,
    *,
    name: str = "model",
    points: Sequence[str] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    rows: int | None = None,
    seed: int = 0,
    count_masked: bool = False,
    layers: str | Sequence[str] | None = None,
    select: str | Sequence[str] | None = None,
    allow_unseen: str | Sequence[str] = (),
) -> Iterator[Session]:
    """Yields a recording of every forward pass of a model; options as in `collect`.

    Raises:
        ProbeError: as `probes.attach`; on leaving, a module at which a probe never fired.
    """
    if points is None:
        points = [point for point in DEFAULT_POINTS if has_point(model, point)]
    recording = Recording.of(points, RowSampling(rows=rows, seed=seed))
    session = Session(
        loaded=LoadedModel(name=name, source="a program", model=model, tokenizer=None, sha256=""),
        recording=recording,
        quantiles=quantiles,
        count_masked=count_masked,
        rows=rows,
        seed=seed,
    )
    before = model.register_forward_pre_hook(session.begin, with_kwargs=True)
    after = model.register_forward_hook(session.end)
    try:
        with attach(
            model,
            recording.callbacks(),
            count_masked=count_masked,
            layers=layers,
            select=select,
            allow_unseen=allow_unseen,
        ) as attachment:
            yield session
        recording.add_hits(
            {
                point: {place: (hits.calls, hits.elements) for place, hits in modules.items()}
                for point, modules in attachment.hits.items()
            }
        )
    finally:
        before.remove()
        after.remove()
