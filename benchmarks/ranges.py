"""What calibrated ranges do to SmolLM2: perplexity by method, by ranges of weights, and with
quantizers kept in float.

Ranges are made by `quantkit calibrate`'s own stage from the first blocks of `pydoc`, perplexity is
of the blocks behind them, by the cells of `quantkit sweep`; quantizers to keep are looked for
behind those, so that no text that is reported on chose anything. The model is loaded once for all
cells; `ranges s` is the whole stage (it loads the model where it needs one, and diagnoses every
tensor for `calibration.json`), `score s` the cell. Intervals: 95 %, over resampled blocks.

1. W8A8 by method: one pass, each method chosen from it; then one pass with `--smooth auto`.
2. Weights at 4 bits, inputs in float. Groups of 32 are left out: SmolLM2's weights are exact there.
3. W8A8, smoothed, with the worst quantizers in float (`quantkit sensitivity`, enable-one): those
   that it suggests, or the 16 worst where no number of them reaches its target.

    python benchmarks/ranges.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from quantkit import __version__
from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.jobs import CalibrateJob
from quantkit.models import LoadedModel, load
from quantkit.pipelines import run_calibrate
from quantkit.pipelines.held_out import HeldOut, held_out, read_ranges, require_own
from quantkit.pipelines.weights import read_weights
from quantkit.recipe import Recipe
from quantkit.results import DataInfo, Ranges
from quantkit.results.environment import environment
from quantkit.search import sensitivity
from quantkit.sweeps import Subject, run_cells, unique
from quantkit.sweeps.figures import cells_of, figures_of
from quantkit.tasks import Perplexity

OUT = Path(__file__).parent / "results" / "ranges.json"
MODEL, TEXT = "smollm2", "pydoc"
SEQ_LEN = 256
BATCH_SIZE = 4
SEED = 0
PASS, SMOOTH = "minmax", "minmax --smooth auto"
"""The runs that observe; all others are chosen from them."""
CHOSEN: dict[str, tuple[str, dict[str, Any]]] = {
    "moving-average": (PASS, {"method": "moving-average"}),
    "mse": (PASS, {"method": "mse"}),
    "upper-percentile:99.999": (PASS, {"method": "upper-percentile:99.999"}),
    "two-sided-percentile:99.999": (PASS, {"method": "two-sided-percentile:99.999"}),
    "two-sided-percentile": (PASS, {"method": "two-sided-percentile"}),
    "entropy": (PASS, {"method": "entropy"}),
    "minmax --exclude-first": (PASS, {"exclude_first": True}),
    "mse --smooth auto": (SMOOTH, {"method": "mse"}),
}
WEIGHTS = [(unit, method) for unit in ("channel", "group:64") for method in ("minmax", "mse")]
WEIGHT_BITS = 4
RECIPE = "w8a8"
WORST = 16
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many blocks are taken, and of how many tokens those of the search are."""

    calib: int = 32
    evaluation: int = 8
    search: int = 2
    search_len: int = 128


FULL, QUICK = Sizes(), Sizes(calib=4, evaluation=2, search=1, search_len=32)


