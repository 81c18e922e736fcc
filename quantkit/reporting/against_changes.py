"""Two runs laid over each other: every field of both, with a word for what became of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from quantkit.errors import InputError
from quantkit.reporting.against_documents import FILE, Document, documents, model_names, paired
from quantkit.reporting.against_looks import TIMING_NOISE, Look, look, metrics_of, value_of
from quantkit.reporting.against_values import Estimate, Node, is_absent, is_same
from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.text import first_of

Mark = Literal["better", "worse", "within noise", "changed", "new", "gone", "same"]
MARKS: Final[tuple[Mark, ...]] = (
    "better", "worse", "within noise", "changed", "new", "gone", "same"
)  # fmt: skip

_PROVENANCE: Final = (
    "calibration", "corpus", "data", "environment", "float_graph", "header", "models", "pair",
    "quantized_graph", "ranges_sha256", "tasks", "processes", "seed",
)  # fmt: skip
"""First fields of what says where figures come from; `model` is one too, below `_FILES`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One field of a document of either run, or all fields below it where only one run has them.

    Attributes:
        kind, subject: As `Document`'s; `path`: its place and the keys below it.
        now, earlier: None where a run has it not.
        is_source: Whether it says where figures come from, and is none itself.
    """

    kind: str
    subject: str
    path: tuple[str, ...]
    now: Node
    earlier: Node
    mark: Mark
    look: Look
    is_source: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether the runs differ in it, be it within noise."""
        return self.mark != "same"

    @property
    def step(self) -> float:
        """How far it moved: |log| of the ratio, of shares the difference; NaN where unknown."""
        now, earlier = value_of(self.now), value_of(self.earlier)
        one = self.look.measured
        if self.look.style == "share" or (one is not None and one.is_share):
            return abs(now - earlier)
        if not (now > 0 and earlier > 0 and math.isfinite(now) and math.isfinite(earlier)):
            return math.nan
        return abs(math.log(now / earlier))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every entry, in the order of a page; `renamed`: (now, earlier) of a model with two names."""

    entries: tuple[Entry, ...]
    renamed: tuple[str, str] | None = None

    @property
    def figures(self) -> tuple[Entry, ...]:
        """All but where they come from."""
        return tuple(entry for entry in self.entries if not entry.is_source)

    @property
    def sources(self) -> tuple[Entry, ...]:
        """Where figures come from, of what differs."""
        return tuple(entry for entry in self.entries if entry.is_source and entry.is_changed)

    def differing(self, what: Literal["model", "data"]) -> tuple[Entry, ...]:
        """Returns the hashes of models, or of texts and items, that both have and that differ."""
        keys = {"model": ("model", "models", "float_graph"), "data": ("data", "calibration")}[what]
        return tuple(
            entry
            for entry in self.sources
            if entry.mark == "changed"
            and entry.path[-1] == "sha256"
            and (set(keys) & set(entry.path[:-1]) or (what, entry.path[0]) == ("data", "tasks"))
        )


def compare(now: Run, earlier: Run) -> Comparison:
    """Returns both runs laid over each other.

    Models are matched by name; where each run has one model alone, whatever it is called.

    Raises:
        InputError: the runs have nothing in common.
    """
    names, before = model_names(now), model_names(earlier)
    alias: dict[str, str] = {}
    if len(names) == len(before) == 1 and names != before:
        alias = {next(iter(before)): next(iter(names))}
    mine, theirs = documents(now, {}), documents(earlier, alias)
    shared = {d.identity for d in mine if d.place != FILE} & {d.identity for d in theirs}
    if not shared:
        raise InputError(
            f"the earlier run and this one have nothing in common: this one holds {_held(mine)}, "
            f"the earlier one {_held(documents(earlier, {}))}; --against takes an earlier run of "
            "the same command and model."
        )
    metrics = metrics_of(now, earlier)
    entries: list[Entry] = []
    for one, other in paired(mine, theirs):
        entries += _laid(one, other, metrics)
    renamed = next(((new, old) for old, new in alias.items()), None)
    return Comparison(entries=tuple(entries), renamed=renamed)


def _held(found: tuple[Document, ...]) -> str:
    parts = [document for document in found if document.place != FILE]
    words = dict.fromkeys(f"{document.kind} of {document.subject}" for document in parts)
    return first_of(list(words))


def _laid(
    now: Document | None, earlier: Document | None, metrics: Mapping[tuple[str, str], Measured]
) -> Iterator[Entry]:
    known = now or earlier
    assert known is not None
    main = (now.main if now else frozenset()) | (earlier.main if earlier else frozenset())
    nodes = (now.node if now else None, earlier.node if earlier else None)
    for path, new, old in _walked(*nodes, ()):
        # of a file that was taken apart only the rest is left, whose place is no key
        place = known.place if known.place != FILE else ()
        whole = (*place, *path)
        is_source = bool(whole) and _is_source(known.kind, known.place, whole)
        seen = look(known.kind, whole, metrics)
        if path[:-1] in main and path[-1] == "loss":
            seen = Look(words=seen.words, is_higher_better=False, is_main=True)
        if path == () and not place:
            seen = Look(words="all of it", is_main=True)
        yield Entry(
            kind=known.kind,
            subject=known.subject,
            path=whole,
            now=new,
            earlier=old,
            mark=_mark(new, old, seen, now, earlier),
            look=seen,
            is_source=is_source,
        )


def _is_source(kind: str, place: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if place not in ((), FILE):
        return path[-1] == "seed"
    is_hash = path[-1] == "sha256"
    is_folder = kind == "sensitivity" and path[0] == "ranges"
    return path[0] in ("model", *_PROVENANCE) or is_hash or is_folder


def _walked(
    now: Node, earlier: Node, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Node, Node]]:
    """Yields (path, now, earlier) of every leaf; what one side has not is not opened."""
    if is_absent(now) and is_absent(earlier):
        return
    is_both = isinstance(now, Mapping) and isinstance(earlier, Mapping)
    if not is_both or is_absent(now) or is_absent(earlier):
        yield path, None if is_absent(now) else now, None if is_absent(earlier) else earlier
        return
    for key in dict.fromkeys([*now, *earlier]):
        yield from _walked(now.get(key), earlier.get(key), (*path, key))


def _mark(
    now: Node, earlier: Node, seen: Look, one: Document | None, other: Document | None
) -> Mark:
    if earlier is None:
        return "new"
    if now is None:
        return "gone"
    if is_same(now, earlier):
        return "same"
    if one is None or other is None:
        return "changed"
    is_gain = value_of(now) > value_of(earlier)
    judged: Mark = "changed"
    if seen.is_higher_better is not None:
        judged = "better" if is_gain == seen.is_higher_better else "worse"
    if seen.rule == "exact":
        return "better" if now is True else "worse" if now is False else judged
    if seen.rule == "timing" and one.machine and one.machine == other.machine:
        ratio = value_of(now) / value_of(earlier) if value_of(earlier) > 0 else math.inf
        return "within noise" if abs(ratio - 1) < TIMING_NOISE else judged
    if seen.rule == "interval" and has_same_items(one, other):
        return _by_interval(now, earlier, judged)
    return "changed"


def has_same_items(one: Document, other: Document) -> bool:
    """Whether both were scored on the same: by the items' hashes, else by those of the text."""
    task = (one.items[0], other.items[0])
    first, second = task if all(task) else (one.items[1], other.items[1])
    return bool(first) and first == second


def _by_interval(now: Node, earlier: Node, judged: Mark) -> Mark:
    if not (isinstance(now, Estimate) and isinstance(earlier, Estimate)):
        return "changed"
    ends = (now.low, now.high, earlier.low, earlier.high)
    if not all(map(math.isfinite, ends)):
        return "changed"
    is_apart = now.low > earlier.high or now.high < earlier.low
    return judged if is_apart else "within noise"
