"""From scores to cells, differences and spreads: against loops, over planted losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.numerics.proportions import chance_p, tango_interval
from quantkit.recipe import Recipe
from quantkit.results import Cell, Delta, Fired
from quantkit.sweeps.figures import (
    Figures,
    between,
    cells_of,
    deltas_of,
    figures_of,
    logits_alone,
    margin_of,
    spreads_of,
)
from quantkit.tasks import Metric, Scores

Array = NDArray[np.float64]
FIRED = {"logits/0": Fired(hits=3, elements=60), "logits/1": Fired(hits=4, elements=80)}


def choices(right: Array, norm: Array | None = None) -> Scores:
    one = np.ones(len(right))
    metrics = [
        Metric(
            name=name,
            total=total.astype(float),
            weight=one,
            chance=0.25,
            trials=True,
            is_share=True,
        )
        for name, total in (("acc_norm", right), ("acc", right if norm is None else norm))
    ]
    return Scores(metrics=tuple(metrics), details={"cut": 2.0})


def text(loss: Array, *, tokens: Array | None = None, bytes_a_block: float = 400.0) -> Scores:
    """Per token and per byte, of blocks with this loss a token."""
    tokens = np.full(len(loss), 100.0) if tokens is None else tokens
    nll, sizes = loss * tokens, np.full(len(loss), bytes_a_block)
    return Scores(
        metrics=(
            Metric(name="perplexity", total=nll, weight=tokens, link="exp", higher_is_better=False),
            Metric(
                name="bits_per_byte",
                total=nll / math.log(2),
                weight=sizes,
                higher_is_better=False,
            ),
        )
    )


def row(scores: Scores, recipe: str = "none", model: str = "a", **more: Any) -> Figures:
    task = more.pop("task", "choice")
    items = more.pop("items", [f"item {i}" for i in range(len(scores.metrics[0].total))])
    fired = {} if recipe == "none" else FIRED
    return figures_of(
        model=model,
        recipe=Recipe.parse(recipe),
        task=task,
        items=items,
        scores=scores,
        fired=fired,
        seed=0,
        **more,
    )


def right(share: float, n: int, *, seed: int = 0) -> Array:
    return np.asarray(np.random.default_rng(seed).random(n) < share)


def found(deltas: list[Delta], **wanted: Any) -> list[Delta]:
    return [d for d in deltas if all(getattr(d, name) == value for name, value in wanted.items())]


def test_a_cell_a_metric_with_details_and_quantizers_in_the_first() -> None:
    scores = choices(right(0.5, 80), right(0.3, 80))
    cells = cells_of(row(scores, "w8a8+logits4:head", group="seeds"))
    assert [cell.metric for cell in cells] == ["acc_norm", "acc"]
    first, second = cells
    assert (first.model, first.group, first.recipe, first.task) == (
        "a", "seeds", "w8a8+logits4:head", "choice",
    )  # fmt: skip
    assert (first.bits, first.granularity, first.range) == (4, "head", "dynamic")
    assert (first.weights, first.activations, first.n, first.seed) == (8, 8, 80, 0)
    assert (first.hits, second.hits) == (7, 7)
    assert (first.quantizers, second.quantizers) == (FIRED, {})
    assert (first.details, second.details) == ({"cut": 2.0}, {})
    hits = int(scores.metrics[0].total.sum())
    assert first.value == hits / 80
    assert first.chance == 0.25
    assert first.chance_p == chance_p(hits, 80, 0.25)
    assert first.ci_low < first.value < first.ci_high


def test_a_float_row_and_a_metric_without_chance() -> None:
    cells = cells_of(row(text(np.linspace(2, 3, 12)), task="perplexity"))
    assert [(c.bits, c.granularity, c.hits, c.group) for c in cells] == [(16, None, 0, "a")] * 2
    assert [(c.chance, c.chance_p) for c in cells] == [(None, None)] * 2
    assert cells[0].value == pytest.approx(math.exp(2.5))
    assert cells[1].value == pytest.approx(2.5 * 100 / 400 / math.log(2))


def test_chance_without_independent_trials_has_no_test() -> None:
    one = np.ones(20)
    metric = Metric(name="acc", total=one / 2, weight=one, chance=0.5)
    assert cells_of(row(Scores(metrics=(metric,))))[0].chance_p is None


def test_differences_equal_a_loop() -> None:
    rng = np.random.default_rng(2)
    loss = 3 + 0.3 * rng.standard_normal(17)
    more = loss + 0.002 * rng.standard_normal(17)
    deltas = deltas_of(
        [
            row(text(more), "logits6", task="perplexity"),
            row(text(loss), task="perplexity"),
        ]
    )
    chosen = np.random.default_rng(0).integers(0, 17, size=(2000, 17))
    wanted = [
        math.exp(sum(more[i] for i in draw) / 17) - math.exp(sum(loss[i] for i in draw) / 17)
        for draw in chosen
    ]
    assert [(d.recipe, d.against, d.metric) for d in deltas] == [
        ("logits6", "none", "perplexity"),
        ("logits6", "none", "bits_per_byte"),
    ]
    assert deltas[0].value == pytest.approx(math.exp(more.mean()) - math.exp(loss.mean()))
    assert (deltas[0].ci_low, deltas[0].ci_high) == pytest.approx(
        tuple(np.percentile(wanted, [2.5, 97.5]))
    )
    assert deltas[0].margin == pytest.approx(0.01 * math.exp(loss.mean()))
    assert [d.is_level for d in deltas] == [True, True]
    assert (deltas[0].n, deltas[0].against_model) == (17, "")


@pytest.mark.parametrize(("factor", "is_level"), [(1.0095, True), (1.0105, False)])
def test_bits_per_byte_and_perplexity_have_one_margin(factor: float, is_level: bool) -> None:
    """Every block loses the same: the answer is then that of the value alone."""
    loss = np.full(20, 3.0)
    more = row(text(loss + math.log(factor)), "logits6", task="perplexity")
    deltas = deltas_of([row(text(loss), task="perplexity"), more])
    assert [d.is_level for d in deltas] == [is_level] * 2
    assert deltas[1].margin == pytest.approx(math.log2(1.01) * 100 / 400)


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [
        (Metric(name="acc", total=np.full(4, 0.5), weight=np.ones(4), is_share=True), 0.01),
        (Metric(name="f1", total=np.full(4, 0.5), weight=np.ones(4)), 0.005),
        (
            Metric(name="ppl", total=np.ones(4), weight=np.ones(4), link="exp"),
            0.01 * math.e,
        ),
        (Metric(name="bits", total=np.full(4, 3.0), weight=np.ones(4)), 0.03),
        (
            Metric(name="error", total=np.ones(4), weight=np.full(4, 2.0), higher_is_better=False),
            0.005,
        ),
    ],
    ids=[
        "an accuracy",
        "below one and not declared a share",
        "a perplexity",
        "no share",
        "lower is better",
    ],
)
def test_margins(metric: Metric, wanted: float) -> None:
    assert margin_of(Scores(metrics=(metric,)), 0) == pytest.approx(wanted)


def test_bits_per_byte_below_and_above_one_have_the_same_conclusions() -> None:
    """The same blocks, of more and of fewer bytes: the figure is 0.9 or 1.1."""
    loss = 3 + 0.3 * np.random.default_rng(3).standard_normal(24)
    rows = {"none": loss, "logits8": loss + 0.001, "logits6": loss * 1.002, "logits4": loss * 1.05}
    found = {}
    for bits in (0.9, 1.1):
        sizes = loss.mean() * 100 / math.log(2) / bits
        made = [
            row(text(mine, bytes_a_block=sizes), recipe, task="perplexity")
            for recipe, mine in rows.items()
        ]
        cells = [c for one in made for c in cells_of(one) if c.metric == "bits_per_byte"]
        deltas = [d for d in deltas_of(made) if d.metric == "bits_per_byte"]
        assert cells[0].value == pytest.approx(bits)
        found[bits] = (
            [[f / bits for f in (c.value, c.stderr, c.ci_low, c.ci_high)] for c in cells],
            [[f / bits for f in (d.value, d.ci_low, d.ci_high, d.margin)] for d in deltas],
            [d.is_level for d in deltas],
        )
    for below, above in zip(found[0.9], found[1.1], strict=True):
        assert np.asarray(below) == pytest.approx(np.asarray(above))
    assert found[0.9][2] == [True, True, False]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"total": np.array([1.0, 0.0, 1.5])}, "item 2 has 1.5 of 1"),
        ({"total": np.array([1.0, -1.0, 0.0])}, "item 1 has -1 of 1"),
        ({"total": np.array([math.nan, 1.0, 0.0])}, "item 0 has nan of 1"),
        ({"weight": np.array([1.0, 1.0, 0.0])}, "item 2 has 0 of 0"),
        ({"link": "exp"}, "no exponential"),
    ],
    ids=["above 1", "negative", "nan", "no weight", "an exponential"],
)
def test_what_is_declared_a_share_must_be_one(more: dict[str, Any], said: str) -> None:
    plain = {"name": "acc", "total": np.zeros(3), "weight": np.ones(3), "is_share": True}
    with pytest.raises(InputError, match=f"task choice: metric acc is declared a share.*{said}"):
        row(Scores(metrics=(Metric(**{**plain, **more}),)))


def test_three_points_lost_are_seen_and_none_are_level() -> None:
    base = np.random.default_rng(0).random(2000)
    rows = [
        row(choices(base < 0.5)),
        row(choices(base < 0.47), "logits4"),
        row(choices(base < 0.5), "logits8"),
        row(choices(base < 0.55), "logits6"),
    ]
    levels = {d.recipe: d.is_level for d in deltas_of(rows) if d.metric == "acc_norm"}
    assert levels == {"logits4": False, "logits8": True, "logits6": True}


def test_thirty_items_prove_nothing() -> None:
    same = choices(right(0.5, 30))
    delta = deltas_of([row(same), row(same, "logits8")])[0]
    assert (delta.value, delta.is_level) == (0.0, False)
    assert (delta.ci_low, delta.ci_high) == pytest.approx(tango_interval(0, 0, 30))


def test_a_row_without_its_float_row_is_refused() -> None:
    scores = choices(right(0.5, 30))
    with pytest.raises(InputError, match="a logits8, task choice: expected a float row"):
        deltas_of([row(scores, "logits8"), row(scores, model="b")])
    other = row(scores, items=[f"other {i}" for i in range(30)])
    with pytest.raises(InputError, match="expected the float row's items"):
        deltas_of([row(scores, "logits8"), other])


def test_scores_must_be_over_the_items() -> None:
    with pytest.raises(InputError, match="acc_norm has 30 totals and 30 weights for 29 items"):
        row(choices(right(0.5, 30)), items=["item"] * 29)
    with pytest.raises(InputError, match="gave no figure: it has 0 items"):
        row(choices(right(0.5, 0)), items=[])


def test_two_models_are_held_against_each_other_at_every_width() -> None:
    base = np.random.default_rng(0).random(2000)
    recipes = {"none": 0.6, "logits6": 0.6, "logits6:row": 0.6, "logits4": 0.5, "w8a8": 0.55}
    rows = [row(choices(base < share), recipe) for recipe, share in recipes.items()]
    rows += [
        row(choices(base < share - 0.05), recipe, model="b") for recipe, share in recipes.items()
    ]
    deltas, notes = between(rows)
    assert notes == []
    same = found(deltas, model="a", metric="acc", against_model="b")
    assert [(d.recipe, d.against) for d in same] == [(name, name) for name in recipes]
    crossed = found(deltas, model="a", metric="acc_norm", against_model="b")
    assert {(d.recipe, d.against) for d in crossed} == {
        ("none", "none"), ("none", "logits6"), ("none", "logits6:row"), ("none", "logits4"),
        ("logits6", "none"), ("logits6", "logits6"), ("logits6", "logits4"),
        ("logits6:row", "none"), ("logits6:row", "logits6:row"),
        ("logits4", "none"), ("logits4", "logits6"), ("logits4", "logits4"), ("w8a8", "w8a8"),
    }  # fmt: skip
    (worse,) = found(crossed, recipe="logits4", against="logits6")
    (better,) = found(crossed, recipe="logits6", against="none")
    assert worse.value == pytest.approx((base < 0.5).mean() - (base < 0.55).mean())
    assert (worse.is_level, better.is_level) == (False, True)
    (back,) = found(deltas, model="b", recipe="logits6", against="logits4", metric="acc_norm")
    assert (back.value, back.is_level) == (-worse.value, True)
    assert (back.ci_low, back.ci_high) == pytest.approx((-worse.ci_high, -worse.ci_low))


def test_models_with_other_items_are_not_compared() -> None:
    scores = choices(right(0.5, 40))
    other = row(scores, model="b", items=[f"other {i}" for i in range(40)])
    deltas, notes = between([row(scores), other])
    assert deltas == []
    assert notes == ["choice: a and b were not measured on the same items."]


def test_blocks_of_two_tokenizers_say_why_they_do_not_pair() -> None:
    loss = np.random.default_rng(0).normal(3, 0.1, 20)
    other = row(text(loss), model="b", task="perplexity", items=[f"cut {i}" for i in range(20)])
    deltas, notes = between([row(text(loss), task="perplexity"), other])
    assert deltas == []
    assert notes == [
        "perplexity: a and b were not measured on the same items: blocks are cut by tokens, and "
        "another tokenizer cuts the text elsewhere. Documents that fit --seq-len (a folder or a "
        ".jsonl) compare in bits per byte."
    ]


def test_perplexities_over_other_tokens_are_not_compared_but_bytes_are() -> None:
    loss = np.random.default_rng(0).normal(3, 0.1, 20)
    fewer = text(loss * 100 / 90, tokens=np.full(20, 90.0))
    rows = [row(text(loss), task="perplexity"), row(fewer, model="b", task="perplexity")]
    rows += [row(text(loss), "logits8", task="perplexity")]
    deltas, notes = between(rows)
    assert {d.metric for d in deltas} == {"bits_per_byte"}
    assert ("logits8", "none") in {(d.recipe, d.against) for d in deltas if d.model == "a"}
    assert all(d.value == pytest.approx(0) and d.is_level for d in deltas)
    assert notes == [
        "perplexity: perplexity of a and b cannot be compared, since they are over different "
        "tokens."
    ]


def test_seeds_of_a_group_are_no_pair_and_have_no_crossed_widths() -> None:
    scores = choices(right(0.5, 40))
    rows = [
        row(scores, recipe, model=model, group=model[0])
        for model in ("a1", "a2", "b")
        for recipe in ("none", "logits4")
    ]
    deltas, _ = between(rows)
    assert {(d.model, d.against_model) for d in deltas} == {
        ("a1", "b"), ("a2", "b"), ("b", "a1"), ("b", "a2"),
    }  # fmt: skip
    assert all(d.recipe == d.against for d in deltas)


def cell(model: str, value: float, stderr: float, recipe: str = "none") -> Cell:
    return Cell(
        model=model, recipe=recipe, bits=16, granularity=None, range=None, weights=None,
        activations=None, task="t", metric="acc", value=value, stderr=stderr, ci_low=0.0,
        ci_high=1.0, n=10, seed=0, hits=0, group=model[0],
    )  # fmt: skip


def test_the_spread_of_seeds_stands_beside_their_sampling_error() -> None:
    seeds = [cell("a1", 0.5, 0.03), cell("a2", 0.6, 0.04), cell("a3", 0.55, 0.05)]
    (spread,) = spreads_of([*seeds, cell("b", 0.1, 0.01), cell("a1", 0.4, 0.03, "logits4")])
    assert (spread.group, spread.models, spread.recipe) == ("a", ["a1", "a2", "a3"], "none")
    assert (spread.mean, spread.sd) == pytest.approx((0.55, 0.05))
    assert (spread.low, spread.high) == (0.5, 0.6)
    assert spread.sampling_stderr == pytest.approx(math.sqrt((9 + 16 + 25) / 3) / 100)


@pytest.mark.parametrize(
    ("recipe", "alone"),
    [("logits4:head", True), ("none", False), ("w8a8+logits4", False), ("w8", False)],
)
def test_logits_alone(recipe: str, alone: bool) -> None:
    assert (logits_alone(Recipe.parse(recipe)) is not None) == alone
