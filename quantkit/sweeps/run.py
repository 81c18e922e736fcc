"""models x bits x granularity -> cells of accuracy, each written when it ends.

Time: one plain forward over the text, and about two for each quantized cell. Memory as one forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.calib_sets import TokenBatch, TokenSlice
from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.progress import Progress, silent
from quantkit.quantization import fake_quantized, require_ranges
from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe
from quantkit.results import Cell, Delta, Ranges, to_plain
from quantkit.results.io import read_plain, write_json
from quantkit.tasks import BlockScores, score_blocks

RESAMPLES = 2000
CELL_SCHEMA = "quantkit.cell/1"


def logit_recipes(bits: Sequence[int], granularity: Sequence[str]) -> list[Recipe]:
    """Returns the sweep's rows: the float one first, always, then bits x granularity."""
    recipes = [Recipe()]
    for width in bits:
        if width != UNQUANTIZED_BITS:
            for name in granularity:
                quant = LogitQuant(bits=width, granularity=name)  # type: ignore[arg-type]
                recipes.append(Recipe(logits=quant))
    return recipes


def run_cells(
    loaded: LoadedModel,
    text: TokenSlice,
    recipes: Sequence[Recipe],
    *,
    ranges: Ranges | None = None,
    weight_ranges: WeightRanges | None = None,
    keep: Collection[str] = (),
    batch_size: int,
    seed: int,
    store: Path,
    progress: Progress = silent,
) -> tuple[list[Cell], list[Delta]]:
    """Returns a cell for each recipe and its paired difference from the float row.

    Args:
        ranges: For static grids; their smoothing is applied to every quantized row.
        weight_ranges: Those that `ranges.weights` describes.
        keep: Quantizers that stay in float in every row.
        store: Folder for one file a finished cell; a cell that is there is not computed again.

    Raises:
        InputError: ranges that were chosen for another width than a recipe has, or are missing; an
            unknown name in `keep`.
    """
    for recipe in recipes:
        require_ranges(loaded.model, recipe, {} if ranges is None else ranges.tensors, keep=keep)
        if weight_ranges is not None and recipe.weight_bits is not None:
            weight_ranges.require_width(recipe.weight_bits)
    scores: dict[str, tuple[BlockScores, int]] = {}
    digest = digest_of(ranges, keep)
    for done, recipe in enumerate(recipes):
        name = f"{loaded.name} {recipe} (cell {done + 1} of {len(recipes)})"
        path = store / f"{loaded.name}_{str(recipe).replace(':', '-')}.json".replace("/", "-")
        own = "" if recipe.is_float else digest
        kept = _read_cell(path, loaded, text, own)
        if kept is None:
            kept = _score(
                loaded, text, recipe, ranges, weight_ranges, keep, batch_size, name, progress
            )
            _write_cell(path, loaded, text, own, kept)
        scores[str(recipe)] = kept
    baseline = scores["none"][0]
    cells, deltas = [], []
    for recipe in recipes:
        block_scores, hits = scores[str(recipe)]
        cells.append(_cell(loaded.name, recipe, block_scores, hits, seed))
        if not recipe.is_float:
            deltas.append(_delta(loaded.name, recipe, block_scores, baseline, seed))
    return cells, deltas


def _score(
    loaded: LoadedModel,
    text: TokenSlice,
    recipe: Recipe,
    ranges: Ranges | None,
    weight_ranges: WeightRanges | None,
    keep: Collection[str],
    batch_size: int,
    what: str,
    progress: Progress,
) -> tuple[BlockScores, int]:
    model = loaded.model

    def forward(batch: TokenBatch) -> torch.Tensor:
        output = model(
            input_ids=batch.input_ids.to(model.device),
            attention_mask=batch.attention_mask.to(model.device),
            use_cache=False,
        )
        logits: torch.Tensor = output.logits.cpu()
        return logits

    tensors = None if ranges is None else ranges.tensors
    smoothing = None if ranges is None or recipe.is_float else ranges.smoothing
    with fake_quantized(
        model, recipe, tensors, keep=keep, smoothing=smoothing, weight_ranges=weight_ranges
    ) as quantizers:
        scores = score_blocks(forward, text, batch_size=batch_size, what=what, progress=progress)
    return scores, quantizers.hits


