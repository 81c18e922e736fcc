"""One pass over rows of float32, compiled: extremes, top-k, moments, histogram, entropy.

Why compiled: each statistic alone is a pass over memory in torch; here a row is read from memory
once and stays in the first-level cache for all of them. `scan.py` is the only user; what the
numbers mean stands there.

Extremes are compared as integers: a float32's bits, read as an int32 and with the magnitude flipped
where it is negative, order as the numbers do, and integer reductions need no care about NaN.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

# Sums may be reordered (that is what makes them fast); NaN and inf keep their meaning.
_FAST: Final = {"reassoc", "contract", "nsz", "arcp"}

MAGNITUDE: Final = np.int32(0x7FFFFFFF)
INF_BITS: Final = np.int32(0x7F800000)
_CHUNK: Final = 512  # elements that are looked at together before one by one
_SIGN: Final = np.int32(31)
_ONE: Final = np.int32(1)
_LOG2_E: Final = np.float32(1.4426950408889634)
# Below it exp is no longer a normal number; what e * u adds there is below 1e-35, and a distance of
# 1e38 would make it more.
_FAR_BELOW: Final = np.float32(-88.0)
# Minimax polynomial of 2^f on [0, 1); with the float32 sums its error stays below 3e-6 of a row's
# entropy, measured against float64.
_EXP2: Final = (
    np.float32(0.99999994),
    np.float32(0.69315308),
    np.float32(0.24015363),
    np.float32(0.05582631),
    np.float32(0.00898935),
    np.float32(0.00187757),
)


@njit(fastmath=_FAST, inline="always")
def _chunk_extremes(bits: Any) -> Any:
    """Returns (largest key, smallest key, largest magnitude, smallest nonzero magnitude less 1).

    numba widens sums of int32 to int64; each cast here keeps twice as many in a vector register.
    """
    high, low = np.int32(-2147483648), np.int32(2147483647)
    top, least = np.int32(0), np.int32(2147483647)
    for j in range(bits.shape[0]):
        b = bits[j]
        key = np.int32(b ^ np.int32(np.int32(b >> _SIGN) & MAGNITUDE))
        size = np.int32(b & MAGNITUDE)
        high, low = np.int32(max(high, key)), np.int32(min(low, key))
        top = np.int32(max(top, size))
        # zero less one is the largest number of all, once its sign is gone
        least = np.int32(min(least, np.int32(np.int32(size - _ONE) & MAGNITUDE)))
    return high, low, top, least


@njit(fastmath=_FAST, inline="always")
def _extremes(bits: Any, tops: Any) -> Any:
    """Returns what `_chunk_extremes` does, of a row; NaN and inf are the largest magnitudes.

    `tops[i]` becomes the largest magnitude of its i-th chunk.
    """
    high, low = np.int32(-2147483648), np.int32(2147483647)
    top, least = np.int32(0), np.int32(2147483647)
    for c in range((bits.shape[0] + _CHUNK - 1) // _CHUNK):
        part = bits[c * _CHUNK : min((c + 1) * _CHUNK, bits.shape[0])]
        its_high, its_low, tops[c], its_least = _chunk_extremes(part)
        high, low = max(high, its_high), min(low, its_low)
        top, least = max(top, tops[c]), min(least, its_least)
    return high, low, top, least


@njit(fastmath=_FAST, inline="always")
def _moments(x: Any) -> Any:
    """Returns mean and sums of the second to fourth power about it, float64."""
    total = 0.0
    for j in range(x.shape[0]):
        total += np.float64(x[j])
    mean = total / x.shape[0]
    m2, m3, m4 = 0.0, 0.0, 0.0
    for j in range(x.shape[0]):
        d = np.float64(x[j]) - mean
        q = d * d
        m2 += q
        m3 += q * d
        m4 += q * q
    return mean, m2, m3, m4


@njit(inline="always")
def _merge_moments(m: Any, n: float, mean: float, m2: float, m3: float, m4: float) -> None:
    """Adds a row's moments to `m` = (count, mean, m2, m3, m4), as `Moments.merge` does."""
    na = m[0]
    total = na + n
    d = mean - m[1]
    fa, fb = na / total, n / total
    d2 = d * d
    m[4] += (
        m4
        + d2 * d2 * na * fb * (fa * fa - fa * fb + fb * fb)
        + 6.0 * d2 * (fa * fa * m2 + fb * fb * m[2])
        + 4.0 * d * (fa * m3 - fb * m[3])
    )
    m[3] += m3 + d2 * d * na * fb * (fa - fb) + 3.0 * d * (fa * m2 - fb * m[2])
    m[2] += m2 + d2 * na * fb
    m[1] = m[1] + d * fb if na > 0 else mean
    m[0] = total


