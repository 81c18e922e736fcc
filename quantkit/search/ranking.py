"""Which quantizers cost most, and which to keep in higher precision.

Two questions to each unit. Enable-one: what does it cost alone, in a float model? Disable-one: how
much of the whole cost goes when it alone stays in float? They differ where errors add up otherwise
than linearly: what an earlier layer has spoilt already, a later one cannot spoil again. The rank is
by enable-one: in a model that is quantized everywhere any change tips values elsewhere to their
next level, so that small effects drown. On SmolLM2 (w8a8, min-max) a q_proj that costs 2e-5 nats
alone "removed" 6 +- 3 % of 0.73; to leave 10 %, the 17 worst by enable-one had to stay in float, or
the 85 worst by disable-one.

Cost: KL(float || quantized) over the vocabulary, the mean over predicted tokens, in nats.

Time: batches outside, units inside, so that the float model runs once a batch. A unit of layer k
runs the layers from k on alone, about half a forward; where the model does not let that be (found
out by comparing bit for bit), whole ones. Then at most 2 log2(units) + 1 pairs of forwards a batch
find how many units to keep. Memory: a forward's, vocabulary logits of one batch twice, and what
each layer returned twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from quantkit.calib_sets import TokenBatch, TokenSlice
from quantkit.calibration import WeightRanges
from quantkit.errors import ProbeError
from quantkit.jobs.sensitivity import GROUPS, MODES, TARGET_FRAC
from quantkit.models import LoadedModel
from quantkit.progress import Progress, silent
from quantkit.quantization import quantizer_names, require_ranges
from quantkit.recipe import Recipe
from quantkit.results import KeptPoint, Ranges, Sensitivity, UnitSensitivity, dumps
from quantkit.results.environment import environment
from quantkit.search.bench import Bench
from quantkit.search.cells import Cell, Cells
from quantkit.search.divergence import Reference
from quantkit.search.keep import fewest_kept
from quantkit.search.rows import ALL, Sums, rows_of
from quantkit.search.units import Unit, units_of

KEEP: Final = "keep"


def sensitivity(
    loaded: LoadedModel,
    text: TokenSlice,
    recipe: Recipe,
    ranges: Ranges,
    *,
    ranges_run: str,
    weight_ranges: WeightRanges | None = None,
    batch_size: int,
    store: Path,
    progress: Progress = silent,
    modes: Sequence[str] = MODES,
    group: str = GROUPS[0],
    weights: bool = False,
    target_frac: float = TARGET_FRAC,
) -> Sensitivity:
    """Returns the units of the recipe, the worst first, and the fewest to keep in float.

    Args:
        text: Held out from the ranges' data; that is the caller's to see to.
        ranges: Of this model; where they smooth, the model is smoothed before it is quantized.
        ranges_run: What they were read from, for the result.
        weight_ranges: Those that `ranges.weights` describes.
        store: Folder for what is measured, a line a batch and unit; what is there is not measured
            again.
        modes: `enable-one`, `disable-one`, or both.
        group, weights: What a unit is, see `units_of`.
        target_frac: What of the whole error may remain after keeping.

    Raises:
        InputError: nothing to switch, or a range that is missing or of another width.
        ProbeError: an error that is not finite, by unit.
    """
    require_ranges(loaded.model, recipe, ranges.tensors)
    if weight_ranges is not None and recipe.weight_bits is not None:
        weight_ranges.require_width(recipe.weight_bits)
    names = quantizer_names(loaded.model, recipe)
    units = units_of(loaded.model, names, recipe, group=group, weights=weights)
    bench = Bench.of(loaded, recipe, ranges, units, weight_ranges)
    cells = Cells(store, _key(loaded, text, recipe, ranges, batch_size, bench.switches_weights))
    steps = math.ceil(text.sequences / batch_size) * (1 + len(modes) * len(units))
    done = 0

    def tell() -> None:
        nonlocal done
        progress(f"sensitivity of {loaded.name}", done, steps)
        done += 1

    for batch in text.batches(batch_size):
        _measure(bench, units, modes, batch, cells, tell)
    progress(f"sensitivity of {loaded.name}", steps, steps)
    rows = rows_of(units, modes, cells)
    total = Sums.of(cells, ALL, "")
    kept = _kept(bench, rows, total.mean, target_frac, text, batch_size, cells, progress)
    enough = [point for point in kept if point.remaining_frac < target_frac]
    return Sensitivity(
        model=loaded.info(),
        data=text.info(batch_size),
        ranges=ranges_run,
        calibration=ranges.data,
        method=ranges.method,
        environment=environment(),
        recipe=str(recipe),
        group=group,
        modes=list(modes),
        total_kl=total.mean,
        total_stderr=total.stderr(),
        rows=rows,
        target_frac=target_frac,
        reached=bool(enough) or total.mean <= 0,
        keep=[n for row in rows[: enough[0].units] for n in row.quantizers] if enough else [],
        kept=kept,
    )


def _key(
    loaded: LoadedModel,
    text: TokenSlice,
    recipe: Recipe,
    ranges: Ranges,
    batch_size: int,
    switches_weights: bool,
) -> dict[str, str]:
    """Returns all that a cell's number depends on, beside its own mode and unit."""
    read: list[object] = [ranges.tensors, ranges.smoothing]
    if ranges.weights is not None:
        read.append(ranges.weights.sha256)
    used = dumps(read)
    return {
        "model_sha256": loaded.sha256,
        "dtype": loaded.info().dtype,
        "data_sha256": text.sha256,
        "recipe": str(recipe),
        "ranges_sha256": hashlib.sha256(used.encode()).hexdigest(),
        "batch_size": str(batch_size),
        "weights": "switched" if switches_weights else "as the recipe",
    }


