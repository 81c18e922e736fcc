"""`with record(model) as recording:` measures whatever the program runs through its model.

For a model that no folder holds, data that no slice describes, or a forward pass in the middle of
other work. Gradients, modes and devices stay as they are.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.outliers.assemble import Assembly
from quantkit.outliers.collect import QUANTILES, chosen_points
from quantkit.outliers.maps import RowSampling
from quantkit.outliers.statistics import HIDDEN, ModelStatistics
from quantkit.probes import Attachment, Hook, attach
from quantkit.results import DataInfo, Stats


@dataclass
class Session:
    """What `record` yields; `stats()` says what was seen so far.

    Attributes:
        forwards: Calls of the model that ended; `sequences`: those of their hidden states.
        attachment: The probes, while they are in place.
    """

    loaded: LoadedModel
    statistics: ModelStatistics
    quantiles: Sequence[float]
    count_masked: bool
    rows: int | None
    seed: int
    forwards: int = 0
    sequences: int = 0
    attachment: Attachment | None = None

    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Starts a forward pass: its sequences are counted from those before."""
        self.statistics.begin(self.sequences)

    def end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Ends it; without an output it raised, and its batch is not counted."""
        self.statistics.end()
        if output is not None:
            self.forwards += 1
            self.sequences += self.statistics.activations[HIDDEN].batch

    def stats(self) -> Stats:
        """Returns the statistics of every forward pass so far.

        Raises:
            InputError: the model has not run yet.
        """
        if not self.forwards:
            raise InputError("nothing was recorded: run the model inside `with record(model)`.")
        statistics = self.statistics
        if self.attachment is not None:  # still inside the `with`
            statistics = dataclasses.replace(statistics, hits={}, notes=[])
            statistics.add_attachment(self.attachment)
        assembly = Assembly(
            statistics=statistics,
            token=lambda side, sequence, position: None,
            quantiles=self.quantiles,
            count_masked=self.count_masked,
        )
        data = DataInfo(
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
        )
        return assembly.stats(
            self.loaded.info(),
            data,
            rows=self.rows,
            seed=self.seed,
            processes=1,
            allow_unseen=[],
            waived=[],
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
    statistics = ModelStatistics.of(
        chosen_points(model, points, select), RowSampling(rows=rows, seed=seed)
    )
    session = Session(
        loaded=LoadedModel(name=name, source="a program", model=model, tokenizer=None, sha256=""),
        statistics=statistics,
        quantiles=quantiles,
        count_masked=count_masked,
        rows=rows,
        seed=seed,
    )
    before = model.register_forward_pre_hook(Hook(session.begin))
    after = model.register_forward_hook(Hook(session.end), always_call=True)
    try:
        with attach(
            model,
            statistics.callbacks(),
            count_masked=count_masked,
            layers=layers,
            select=select,
            allow_unseen=allow_unseen,
        ) as attachment:
            session.attachment = attachment
            yield session
        session.attachment = None
        statistics.add_attachment(attachment)
    finally:
        before.remove()
        after.remove()