def digest_of(ranges: Ranges | None, keep: Collection[str] = ()) -> str:
    """Returns the hash of what a quantized cell reads beside model and text; empty for nothing."""
    if ranges is None and not keep:
        return ""
    read: list[Any] = [sorted(keep)]
    if ranges is not None:
        read += [ranges.tensors, ranges.smoothing, ranges.weights and ranges.weights.sha256]
    plain = to_plain(read)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _write_cell(
    path: Path,
    loaded: LoadedModel,
    text: TokenSlice,
    ranges_sha256: str,
    kept: tuple[BlockScores, int],
) -> None:
    scores, hits = kept
    plain: dict[str, Any] = {
        "schema": CELL_SCHEMA,
        "model_sha256": loaded.sha256,
        "data_sha256": text.sha256,
        "ranges_sha256": ranges_sha256,
        "hits": hits,
        "nll": scores.nll.tolist(),
        "tokens": scores.tokens.tolist(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plain)


def _read_cell(
    path: Path, loaded: LoadedModel, text: TokenSlice, ranges_sha256: str
) -> tuple[BlockScores, int] | None:
    """Returns a finished cell of the same model, text and ranges, or None where there is none."""
    if not path.exists():
        return None
    plain = read_plain(path)
    if not isinstance(plain, dict) or plain.get("schema") != CELL_SCHEMA:
        raise InputError(f"{path.name}: expected a cell of schema {CELL_SCHEMA}; remove the file.")
    known = plain["model_sha256"], plain["data_sha256"], plain.get("ranges_sha256", "")
    if known != (loaded.sha256, text.sha256, ranges_sha256):
        return None
    scores = BlockScores(
        nll=np.array(plain["nll"]), tokens=np.array(plain["tokens"], dtype=np.int64)
    )
    return scores, int(plain["hits"])


def _resamples(blocks: int, seed: int) -> NDArray[np.int64]:
    """Returns which blocks each bootstrap resample takes, `[resamples, blocks]`."""
    return np.random.default_rng(seed).integers(0, blocks, size=(RESAMPLES, blocks))


def _resampled(scores: BlockScores, seed: int) -> NDArray[np.float64]:
    chosen = _resamples(len(scores.nll), seed)
    mean: NDArray[np.float64] = scores.nll[chosen].sum(1) / scores.tokens[chosen].sum(1)
    return np.exp(mean)


def _cell(model: str, recipe: Recipe, scores: BlockScores, hits: int, seed: int) -> Cell:
    resampled = _resampled(scores, seed)
    low, high = np.quantile(resampled, [0.025, 0.975])
    logits = recipe.logits
    return Cell(
        model=model,
        recipe=str(recipe),
        bits=UNQUANTIZED_BITS if logits is None else logits.bits,
        granularity=None if logits is None else logits.granularity,
        range=None if logits is None else logits.range,
        weights=recipe.weight_bits,
        activations=recipe.activation_bits,
        task="perplexity",
        metric="perplexity",
        value=scores.perplexity,
        stderr=float(resampled.std(ddof=1)),
        ci_low=float(low),
        ci_high=float(high),
        n=len(scores.nll),
        seed=seed,
        hits=hits,
    )


def _delta(
    model: str, recipe: Recipe, scores: BlockScores, baseline: BlockScores, seed: int
) -> Delta:
    """Paired: the same resampled blocks for both."""
    difference = _resampled(scores, seed) - _resampled(baseline, seed)
    low, high = np.quantile(difference, [0.025, 0.975])
    return Delta(
        model=model,
        recipe=str(recipe),
        against="none",
        task="perplexity",
        metric="perplexity",
        value=scores.perplexity - baseline.perplexity,
        ci_low=float(low),
        ci_high=float(high),
        n=len(scores.nll),
    )
