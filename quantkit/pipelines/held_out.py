"""Ranges of an earlier run, and text that they have not seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.results import DataInfo, Ranges, Sensitivity, read_json


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Text to measure on.

    Attributes:
        shared: Blocks of it that calibration has seen too; 0 unless that was allowed.
        warnings: One sentence each, where it is not proven to be held out.
    """

    text: TokenSlice
    shared: int = 0
    warnings: tuple[str, ...] = ()

    def noted(self, data: DataInfo) -> DataInfo:
        """Returns what a result says about the text, with what calibration has seen of it."""
        warnings = [*data.warnings, *self.warnings]
        return replace(data, shared_blocks=self.shared, warnings=warnings)


def read_ranges(run: str) -> Ranges:
    """Returns the ranges of a run: a folder with `ranges.json`, or that file.

    Raises:
        InputError: there is none.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "ranges.json"
    if not path.is_file():
        raise InputError(
            f"--ranges {run}: no ranges.json there: expected the folder of a finished "
            "`quantkit calibrate` or `quantkit compare`."
        )
    return read_json(path, Ranges)


def require_own(ranges: Ranges, run: str, loaded: LoadedModel) -> None:
    """Raises InputError for the ranges of another model."""
    if ranges.model.sha256 != loaded.sha256:
        raise InputError(
            f"{run}: ranges of another model ({ranges.model.name}, sha256 "
            f"{ranges.model.sha256[:10]}; {loaded.name} has {loaded.sha256[:10]}): calibrate this "
            "one first."
        )


def require_unchanged(path: Path, then: str, now: str) -> None:
    """Raises InputError where a finished result was made from other ranges than there are now."""
    if then != now:
        raise InputError(
            f"{path} was made from other ranges, or with other tensors kept in float, than those "
            "that are there now: name another --out, or --force."
        )


def kept_in_float(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns names of quantizers; what names a run stands for what its `sensitivity.json` keeps.

    Raises:
        InputError: a folder without one, or one that suggests nothing.
    """
    names: list[str] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            path = path / "sensitivity.json"
        if path.suffix == ".json":
            found = read_json(path, Sensitivity)
            if not found.keep:
                raise InputError(
                    f"--keep {word} suggests nothing: no number of units leaves less than "
                    f"{100 * found.target_frac:g} % of the error. Name quantizers yourself, or "
                    "measure again with a larger --remaining."
                )
            names += found.keep
        else:
            names.append(word)
    return tuple(dict.fromkeys(names))


def held_out(
    source: str,
    run: str,
    ranges: Ranges,
    loaded: LoadedModel,
    *,
    seq_len: int,
    samples: int,
    allow_overlap: bool,
) -> HeldOut:
    """Returns text of `source` that calibration has not seen.

    Calibration's slice is cut again and compared with; of one source, what comes after it is taken.

    Args:
        run: What the ranges were read from, for messages.

    Raises:
        InputError: the ranges are of another model; calibration has seen the text, or nobody can
            tell, and `allow_overlap` is not set.
    """
    require_own(ranges, run, loaded)
    seen = ranges.data
    calib, why_not = _cut_again(loaded, seen)
    is_same = source in (seen.source, seen.named_set)
    text = text_slice(
        source,
        loaded.tokenizer,
        seq_len=seq_len,
        samples=samples,
        skip=_used(calib, seq_len) if is_same and calib is not None else 0,
        bos=seen.bos,
    )
    if calib is not None:
        shared = require_disjoint(calib, text, "calibration and evaluation", allow=allow_overlap)
        said = f"this text and calibration's share {shared} blocks: it is not held out."
        return HeldOut(text=text, shared=shared, warnings=(said,) if shared else ())
    if not allow_overlap:
        raise InputError(
            f"{run}: {source} cannot be proven to be held out, since calibration's data "
            f"({seen.source}) {why_not}: calibrate again, or --allow-overlap."
        )
    shared = len(set(text.block_hashes) & set(seen.block_hashes))
    said = f"calibration's data {why_not}: it may have seen what was measured on."
    return HeldOut(text=text, shared=shared, warnings=(said,))


def _cut_again(loaded: LoadedModel, seen: DataInfo) -> tuple[TokenSlice | None, str]:
    """Returns calibration's slice, or None and why it cannot be had."""
    if seen.modality != "text" or Path(seen.source).suffix.lower() in (".npz", ".npy"):
        return None, "are no text to compare with"
    try:
        calib = text_slice(
            seen.source,
            loaded.tokenizer,
            seq_len=seen.seq_len,
            samples=seen.sequences,
            skip=seen.skipped_blocks,
            bos=seen.bos,
        )
    except InputError as error:
        return None, f"cannot be read from this folder ({str(error).rstrip('.')})"
    return (calib, "") if calib.sha256 == seen.sha256 else (None, "have changed since")


def _used(calib: TokenSlice, seq_len: int) -> int:
    """Returns after how many blocks of `seq_len` tokens calibration's slice ends."""
    if not calib.spans:  # documents, one a block
        return calib.skip + calib.sequences
    body = max(1, seq_len - calib.prefix - calib.suffix)
    return math.ceil(calib.spans[-1].end / body)
