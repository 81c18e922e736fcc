"""The sentences on calibration: what was done, how stable it is, what was waived."""

from __future__ import annotations

import math
from collections import Counter

from quantkit.reporting.calibration_groups import (
    best_other,
    calibrations,
    chosen,
    lowest,
    median,
    ranges,
    weight_granularity,
    worst_first,
)
from quantkit.reporting.collect import Run
from quantkit.reporting.outlier_tables import span_text
from quantkit.reporting.text import decibels, number, small_share
from quantkit.results import Calibration, DataInfo, Ranges, TensorDiagnosis


def notes(run: Run) -> tuple[str, ...]:
    """Returns what a page says above the tables on calibration."""
    found: list[str] = []
    for name, calibration in calibrations(run):
        said = (header(calibration), better_methods(calibration), first_token(calibration))
        found += [f"{name}: {part}" for part in said if part]
    for name, result in ranges(run):
        parts = (until_stable(result), smoothing(result), weights(result), waived(result))
        found += [f"{name}: {part}" for part in parts if part]
    if run.ranges and not run.calibrations:
        found.append(
            "No calibration.json was found: whether these ranges can be trusted, tensor by tensor, "
            "stands there; quantkit calibrate writes it beside them."
        )
    return tuple(found)


def samples(data: DataInfo) -> str:
    """Returns e.g. "128 blocks of 512 tokens of prose", or "300 images of photos"."""
    source = data.named_set or data.source
    if data.modality != "text":
        things = {"image": "images", "audio": "recordings"}.get(data.modality, "samples")
        return f"{data.sequences:,} {things} of {source}"
    return f"{data.sequences:,} blocks of {data.seq_len:,} tokens of {source}"


def header(calibration: Calibration) -> str:
    """Returns how much was seen, where, and which methods were compared."""
    tensors = calibration.tensors
    points = {tensor.point for tensor in tensors}
    widths = sorted({tensor.bits for tensor in tensors})
    compared = dict.fromkeys(found.method for tensor in tensors for found in tensor.methods)
    text = (
        f"{samples(calibration.data)}; {_count(len(tensors), 'tensor')} at "
        f"{_count(len(points), 'point')}; ranges by {calibration.method}"
    )
    if compared:
        text += f"; compared at {', '.join(map(str, widths))} bits: {', '.join(compared)}"
    return f"{text}."


def better_methods(calibration: Calibration) -> str:
    """Returns in how many tensors another method has a smaller error, and which; or ""."""
    better: Counter[str] = Counter()
    for tensor in calibration.tensors:
        other = best_other(tensor)
        if other is not None and other.sqnr_db > chosen(tensor).sqnr_db:
            better[other.method] += 1
    if not better:
        return ""
    listed = ", ".join(f"{method} {count:,}" for method, count in better.most_common())
    return (
        f"another method has a higher SQNR in {better.total():,} of "
        f"{_count(len(calibration.tensors), 'tensor')}: {listed}. A high inlier SQNR alone "
        "is no reason to clip: outliers may be what the model stands on; quantkit sweep --ranges "
        "measures it."
    )


def first_token(calibration: Calibration) -> str:
    """Returns how far first tokens stand out and whether they are in the ranges; or ""."""
    known = [
        tensor
        for tensor in calibration.tensors
        if math.isfinite(tensor.first_max_abs) and math.isfinite(tensor.others_max_abs)
    ]
    if not known:
        return (
            "the first token of each sequence is in no range." if calibration.excludes_first else ""
        )
    larger = sum(tensor.first_max_abs > tensor.others_max_abs for tensor in known)
    state = "is in no range" if calibration.excludes_first else "is in the ranges"
    return (
        f"the first token of each sequence {state}; it holds the largest magnitude of "
        f"{larger:,} of {_count(len(known), 'tensor')}."
    )


def stability(calibration: Calibration) -> str:
    """Returns how far ranges moved over the last quarter of the samples."""
    if not calibration.stability:
        return "how far ranges move with more samples was not measured"
    last = calibration.stability[-1]
    return (
        f"ranges moved at most {small_share(last.moved_max_frac)} "
        f"(median {small_share(last.moved_median_frac)}) over the last quarter of the samples"
    )


def worst(calibration: Calibration) -> str:
    """Returns which tensor is worst, how much of its range only outliers use, and its level."""
    tensors = worst_first(calibration)
    if not tensors:
        return "no tensor was seen"
    tensor = tensors[0]
    level = f"inlier SQNR {decibels(chosen(tensor).inlier_sqnr_db)} dB at {tensor.bits} bits"
    return f"the worst tensor is {tensor.name}, {_width(tensor)} ({level})"


def _width(tensor: TensorDiagnosis) -> str:
    bits = tensor.bits_wasted
    if not math.isfinite(bits):
        return "whose range cannot be compared with its 99.9 % span"
    times = number(2.0**bits, 3) if bits < 1000 else "more than 2^1000"
    return f"whose range is {times} times ({bits:.2f} bits) as wide as its 99.9 % span"


def until_stable(result: Ranges) -> str:
    """Returns whether the target of --until-stable was met, or "" where there was none."""
    target = result.until_stable_frac
    if target is None:
        return ""
    asked = f"asked to go on until no range moves by more than {small_share(target)}"
    if not result.stability:
        return f"{asked}; stability was not measured."
    last = result.stability[-1]
    state = "reached" if last.moved_max_frac <= target else "NOT reached"
    return f"{asked}: {state} at {last.samples:,} samples ({small_share(last.moved_max_frac)})."


def smoothing(result: Ranges) -> str:
    """Returns what smoothing is expected to gain, or "" where there is none."""
    groups = list(result.smoothing.values())
    if not groups:
        return ""
    alphas = [group.alpha for group in groups]
    before = median(group.expected_error_without for group in groups)
    return (
        f"{_count(len(groups), 'smoothing group')}, alpha "
        f"{span_text((min(alphas), max(alphas)), 2)}; expected error "
        f"{number(median(group.expected_error for group in groups))} instead of {number(before)} "
        "(medians)."
    )


def weights(result: Ranges) -> str:
    """Returns how the ranges of weights were chosen and what they gain, or "" without any."""
    info = result.weights
    if info is None:
        return ""
    figures = list(info.modules.values())
    before = decibels(median(found.absmax_sqnr_db for found in figures))
    after = decibels(median(found.sqnr_db for found in figures))
    least = decibels(lowest(found.worst_channel_sqnr_db for found in figures))
    return (
        f"weights: {info.method} at {info.bits} bits by {weight_granularity(info)}; SQNR median "
        f"{before} -> {after} dB (absmax -> chosen), worst channel {least} dB."
    )


def waived(result: Ranges) -> str:
    """Returns which guards were waived, and how many tensors failed them; or ""."""
    failed = Counter(guard for found in result.tensors.values() for guard in found.waived)
    if not failed and not result.allowed:
        return ""
    parts = []
    if result.allowed:
        parts.append(f"waived as asked: {', '.join(result.allowed)}")
    listed = ", ".join(f"{guard} {count:,}" for guard, count in failed.items())
    parts.append(f"tensors that failed a waived guard: {listed or 'none'}")
    return "; ".join(parts) + "."


def warnings(run: Run) -> list[str]:
    """Returns the warnings of calibrations, ranges and their data, each once."""
    files: list[Calibration | Ranges] = [
        *(found.result for found in run.calibrations),
        *(found.result for found in run.ranges),
    ]
    lines = [f"{result.model.name}: {line}" for result in files for line in result.warnings]
    lines += [line for result in files for line in result.data.warnings]
    return list(dict.fromkeys(lines))


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
