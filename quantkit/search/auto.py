"""The fastest export within an accuracy budget: which graphs are tried, and which one is taken.

All first candidates are measured. Of each family with quantized inputs, the best one that is over
the budget gets its worst inputs back in float: 1, 2, 4, ... of them until it is within, then the
gap is halved. A family stops where it is no faster than what is within the budget already, since
each input in float only slows it down. At most 2 log2(inputs) + 1 graphs a family.

What is within: the far end of the paired 95 % interval, not the estimate, so that a choice among
twenty graphs is not won by luck. Time: one build, one pass over the text and a few prompts a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from quantkit.results import Trial
from quantkit.search.candidates import Candidate

TIED_FRAC: Final = 0.98
"""Of the best speed: graphs that reach this share are called equally fast, and the better one is
taken; medians of a few prompts tell no smaller difference."""

Judge = Callable[[Candidate], Trial]
Rank = Callable[[Candidate], Sequence[str]]
"""Returns the quantizers of a candidate's inputs, the one that costs most first."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate and what was measured of it."""

    candidate: Candidate
    trial: Trial


def explore(candidates: Sequence[Candidate], judge: Judge, rank: Rank) -> list[Tried]:
    """Returns everything that was tried, in that order."""
    tried = [Tried(candidate=one, trial=judge(one)) for one in candidates]
    families: dict[tuple[str, str], list[Tried]] = {}
    for one in tried:
        if one.candidate.recipe.activations is not None:
            families.setdefault(one.candidate.family, []).append(one)
    # the family that is nearest first: what it reaches soon spares the others most of the search
    for own in sorted(families.values(), key=lambda own: min(one.trial.loss_high for one in own)):
        if not any(one.trial.is_within for one in own):
            best = min(own, key=lambda one: one.trial.loss_high)
            tried += _keeping(best, judge, rank, fastest_within(tried))
    return tried


def fastest_within(tried: Sequence[Tried]) -> float:
    """Returns the best speed-up within the budget; 1 is the float graph's."""
    return max([1.0, *(one.trial.speedup for one in tried if one.trial.is_within)])


def choose(tried: Sequence[Tried]) -> Tried | None:
    """Returns the fastest within the budget, of equally fast ones the best; None: there is none."""
    within = [one for one in tried if one.trial.is_within]
    if not within:
        return None
    best = max(one.trial.speedup for one in within)
    fast = [one for one in within if one.trial.speedup >= TIED_FRAC * best]
    return min(fast, key=lambda one: (one.trial.loss_high, -one.trial.speedup))


def front(trials: Sequence[Trial], *, higher_is_better: bool) -> list[Trial]:
    """Returns the trials, the fastest first, with those marked that nothing beats in both."""
    sign = -1.0 if higher_is_better else 1.0

    def is_beaten(trial: Trial) -> bool:
        return any(
            other.latency_ms / other.float_ms < trial.latency_ms / trial.float_ms
            and sign * other.change < sign * trial.change
            for other in trials
        )

    marked = [replace(trial, is_on_front=not is_beaten(trial)) for trial in trials]
    return sorted(marked, key=lambda trial: -trial.speedup)


def _keeping(base: Tried, judge: Judge, rank: Rank, to_beat: float) -> list[Tried]:
    """Returns the graphs that were tried with the worst inputs of `base` in float."""
    if base.trial.speedup <= to_beat:
        return []
    order = tuple(rank(base.candidate))
    found: dict[int, Tried] = {}

    def is_within(count: int) -> bool:
        candidate = base.candidate.keeping(order[:count])
        found[count] = Tried(candidate=candidate, trial=judge(candidate))
        return found[count].trial.is_within

    few, enough = 0, 1
    while enough <= len(order) and not is_within(enough):
        if enough == len(order) or found[enough].trial.speedup <= to_beat:
            return list(found.values())
        few, enough = enough, min(2 * enough, len(order))
    while enough - few > 1:
        middle = (few + enough) // 2
        if is_within(middle):
            enough = middle
        else:
            few = middle
    return list(found.values())
