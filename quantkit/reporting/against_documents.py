"""The files of a run taken apart into documents that another run's can be laid beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from quantkit.reporting.against_values import Node, is_same, tree
from quantkit.reporting.collect import Run, everything
from quantkit.reporting.export_tables import recipe_of
from quantkit.reporting.training_groups import last
from quantkit.results import DataInfo, Sweep, TrainingResult

DELTAS: Final = "paired difference"
"""First key of a `Delta`; those of a cell are its task, metric and recipe."""
FILE: Final = ("file",)
"""Place of what is left of a file that was taken apart."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file, or what one says of a model's cell.

    Attributes:
        kind: In words, e.g. `statistics`; `subject`: e.g. the model's name.
        place: Keys above the node, where a file is taken apart.
        node: Its fields.
        items: Hashes of what was scored: of the task's items and of the text; "" where unknown.
        machine: Processor and cores; "" where the file does not say.
        hints: What the document of the same name on the other side should share.
        main: Paths that are important in this document alone.
    """

    kind: str
    subject: str
    place: tuple[str, ...] = ()
    node: Mapping[str, Node]
    items: tuple[str, str] = ("", "")
    machine: str = ""
    hints: tuple[str, ...] = ()
    main: frozenset[tuple[str, ...]] = frozenset()

    @property
    def identity(self) -> tuple[str, ...]:
        """What a document of the other run has to have in common with this one."""
        return (self.kind, self.subject, *self.place)


def model_names(run: Run) -> set[str]:
    """Returns the names of the models that files name with a hash."""
    models = [model for found in run.sweeps for model in found.result.models]
    for found in everything(run):
        if not isinstance(found.result, Sweep):
            models.append(found.result.model)
    models += [found.result.model for found in run.searches]
    return {model.name for model in models}


def documents(run: Run, alias: Mapping[str, str]) -> tuple[Document, ...]:
    """Returns all documents in the order of a page; those that say the same are one.

    Args:
        alias: Names of models, by the names that the files have.
    """
    found: dict[tuple[str, ...], list[Document]] = {}
    for one in _all(run, alias):
        again = found.setdefault(one.identity, [])
        if not any(is_same(other.node, one.node) for other in again):
            again.append(one)
    return tuple(one for again in found.values() for one in again)


def paired(
    now: tuple[Document, ...], earlier: tuple[Document, ...]
) -> Iterator[tuple[Document | None, Document | None]]:
    """Yields (now, earlier), each document once, None where the other run has none like it.

    Of several documents of one name those that share most hints are laid beside each other.
    """
    left: dict[tuple[str, ...], list[Document]] = {}
    for document in earlier:
        left.setdefault(document.identity, []).append(document)
    names: dict[tuple[str, ...], list[Document]] = {}
    for document in now:
        names.setdefault(document.identity, []).append(document)
    for identity in dict.fromkeys([*names, *left]):
        mine, theirs = names.get(identity, []), left.get(identity, [])
        scored = sorted(
            ((a, b) for a in range(len(mine)) for b in range(len(theirs))),
            key=lambda pair: (-_shared(mine[pair[0]], theirs[pair[1]]), pair),
        )
        partner: dict[int, int] = {}
        for a, b in scored:
            if a not in partner and b not in partner.values():
                partner[a] = b
        pairs: list[tuple[Document | None, Document | None]] = [
            (one, theirs[partner[a]] if a in partner else None) for a, one in enumerate(mine)
        ]
        pairs += [(None, one) for b, one in enumerate(theirs) if b not in partner.values()]
        for count, (one, other) in enumerate(pairs, 1):
            yield (_numbered(one, count), _numbered(other, count))


def _shared(one: Document, other: Document) -> int:
    return sum(a == b for a, b in zip(one.hints, other.hints, strict=False))


def _numbered(document: Document | None, count: int) -> Document | None:
    if document is None or count == 1:
        return document
    return replace(document, subject=f"{document.subject} [{count}]")


def _all(run: Run, alias: Mapping[str, str]) -> Iterator[Document]:
    def named(name: str) -> str:
        return alias.get(name, name)

    for stats in run.stats:
        yield Document(
            kind="statistics",
            subject=named(stats.result.model.name),
            node=tree(stats.result),
            hints=(stats.result.model.sha256, stats.result.data.sha256),
        )
    for sweep in run.sweeps:
        yield from _sweep("sweep", sweep.result, alias)
    for export in run.exports:
        result = export.result
        node = tree(result, ("recipe",))
        if result.accuracy is not None:  # its direction is the metric's
            node["accuracy"] = {result.accuracy.metric: node["accuracy"]}
        yield Document(
            kind="export",
            subject=f"{named(result.model.name)}, {recipe_of(result)}",
            node=node,
            items=("", result.data.sha256),
            machine=_machine(result.environment),
            hints=(result.model.sha256, result.data.sha256, result.ranges_sha256),
        )
    for search in run.searches:
        subject = f"{named(search.result.model.name)}, {search.result.metric}"
        yield Document(
            kind="search",
            subject=subject,
            node=tree(search.result),
            items=("", search.result.data.sha256),
            machine=_machine(search.result.environment),
            hints=(search.result.model.sha256, search.result.data.sha256),
        )
    for ranges in run.ranges:
        yield Document(
            kind="ranges",
            subject=named(ranges.result.model.name),
            node=tree(ranges.result),
            hints=(ranges.result.model.sha256, ranges.result.method, ranges.result.data.sha256),
        )
    for calibration in run.calibrations:
        held = calibration.result
        yield Document(
            kind="calibration",
            subject=named(held.model.name),
            node=tree(held),
            hints=(held.model.sha256, held.method, held.data.sha256),
        )
    for ranking in run.sensitivities:
        found = ranking.result
        yield Document(
            kind="sensitivity",
            subject=f"{named(found.model.name)}, {found.recipe} by {found.group}",
            node=tree(found, ("recipe", "group")),
            items=("", found.data.sha256),
            hints=(found.model.sha256, found.data.sha256),
        )
    yield from _others(run, alias)


def _others(run: Run, alias: Mapping[str, str]) -> Iterator[Document]:
    for found in run.trainings:
        yield from _training("training", found.result)
    for curves in run.curves:
        yield Document(
            kind="curves", subject=curves.result.header.name, node=tree(curves.result)
        )  # fmt: skip
    for diagnosis in run.diagnoses:
        graphs = (diagnosis.result.float_graph.sha256, diagnosis.result.quantized_graph.sha256)
        yield Document(
            kind="diagnosis",
            subject="quantized graph",
            node=tree(diagnosis.result),
            hints=(*graphs, diagnosis.result.data.sha256),
        )
    for seeds in run.seed_trainings:
        yield from _training("training of seeds", seeds.result)
    for seed_sweep in run.seed_sweeps:
        yield from _sweep("sweep of seeds", seed_sweep.result, alias)


def _machine(environment: Mapping[str, str]) -> str:
    return " ".join(environment.get(key, "") for key in ("processor", "cores")).strip()


def _sweep(kind: str, result: Sweep, alias: Mapping[str, str]) -> Iterator[Document]:
    """Yields the cells, then the differences, then what is left of the file."""

    def named(name: str) -> str:
        return alias.get(name, name)

    tasks = {task.name: task for task in result.tasks}

    def items(name: str) -> tuple[str, str]:
        task = tasks.get(name)
        data: DataInfo = task.data if task else result.data
        return (task.sha256 if task else "", data.sha256)

    hints = {model.name: model.sha256 for model in result.models}
    for cell in result.cells:
        yield Document(
            kind=kind,
            subject=named(cell.model),
            place=(cell.task, cell.metric, cell.recipe),
            node=tree(replace(cell, group=named(cell.group)), _STATED),
            items=items(cell.task),
            hints=(hints.get(cell.model, ""), *items(cell.task)),
        )
    for delta in result.deltas:
        against = (named(delta.against_model), delta.against) if delta.against_model else ()
        place = (DELTAS, delta.task, delta.metric, delta.recipe, *(against or (delta.against,)))
        yield Document(
            kind=kind,
            subject=named(delta.model),
            place=place,
            node=tree(delta, (*_STATED, "against", "against_model")),
            items=items(delta.task),
            hints=(hints.get(delta.model, ""), *items(delta.task)),
        )
    node = tree(result, ("cells", "deltas"))
    node["models"] = {named(name): value for name, value in node["models"].items()}
    yield Document(
        kind=kind,
        subject="all models",
        place=FILE,
        node=node,
        hints=(result.data.sha256, *hints.values()),
    )


_STATED: Final = ("model", "recipe", "task", "metric")
"""Fields of a cell that its place says."""


def _training(kind: str, result: TrainingResult) -> Iterator[Document]:
    """Yields the models, then what is left of the file."""
    for model in result.models:
        end = last(model)
        main = frozenset() if end is None else frozenset({("measurements", f"step {end.step}")})
        yield Document(
            kind=kind,
            subject=f"{model.arm}, seed {model.seed}",
            node=tree(model, ("arm", "seed", "folder")),
            hints=(model.sha256,),
            main=main,
        )
    yield Document(kind=kind, subject=result.name, place=FILE, node=tree(result, ("models",)))
