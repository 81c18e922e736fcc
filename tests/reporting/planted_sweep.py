"""A sweep as `quantkit sweep` would write it, with figures made by hand: nothing was measured.

Two models of three seeds each; perplexity, multiple choice and needles (at chance); logits at 8, 6
and 4 bits per tensor, head and row, and other recipes beside.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from quantkit.results import (
    AttentionMass,
    Cell,
    Delta,
    Fired,
    SeedSpread,
    Sweep,
    TaskInfo,
    read_json,
)

V3 = Path(__file__).parent.parent / "results" / "fixtures" / "v3" / "sweep.json"
GROUPS = ("diff", "base")
SEEDS = 3
BITS = (8, 6, 4)
SCALES = ("tensor", "head", "row")
OTHERS = ("w8a8:token", "nf4", "qk8", "probs8", "kv8", "logits6:head:static:asymmetric")
RECIPES = (
    "none",
    *(f"logits{b}" + ("" if s == "tensor" else f":{s}") for s in SCALES for b in BITS),
    *OTHERS,
)
METRICS = {
    "perplexity": ("perplexity", "bits_per_byte"),
    "multiple-choice": ("acc_norm", "acc"),
    "needles:needles=4": ("exact_match", "query_accuracy"),
}
UNITS = {"perplexity": "blocks", "multiple-choice": "items", "needles:needles=4": "samples"}
COUNTS = {"perplexity": 64, "multiple-choice": 400, "needles:needles=4": 50}
FLOAT = {
    "perplexity": 18.0, "bits_per_byte": 0.9, "acc_norm": 0.47, "acc": 0.44, "exact_match": 0.08,
    "query_accuracy": 0.26,
}  # fmt: skip
CHANCE = {"acc_norm": 0.25, "acc": 0.25, "exact_match": 1 / 12, "query_accuracy": 0.25}
LOWER = ("perplexity", "bits_per_byte")


def loss(recipe: str, group: str) -> float:
    """What a recipe costs, as a share of the float figure: 4 bits per tensor cost the most."""
    if recipe == "none":
        return 0.0
    if not recipe.startswith("logits") or recipe in OTHERS:
        return 0.004 * (1 + OTHERS.index(recipe))
    bits = int(recipe[6])
    scale = {"": 1.0, "head": 0.5, "row": 0.2}[recipe[8:]]
    return 0.6 * scale * 4.0 ** (4 - bits) * (0.3 if group == "diff" else 1.0)


def value_of(recipe: str, group: str, seed: int, metric: str) -> float:
    sign = 1 if metric in LOWER else -1
    if metric in ("exact_match", "query_accuracy"):
        sign = 0
    start = FLOAT[metric] * (1 + 0.01 * seed) * (0.95 if group == "diff" and sign > 0 else 1.0)
    return start * (1 + sign * loss(recipe, group))


def margin_of(metric: str, base: float) -> float:
    return 0.01 * base if metric in LOWER else 0.01


def cell(recipe: str, group: str, seed: int, task: str, metric: str) -> Cell:
    value, n = value_of(recipe, group, seed, metric), COUNTS[task]
    error = 0.03 * value if metric in LOWER else math.sqrt(value * (1 - value) / n)
    is_first = METRICS[task][0] == metric
    is_logits = recipe.startswith("logits")
    chance = CHANCE.get(metric)
    quantizers = {} if recipe == "none" or not is_first else {
        f"attention_logit/{layer}": Fired(hits=n, elements=1000 * n) for layer in range(2)
    }  # fmt: skip
    words = recipe.split(":")
    return Cell(
        model=f"{group}-s{seed}",
        group=group,
        recipe=recipe,
        bits=int(words[0][6:]) if is_logits else 16,
        granularity=([*words[1:], "tensor"][0]) if is_logits else None,
        range=("static" if "static" in words else "dynamic") if is_logits else None,
        weights={"w8a8:token": 8, "nf4": 4}.get(recipe),
        activations={"w8a8:token": 8}.get(recipe),
        task=task,
        metric=metric,
        value=value,
        stderr=error,
        ci_low=value - 1.96 * error,
        ci_high=value + 1.96 * error,
        n=n,
        seed=0,
        hits=sum(fired.hits for fired in quantizers.values()),
        chance=chance,
        chance_p=None if chance is None else (0.4 if task.startswith("needles") else 1e-9),
        details={"exact_match at 0.25": 0.1} if metric == "exact_match" else {},
        quantizers=quantizers,
    )


def delta(one: Cell, base: Cell, *, against_model: str = "") -> Delta:
    difference, margin = one.value - base.value, margin_of(one.metric, base.value)
    reach = margin / 2
    worse = difference + reach if one.metric in LOWER else reach - difference
    return Delta(
        model=one.model,
        recipe=one.recipe,
        against=base.recipe,
        against_model=against_model,
        task=one.task,
        metric=one.metric,
        value=difference,
        ci_low=difference - reach,
        ci_high=difference + reach,
        n=one.n,
        margin=margin,
        is_level=worse <= margin,
    )


def spread(cells: list[Cell]) -> SeedSpread:
    values = [one.value for one in cells]
    return SeedSpread(
        group=cells[0].group,
        models=[one.model for one in cells],
        recipe=cells[0].recipe,
        task=cells[0].task,
        metric=cells[0].metric,
        mean=fmean(values),
        sd=stdev(values),
        low=min(values),
        high=max(values),
        sampling_stderr=math.sqrt(fmean(one.stderr**2 for one in cells)),
    )


def planted(groups: tuple[str, ...] = GROUPS, seeds: int = SEEDS) -> Sweep:
    """Returns the sweep; every figure follows from `value_of`."""
    old = read_json(V3, Sweep)
    cells, deltas, spreads = [], [], []
    for task, metrics in METRICS.items():
        for metric in metrics:
            for recipe in RECIPES:
                for group in groups:
                    mine = [cell(recipe, group, seed, task, metric) for seed in range(seeds)]
                    cells += mine
                    if recipe != "none":
                        bases = [cell("none", group, seed, task, metric) for seed in range(seeds)]
                        deltas += [delta(*pair) for pair in zip(mine, bases, strict=True)]
                    if seeds > 1:
                        spreads.append(spread(mine))
    if len(groups) > 1:
        one, other = (
            cell(recipe, group, 0, "multiple-choice", "acc_norm")
            for recipe, group in (("logits4", groups[0]), ("logits6", groups[1]))
        )
        deltas.append(delta(one, other, against_model=other.model))
    names = list(dict.fromkeys(one.model for one in cells))
    infos = {name.split("-")[0]: info for name, info in zip(GROUPS, old.models, strict=True)}
    masses = [
        AttentionMass(
            model=name,
            task="needles:needles=4",
            depth_frac=depth,
            kind=kind,
            answer=0.27 + 0.05 * depth if name.startswith("diff") else 0.03 + 0.05 * depth,
            needles=0.05,
            noise=0.01 if name.startswith("diff") else 0.4,
            first=0.3,
            question=0.2,
            n=20,
        )
        for name in names
        for kind in ("signed", "share")
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return Sweep(
        models=[replace(infos[name.split("-")[0]], name=name) for name in names],
        data=old.data,
        environment=old.environment,
        cells=cells,
        deltas=deltas,
        headline="diff-s0 at 4 bits per row is level with base-s0 at 8 bits per row.",
        kept=["linear_input/model.layers.0.mlp.down_proj"],
        tasks=[
            TaskInfo(
                name=task,
                metrics=list(metrics),
                unit=UNITS[task],
                higher_is_better={metric: metric not in LOWER for metric in metrics},
                items=COUNTS[task],
                data=old.data,
                sha256="7" * 64,
                shares=[metric for metric in metrics if metric not in LOWER],
            )
            for task, metrics in METRICS.items()
        ],
        spreads=spreads,
        attention_mass=masses,
        notes=["needles:needles=4: every model is at chance (0.08, chance 0.0833, n = 50)."],
    )