@dataclass(kw_only=True)
class Stand:
    """What every row shares.

    Attributes:
        folder: Of all runs, one in each folder by its row's name.
        held: Set by the first run; the text of all cells.
        made_s: Seconds of each run's stage.
    """

    folder: Path
    loaded: LoadedModel
    sizes: Sizes
    held: HeldOut | None = None
    made_s: dict[str, float] = field(default_factory=dict)

    def calibrate(self, name: str, **options: Any) -> None:
        """Makes the run of that name."""
        job = CalibrateJob(out=str(self._run(name)), **options)
        _, self.made_s[name] = timed(name, lambda: run_calibrate(job))

    def observe(self, name: str, **options: Any) -> None:
        """Makes the run of that name by a pass."""
        self.calibrate(
            name,
            model=MODEL,
            calib=TEXT,
            seq_len=SEQ_LEN,
            samples=self.sizes.calib,
            batch_size=BATCH_SIZE,
            **options,
        )

    def choose(self, name: str, source: str, **options: Any) -> None:
        """Makes the run of that name from what another observed."""
        self.calibrate(name, from_run=str(self._run(source)), **options)

    def ranges(self, name: str) -> Ranges:
        """Returns a run's ranges, of the one model and data."""
        run = str(self._run(name))
        found = read_ranges(run)
        require_own(found, run, self.loaded)
        if self.held is None:
            self.held = held_out(
                TEXT,
                run,
                found,
                self.loaded,
                seq_len=SEQ_LEN,
                samples=self.sizes.evaluation,
                allow_overlap=False,
            )
        return found

    @property
    def text(self) -> TokenSlice:
        """The blocks that perplexity is of."""
        assert self.held is not None, "the first run fixes it"
        assert self.held.text.sequences == self.sizes.evaluation, f"{TEXT} is too short"
        return self.held.text

    def score(self, name: str, recipe: str, keep: Collection[str] = ()) -> dict[str, Any]:
        """Returns a row, the float one for recipe `none`: a cell that is shared by all runs."""
        ranges = self.ranges(name)
        task = Perplexity.of(self.text, self.loaded.tokenizer, batch_size=BATCH_SIZE)
        subject = Subject(
            loaded=self.loaded,
            group=self.loaded.name,
            tasks=[task],
            ranges=ranges,
            weight_ranges=read_weights(str(self._run(name)), ranges),
            keep=keep,
        )
        recipes = unique([Recipe(), Recipe.parse(recipe)])
        measured, seconds = timed(
            f"{name}: {recipe}",
            lambda: run_cells(subject, recipes, store=self.folder / "cells"),
        )
        found = measured[-1]
        figures = figures_of(
            model=self.loaded.name,
            recipe=found.recipe,
            task=task.name,
            items=task.item_hashes,
            scores=found.scores,
            fired=found.fired,
            seed=SEED,
        )
        cell = cells_of(figures)[0]
        assert cell.recipe == recipe, cell.recipe
        return {
            "ranges": "float" if recipe == "none" else name,
            "recipe": recipe,
            "perplexity": round(cell.value, 3),
            "ci_low": round(cell.ci_low, 3),
            "ci_high": round(cell.ci_high, 3),
            "hits": cell.hits,
            "ranges_s": None if recipe == "none" else round(self.made_s[name], 1),
            "score_s": round(seconds, 1),
        }

    def _run(self, name: str) -> Path:
        return self.folder / name.replace(":", "-").replace(" ", "_")


def timed(what: str, work: Callable[[], T]) -> tuple[T, float]:
    """Returns what the work returns, and its seconds."""
    started = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - started
    print(f"{what}: {seconds:.1f} s", flush=True)
    return found, seconds


def methods(stand: Stand) -> list[dict[str, Any]]:
    """Returns the float row and one for each way to choose ranges of inputs."""
    stand.observe(PASS)
    rows = [stand.score(PASS, "none"), stand.score(PASS, RECIPE)]
    smooth_row: list[dict[str, Any]] = []
    for name, (source, options) in CHOSEN.items():
        if source == SMOOTH and not smooth_row:
            stand.observe(SMOOTH, smooth="auto")
            smooth_row.append(stand.score(SMOOTH, RECIPE))
            rows += smooth_row
        stand.choose(name, source, **options)
        rows.append(stand.score(name, RECIPE))
    return rows


def weights(stand: Stand) -> list[dict[str, Any]]:
    """Returns a row for each way to choose ranges of weights; each has its mean SQNR too."""
    rows = []
    for unit, method in WEIGHTS:
        name = f"--weights {unit} --weight-method {method}"
        stand.choose(name, PASS, weights=unit, weight_method=method, weight_bits=WEIGHT_BITS)
        row = stand.score(name, f"w{WEIGHT_BITS}")
        info = stand.ranges(name).weights
        assert info is not None
        sqnr = [figures.sqnr_db for figures in info.modules.values()]
        rows.append(row | {"sqnr_mean_db": round(sum(sqnr) / len(sqnr), 2)})
    return rows