@njit(fastmath=_FAST, inline="always")
def _entropy(x: Any, top: Any) -> Any:
    """Returns the entropy in nats of softmax(x), whose largest element is `top`."""
    total, weighted = np.float32(0), np.float32(0)
    for j in range(x.shape[0]):
        u = max(x[j] - top, _FAR_BELOW)
        y = max(u * _LOG2_E, np.float32(-126.0))
        whole = np.floor(y)
        f = y - whole
        p = _EXP2[4] + f * _EXP2[5]
        p = _EXP2[0] + f * (_EXP2[1] + f * (_EXP2[2] + f * (_EXP2[3] + f * p)))
        e = p * np.int32((np.int32(whole) + np.int32(127)) << 23).view(np.float32)
        total += e
        weighted += e * u
    return np.log(np.float64(total)) - np.float64(weighted) / np.float64(total)


@njit(inline="always")
def _insert(size: Any, tag: Any, value: Any, sizes: Any, tags: Any, values: Any) -> None:
    """Puts an element in the place of the least of the heap, if it goes before that one.

    Element i of the heap never goes before its children 2i + 1 and 2i + 2; the least is the first.
    """
    if not _before(size, tag, value, sizes[0], tags[0], values[0]):
        return
    at, k = 0, sizes.shape[0]
    while True:
        child = 2 * at + 1
        if child >= k:
            break
        right = child + 1
        if right < k and _before(
            sizes[child], tags[child], values[child], sizes[right], tags[right], values[right]
        ):
            child = right
        if not _before(size, tag, value, sizes[child], tags[child], values[child]):
            break
        sizes[at], tags[at], values[at] = sizes[child], tags[child], values[child]
        at = child
    sizes[at], tags[at], values[at] = size, tag, value


@njit(inline="always")
def _before(size: Any, tag: Any, value: Any, size2: Any, tag2: Any, value2: Any) -> Any:
    """Returns whether the first goes before the second: larger; ties by tag, then positive."""
    if size != size2:
        return size > size2
    return tag < tag2 or (tag == tag2 and value > value2)


