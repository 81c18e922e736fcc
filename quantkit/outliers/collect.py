"""batches x probes x observers -> `Stats`.

Time: about two plain forward passes; grows as a forward does (`benchmarks/recording.py`). Memory:
one batch's activations, a block of logits a thread, one layer's bins while it is scanned, and
observers of fixed size (about 60 KB a head and class): it does not grow with the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from quantkit.calib_sets import DataSlice, TokenSlice
from quantkit.models import LoadedModel, run_batch
from quantkit.numerics.tokens import warm_up
from quantkit.outliers.assemble import Assembly, TokenText
from quantkit.outliers.maps import RowSampling
from quantkit.outliers.statistics import ModelStatistics
from quantkit.probes import attach, has_point, require_seen
from quantkit.processes import Processes, uninterrupted
from quantkit.progress import Progress, silent
from quantkit.results import Stats

QUANTILES: Final = (0.99, 0.999)
DEFAULT_POINTS: Final = ("attention_output", "mlp_input", "mlp_down_input")
ALONE: Final = Processes()


def collect(
    loaded: LoadedModel,
    data: DataSlice,
    *,
    batch_size: int = 4,
    points: Sequence[str] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    rows: int | None = None,
    seed: int = 0,
    count_masked: bool = False,
    both_readings: bool = False,
    layers: str | Sequence[str] | None = None,
    select: str | Sequence[str] | None = None,
    allow_unseen: str | Sequence[str] = (),
    processes: Processes = ALONE,
    progress: Progress = silent,
) -> Stats | None:
    """Returns outlier statistics of one model on one slice of data.

    Only the backbone runs: vocabulary logits, the largest tensor of a forward, are never made.

    Args:
        points: Beside attention logits and hidden states; from `probes.POINTS`. None: all that
            the model has, but linear inputs.
        quantiles: Of |x|, as fractions, beside the median.
        rows: Query rows a sequence that enter moments and histogram of attention; None: all.
        count_masked: Count every entry of QK^T, masked ones too, as the DIFF paper's Table 5 does.
        both_readings: Summarize that reading too, beside the other: takes another pass over the
            logits.
        layers, select, allow_unseen: As in `probes.attach`.
        processes: Those that share the batches; all but the first get None.

    Raises:
        ProbeError: a layer that no probe saw, a pattern that matches nothing.
    """
    statistics = ModelStatistics.of(
        chosen_points(loaded.model, points, select),
        RowSampling(rows=rows, seed=seed),
        both_readings=both_readings,
    )
    allowed = (allow_unseen,) if isinstance(allow_unseen, str) else tuple(allow_unseen)
    processes.everywhere(
        lambda: run(
            statistics,
            loaded,
            data,
            batch_size=batch_size,
            processes=processes,
            progress=progress,
            count_masked=count_masked,
            layers=layers,
            select=select,
            # what one process's batches leave out, another's may see: judged when all is merged
            allow_unseen=[*allowed, *(["*"] if processes.count > 1 else [])],
        )
    )
    for other in processes.gather(statistics):
        if other is not statistics:
            statistics.absorb(other)
    found: list[Stats] = []

    def assemble() -> None:
        attachment, info = statistics.attachment(), loaded.info()
        require_seen(attachment, allowed)
        assembly = Assembly(
            statistics=statistics,
            token=token_text(loaded, data),
            quantiles=quantiles,
            count_masked=count_masked,
            two_sides=info.is_encoder_decoder,
        )
        stats = assembly.stats(
            info,
            data.info(batch_size),
            rows=rows,
            seed=seed,
            processes=processes.count,
            allow_unseen=allowed,
            waived=attachment.waived,
        )
        found.append(stats)

    processes.at_first(assemble)
    return found[0] if found else None


def chosen_points(
    model: Any, points: Sequence[str] | None, select: str | Sequence[str] | None
) -> list[str]:
    """Returns the points to measure: those asked for, else all but linear inputs that there are.

    Patterns on linear layers ask for their inputs.
    """
    if points is None:
        points = [point for point in DEFAULT_POINTS if has_point(model, point)]
    return [*points, *(["linear_input"] if select and "linear_input" not in points else [])]


def run(
    statistics: ModelStatistics,
    loaded: LoadedModel,
    data: DataSlice,
    *,
    batch_size: int,
    processes: Processes,
    progress: Progress,
    **attaching: Any,
) -> None:
    """Runs this process's batches through the model and records them; it may have none."""
    model = loaded.model
    batches = math.ceil(data.sequences / batch_size)
    mine = [index for index in range(batches) if processes.mine(index)]
    if not mine:
        return
    what = f"statistics of {loaded.name}"
    with uninterrupted():
        warm_up()
    with (
        torch.inference_mode(),
        attach(model, statistics.callbacks(), **attaching) as attachment,
    ):
        for index, batch in enumerate(data.batches(batch_size)):
            if not processes.mine(index):
                continue
            progress(what, mine.index(index), len(mine))
            statistics.begin(batch.first_sequence)
            run_batch(loaded, batch.inputs, data.source, whole=False)
            statistics.end()
    statistics.add_attachment(attachment)
    progress(what, len(mine), len(mine))


def token_text(loaded: LoadedModel, data: DataSlice) -> TokenText:
    """Returns a lookup of tokens; slices are padded on the right, so positions are indices."""

    def lookup(side: str, sequence: int, position: int) -> str | None:
        if loaded.tokenizer is None or not isinstance(data, TokenSlice):
            return None
        ids = data.ids[sequence]
        if side == "decoder":  # it reads the block one later, behind its start token
            position -= 1
        if position < 0:
            return str(loaded.tokenizer.decode([int(data.decoder_start or 0)]))
        if position >= len(ids):
            return None  # padding is seen where masked entries are asked for
        return str(loaded.tokenizer.decode([int(ids[position])]))

    return lookup
