"""`run_sensitivity`: ranges of an earlier run and held-out text in, `sensitivity.json` out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.errors import InputError
from quantkit.models import LoadedModel, is_decoder_only, load
from quantkit.pipelines.runs import open_run
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import DataInfo, Ranges, read_json, write_json
from quantkit.search import sensitivity
from quantkit.search.job import SensitivityJob


def run_sensitivity(job: SensitivityJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `sensitivity.json`; what was measured so far stands in `cells/`.

    Raises:
        InputError: no `ranges.json`, ranges of another model, or text that calibration has seen.
    """
    ranges = _ranges(job)
    run = open_run("sensitivity", job)
    if run.finished:
        return run.folder
    loaded = load(job.model, dtype=job.dtype, device=job.device)
    _require_decoder(loaded, job.model)
    if ranges.model.sha256 != loaded.sha256:
        raise InputError(
            f"{job.ranges}: ranges of another model ({ranges.model.name}, sha256 "
            f"{ranges.model.sha256[:10]}; {loaded.name} has {loaded.sha256[:10]}): calibrate this "
            "one first."
        )
    text, shared, warnings = _held_out(job, loaded, ranges)
    found = sensitivity(
        loaded,
        text,
        Recipe.parse(job.recipe),
        ranges,
        batch_size=job.batch_size,
        store=run.folder / "cells",
        progress=progress,
        modes=job.modes,
        group=job.group,
        weights=job.weights,
        target_frac=job.target_frac,
    )
    data = dataclasses.replace(found.data, shared_blocks=shared)
    write_json(
        run.folder / "sensitivity.json", dataclasses.replace(found, data=data, warnings=warnings)
    )
    run.finish()
    return run.folder


def _ranges(job: SensitivityJob) -> Ranges:
    path = Path(job.ranges)
    if path.is_dir():
        path = path / "ranges.json"
    if not path.is_file():
        raise InputError(
            f"--ranges {job.ranges}: no ranges.json there: expected the folder of a finished "
            "`quantkit calibrate` or `quantkit compare`."
        )
    return read_json(path, Ranges)


def _require_decoder(loaded: LoadedModel, name: str) -> None:
    config = getattr(loaded.model, "config", None)
    head = getattr(loaded.model, "get_output_embeddings", lambda: None)()
    if config is None or head is None or not is_decoder_only(config):
        raise InputError(
            f"{name} is a {type(loaded.model).__name__}: expected a causal language model here."
        )


def _held_out(
    job: SensitivityJob, loaded: LoadedModel, ranges: Ranges
) -> tuple[TokenSlice, int, list[str]]:
    """Returns text to measure on, how many blocks calibration has seen of it, and warnings.

    Calibration's slice is cut again and compared with; of one source, what comes after it is taken.
    """
    seen = ranges.data
    calib = _cut_again(loaded, seen)
    is_same = job.eval in (seen.source, seen.named_set)
    text = text_slice(
        job.eval,
        loaded.tokenizer,
        seq_len=job.seq_len,
        samples=job.samples,
        skip=_used(calib, job.seq_len) if is_same and calib is not None else 0,
        bos=seen.bos,
    )
    if calib is not None:
        shared = require_disjoint(
            calib, text, "calibration and evaluation", allow=job.allow_overlap
        )
        said = f"this text and calibration's share {shared} blocks: it is not held out."
        return text, shared, [said] if shared else []
    if not job.allow_overlap:
        raise InputError(
            f"{job.ranges}: its text ({seen.source}) is not there as it was, so {job.eval} cannot "
            "be proven to be held out: put it back, calibrate again, or --allow-overlap."
        )
    shared = len(set(text.block_hashes) & set(seen.block_hashes))
    return text, shared, ["calibration's text is gone: it may have seen what was measured on."]


def _cut_again(loaded: LoadedModel, seen: DataInfo) -> TokenSlice | None:
    """Returns calibration's slice, None where it is not what it was."""
    try:
        calib = text_slice(
            seen.source,
            loaded.tokenizer,
            seq_len=seen.seq_len,
            samples=seen.sequences,
            skip=seen.skipped_blocks,
            bos=seen.bos,
        )
    except InputError:
        return None
    return calib if calib.sha256 == seen.sha256 else None


def _used(calib: TokenSlice, seq_len: int) -> int:
    """Returns after how many blocks of `seq_len` tokens calibration's slice ends."""
    if not calib.spans:  # documents, one a block
        return calib.skip + calib.sequences
    body = max(1, seq_len - calib.prefix - calib.suffix)
    return math.ceil(calib.spans[-1].end / body)