@njit(fastmath=_FAST, nogil=True, cache=True)
def scan_rows(
    part: int,
    deal: int,
    x: Any,
    lo: Any,
    hi: Any,
    valid: Any,
    full: Any,
    skip: int,
    tag: int,
    row_step: int,
    column_step: int,
    first_group: int,
    floor: Any,
    want_entropy: bool,
    keys: Any,
    counts: Any,
    sizes: Any,
    tags: Any,
    values: Any,
    moments: Any,
    histogram: Any,
    entropy: Any,
    aside: Any,
    has_aside: Any,
    row: int,
) -> None:
    """Adds one worker's share of a block's rows to its accumulators.

    Args:
        part: The worker, whose accumulators are used; workers share nothing. It holds no lock, so
            Python's threads run it side by side.
        deal: Workers to which the rows are dealt out; 1: all are this one's.
        x: float32 [g, rows, columns], contiguous; group `first_group` and those after it.
        lo, hi: int64 [rows], the columns that count.
        valid: bool [g or 1, rows, columns] where those have holes; [0, 0, 0] where not.
        full: bool [rows]: False where only extremes and top-k are wanted.
        skip: A column that counts in the entropy alone; negative: none.
        tag: of x[:, 0, 0]; + `row_step` a row, + `column_step` a column.
        floor: int32 [groups]: bits of a magnitude below which nothing enters the top-k.
        keys: int32 [groups, parts, 3]: largest key, smallest key, and of full rows the smallest
            magnitude that is not zero.
        counts: int64 [groups, parts, 5]: elements, NaN, inf, 0.0 and -0.0 (of full rows).
        sizes, tags, values: [groups, parts, k] int32, int64, float32: the top-k, a heap.
        moments: float64 [groups, parts, 5]; histogram: int64 [groups, parts, 65536].
        entropy: float64 [groups, parts, 2]: rows and their sum.
        aside, has_aside: float32 and bool [groups, all rows], at `row` and after it: what stands in
            the column `skip`, and where it counts; [0, 0] where nobody asks.
    """
    groups, rows, columns = x.shape
    no_row = np.empty(0, np.bool_)
    gap_values = np.empty(columns, np.float32)
    gap_columns = np.empty(columns, np.int64)
    finite = np.empty(0, np.float32)
    tops = np.empty(columns // _CHUNK + 1, np.int32)
    unused = np.empty_like(tops)
    for local in range(groups):
        group = first_group + local
        for r in range(part % deal, rows, deal):
            if hi[r] <= lo[r]:
                continue
            holes = valid.size > 0
            which = valid[min(local, valid.shape[0] - 1), r] if holes else no_row
            skips = lo[r] <= skip < hi[r] and (not holes or which[skip])
            begin = lo[r]
            every = x[local, r, lo[r] : hi[r]]
            if holes or (skips and skip > lo[r]):  # not one interval: copy what counts
                holes = True
                n = 0
                for j in range(lo[r], hi[r]):
                    if j != skip and (which.size == 0 or which[j]):
                        gap_values[n] = x[local, r, j]
                        gap_columns[n] = j
                        n += 1
                elements = gap_values[:n]
                if skips:
                    gap_values[n] = x[local, r, skip]
                every = gap_values[: n + 1] if skips else elements
            else:
                begin = lo[r] + 1 if skips else lo[r]
                elements = x[local, r, begin : hi[r]]
            apart = x[local, r, skip] if skips else np.float32(0)
            if skips and aside.size > 0:
                aside[group, row + r], has_aside[group, row + r] = apart, True
            if elements.shape[0] == 0:
                if skips and full[r] and want_entropy and np.isfinite(apart):
                    entropy[group, part, 0] += 1.0  # one key: its entropy is 0
                continue
            n = elements.shape[0]
            bits = elements.view(np.int32)
            high, low, top, small = _extremes(bits, tops)
            counts[group, part, 0] += n
            kept = 0
            is_finite = top < INF_BITS
            if not is_finite:  # rare: say what they are, and go on with the finite ones
                if finite.shape[0] < columns:
                    finite = np.empty(columns, np.float32)
                for j in range(n):
                    size = bits[j] & MAGNITUDE
                    if size > INF_BITS:
                        counts[group, part, 1] += 1
                    elif size == INF_BITS:
                        counts[group, part, 2] += 1
                    else:
                        finite[kept] = elements[j]
                        kept += 1
                if kept == 0:
                    if full[r]:
                        for j in range(n):
                            histogram[group, part, (bits[j] >> 16) & 0xFFFF] += 1
                    continue
                high, low, top, small = _extremes(finite[:kept].view(np.int32), unused)
            out = keys[group, part]
            out[0], out[1] = max(out[0], high), min(out[1], low)
            least = max(floor[group], sizes[group, part, 0])
            if top >= least:
                start = tag + r * row_step
                for c in range((n + _CHUNK - 1) // _CHUNK):
                    if tops[c] < least:
                        continue
                    for j in range(c * _CHUNK, min((c + 1) * _CHUNK, n)):
                        size = bits[j] & MAGNITUDE
                        if size >= least and size < INF_BITS:
                            column = gap_columns[j] if holes else begin + j
                            _insert(
                                size,
                                start + column * column_step,
                                elements[j],
                                sizes[group, part],
                                tags[group, part],
                                values[group, part],
                            )
                            least = max(least, sizes[group, part, 0])
            if not full[r]:
                continue
            if small < INF_BITS:  # of an element that is not zero
                out[2] = min(out[2], small + np.int32(1))
            seen = elements if is_finite else finite[:kept]
            mean, m2, m3, m4 = _moments(seen)
            _merge_moments(moments[group, part], float(seen.shape[0]), mean, m2, m3, m4)
            cells = histogram[group, part]
            for j in range(n):
                cells[(bits[j] >> 16) & 0xFFFF] += 1
            if cells[0] + cells[0x8000] > counts[group, part, 3] + counts[group, part, 4]:
                positive, negative = 0, 0
                for j in range(n):
                    positive += bits[j] == 0
                    negative += bits[j] == np.int32(-2147483648)
                counts[group, part, 3] += positive
                counts[group, part, 4] += negative
            if want_entropy and is_finite and np.isfinite(apart):
                biggest = np.int32(high ^ ((high >> 31) & MAGNITUDE)).view(np.float32)
                if skips:
                    biggest = max(biggest, apart)
                entropy[group, part, 0] += 1.0
                entropy[group, part, 1] += _entropy(every, biggest)


@njit(cache=True)
def cut_moments(moments: Any, total: Any) -> Any:
    """Returns the moments of all parts together, float64 [groups, 5], and starts them anew.

    Adds them to `total` too.
    """
    groups, parts, _ = moments.shape
    together = np.zeros((groups, 5))
    for group in range(groups):
        for part in range(parts):
            m = moments[group, part]
            if m[0] > 0:
                _merge_moments(together[group], m[0], m[1], m[2], m[3], m[4])
            m[:] = 0.0
        m = together[group]
        if m[0] > 0:
            _merge_moments(total[group], m[0], m[1], m[2], m[3], m[4])
    return together


@njit(fastmath=_FAST, cache=True)
def token_pass(x: Any, use: Any, above: Any, row_top: Any, column_top: Any, reached: Any) -> Any:
    """Takes largest magnitudes by row and column, and how often each column reaches `above`.

    Args:
        x: float32 [rows, columns]; `use`: bool [rows].
        row_top: float32 [rows]; column_top: float32 [columns], and reached: int64 [columns], are
            added to. NaN and inf do not take part.

    Returns whether all that is used is finite.
    """
    bad = np.int32(0)
    rows, columns = x.shape
    tops = column_top.view(np.int32)
    least = np.float32(above).view(np.int32)
    for r in range(rows):
        if not use[r]:
            continue
        bits = x[r].view(np.int32)
        top = np.int32(0)
        for j in range(columns):
            size = bits[j] & MAGNITUDE
            bad |= np.int32(size >= INF_BITS)
            size = size if size < INF_BITS else np.int32(0)
            top = max(top, size)
            tops[j] = max(tops[j], size)
            reached[j] += size >= least
        row_top[r] = np.int32(top).view(np.float32)
    return bad == 0


@njit(cache=True)
def abs_select(x: Any, rank: int) -> Any:
    """Returns the finite magnitude of that rank, counted from 0, of x, float32 [elements].

    Counts the upper 15 bits of the magnitudes, then sorts what shares the right ones.
    """
    bits = x.view(np.int32)
    counts = np.zeros(1 << 15, np.int64)
    for j in range(bits.shape[0]):
        counts[(bits[j] & MAGNITUDE) >> 16] += 1
    before, cell = 0, 0
    while before + counts[cell] <= rank:
        before += counts[cell]
        cell += 1
    inside = np.empty(counts[cell], np.int32)
    n = 0
    for j in range(bits.shape[0]):
        size = bits[j] & MAGNITUDE
        if size >> 16 == cell:
            inside[n] = size
            n += 1
    return np.int32(np.sort(inside)[rank - before]).view(np.float32)