def kept(stand: Stand) -> dict[str, Any]:
    """Returns the rows without and with the worst quantizers in float, and which these are."""
    ranges, sizes, seen = stand.ranges(SMOOTH), stand.sizes, stand.text
    behind = math.ceil(seen.spans[-1].end / (sizes.search_len - seen.prefix - seen.suffix))
    text = text_slice(
        TEXT,
        stand.loaded.tokenizer,
        seq_len=sizes.search_len,
        samples=sizes.search,
        skip=behind,
        bos=seen.bos,
    )
    require_disjoint(seen, text, "evaluation and the search")
    found, seconds = timed(
        "sensitivity",
        lambda: sensitivity(
            stand.loaded,
            text,
            Recipe.parse(RECIPE),
            ranges,
            batch_size=BATCH_SIZE,
            ranges_run=SMOOTH,
            store=stand.folder / "sensitivity",
            modes=("enable-one",),
        ),
    )
    worst = [name for row in found.rows[:WORST] for name in row.quantizers]
    keep = found.keep if found.reached else worst
    assert keep, "nothing costs anything"
    without = stand.score(SMOOTH, RECIPE)
    with_kept = stand.score(SMOOTH, RECIPE, keep=keep)
    return {
        "data": data_of(text.info(BATCH_SIZE)),
        "modes": found.modes,
        "seconds": round(seconds, 1),
        "units": len(found.rows),
        "total_kl": found.total_kl,
        "target_frac": found.target_frac,
        "remaining": {str(point.units): round(point.remaining_frac, 4) for point in found.kept},
        "reached": found.reached,
        "kept": len(keep),
        "keep": keep,
        "rows": [without | {"kept": 0}, with_kept | {"kept": len(keep)}],
    }


def data_of(data: DataInfo) -> dict[str, Any]:
    """Returns what a result says about a slice, without its block hashes."""
    return {
        "text": data.source,
        "blocks": data.sequences,
        "seq_len": data.seq_len,
        "skipped_blocks": data.skipped_blocks,
        "sha256": data.sha256,
        "shared_blocks": data.shared_blocks,
    }


def measure(folder: Path, sizes: Sizes, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns every figure; `write` gets what there is after each part."""
    loaded, load_s = timed("load", lambda: load(MODEL))
    stand = Stand(folder=folder, loaded=loaded, sizes=sizes)
    rows = methods(stand)
    assert stand.held is not None
    result: dict[str, Any] = {
        "what": f"perplexity of {MODEL} by the ranges it is quantized with; {TEXT}, float32",
        "environment": environment() | {"quantkit": __version__},
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "batch_size": BATCH_SIZE,
        "model_sha256": loaded.sha256,
        "calibration": data_of(stand.ranges(PASS).data),
        "evaluation": data_of(stand.held.noted(stand.text.info(BATCH_SIZE))),
        "load_s": round(load_s, 1),
        "methods": rows,
    }
    write(result)
    result["weights"] = weights(stand)
    write(result)
    result["sensitivity"] = kept(stand)
    write(result)
    return result


def _print_rows(title: str, rows: list[dict[str, Any]], more: dict[str, str]) -> None:
    heads = "".join(f" {head:>9}" for head in more.values())
    print(f"\n{title:<46} {'perplexity':>10} {'95 %':>20}{heads} {'ranges s':>9} {'score s':>8}")
    for row in rows:
        interval = f"{row['ci_low']:,.2f} to {row['ci_high']:,.2f}"
        cells = "".join(f" {row[key]:>9}" for key in more)
        made = "" if row["ranges_s"] is None else f"{row['ranges_s']:.1f}"
        print(
            f"{row['ranges']:<46} {row['perplexity']:>10,.2f} {interval:>20}{cells} "
            f"{made:>9} {row['score_s']:>8.1f}"
        )


def _print_tables(result: dict[str, Any]) -> None:
    _print_rows(f"1. {RECIPE}, by ranges", result["methods"], {})
    _print_rows(f"2. w{WEIGHT_BITS}, by ranges", result["weights"], {"sqnr_mean_db": "SQNR dB"})
    found = result["sensitivity"]
    _print_rows(f"3. {RECIPE}, quantizers in float", found["rows"], {"kept": "kept"})
    how = "as suggested" if found["reached"] else "the worst: none reaches the target"
    print(
        f"kept {found['kept']} of {found['units']}, {how}; sensitivity took "
        f"{found['seconds']:.1f} s on {found['data']['blocks']} x {found['data']['seq_len']} "
        "tokens; KL that remains: "
        + ", ".join(f"{units} kept {frac:.3f}" for units, frac in found["remaining"].items())
    )


def main() -> None:
    """Measures, writes the file, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few blocks; no file without --out")
    parser.add_argument("--out", type=Path, default=None, help=f"default: {OUT.name} in results/")
    options = parser.parse_args()
    out: Path | None = options.out or (None if options.quick else OUT)

    def write(result: dict[str, Any]) -> None:
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as aside:
        _print_tables(measure(Path(aside), QUICK if options.quick else FULL, write))


if __name__ == "__main__":
    main()