def _measure(
    bench: Bench,
    units: Sequence[Unit],
    modes: Sequence[str],
    batch: TokenBatch,
    cells: Cells,
    tell: Callable[[], None],
) -> None:
    """Measures what is missing of one batch."""

    def is_missing(mode: str, unit: str) -> bool:
        return cells.get(mode, unit, batch.first_sequence) is None

    todo = {mode: [u for u in units if is_missing(mode, u.name)] for mode in modes}
    lacks_all = is_missing(ALL, "")
    for _ in range(len(modes) * len(units) - sum(map(len, todo.values())) + (not lacks_all)):
        tell()
    if not lacks_all and not any(todo.values()):
        return
    keep = _scoring(bench, batch, cells)
    float_logits, before = bench.base(batch, ())
    reference = _reference(float_logits, batch)
    for unit in {unit.layer: unit for missing in todo.values() for unit in missing}.values():
        bench.learn_start(batch, before, unit.layer, float_logits)
    if todo.get("enable-one"):
        with bench.float_around():
            if bench.ranges.smoothing:  # rounds otherwise than the float model that it equals
                _, before = bench.base(batch, ())
            for unit in todo["enable-one"]:
                tell()
                logits = bench.resumed(batch, before, unit.layer, unit.quantizers)
                keep("enable-one", unit.name, reference, logits)
    with bench.quantized_around():
        logits, before = bench.base(batch, bench.names)
        if lacks_all:
            tell()
            keep(ALL, "", reference, logits)
        for unit in todo.get("disable-one", ()):
            tell()
            others = [name for name in bench.names if name not in unit.quantizers]
            logits = bench.resumed(batch, before, unit.layer, others)
            keep("disable-one", unit.name, reference, logits)


def _reference(logits: Any, batch: TokenBatch) -> Reference:
    real = batch.attention_mask.sum(1).tolist()
    return Reference(logits=logits, tokens=tuple(count - 1 for count in real))


def _scoring(
    bench: Bench, batch: TokenBatch, cells: Cells
) -> Callable[[str, str, Reference, Any], None]:
    def keep(mode: str, unit: str, reference: Reference, logits: Any) -> None:
        kl = reference.divergence(logits)
        if not all(map(math.isfinite, kl)):
            raise ProbeError(
                f"the KL of {unit or 'everything quantized'} ({mode}) is not finite in block "
                f"{batch.first_sequence} or after it: the model's logits hold NaN or inf."
            )
        cells.add(
            Cell(
                mode=mode,
                unit=unit,
                first_sequence=batch.first_sequence,
                kl=kl,
                tokens=list(reference.tokens),
            )
        )

    return keep


def _kept(
    bench: Bench,
    rows: Sequence[UnitSensitivity],
    total_kl: float,
    target_frac: float,
    text: TokenSlice,
    batch_size: int,
    cells: Cells,
    progress: Progress,
) -> list[KeptPoint]:
    """Returns what remains when the worst units stay in float, for the numbers that were tried."""
    if total_kl <= 0:
        return []

    def measure(count: int) -> float:
        kept = {name for row in rows[:count] for name in row.quantizers}
        # which ones they are is part of the name: another ranking keeps others
        which = hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()[:16]
        others = [name for name in bench.names if name not in kept]
        done = 0
        for batch in text.batches(batch_size):
            progress(f"keeping the {count} worst", done, text.sequences)
            done += len(batch.input_ids)
            if cells.get(KEEP, which, batch.first_sequence) is None:
                reference = _reference(bench.forward(batch), batch)
                with bench.quantized_around(), bench.switched_on(others):
                    logits = bench.forward(batch)
                _scoring(bench, batch, cells)(KEEP, which, reference, logits)
        progress(f"keeping the {count} worst", text.sequences, text.sequences)
        return Sums.of(cells, KEEP, which).mean

    return fewest_kept(measure, len(rows), total_kl=total_kl, target_frac=target_frac)
