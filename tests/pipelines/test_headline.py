"""The sentences of a sweep: golden ones by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quantkit.numerics.proportions import tango_interval
from quantkit.pipelines.headline import LEAST_ITEMS, chance_sentence, headline
from quantkit.recipe import Recipe
from quantkit.results import Cell, DataInfo, Delta, TaskInfo

DATA = DataInfo(
    source="t", sha256="0", sequences=1, seq_len=0, tokens=1, bos="never", batch_size=1,
    block_hashes=[], skipped_blocks=0, python="3",
)  # fmt: skip


def task(name: str, unit: str, **metrics: bool) -> TaskInfo:
    """Returns a task whose metrics are shares where higher is better."""
    return TaskInfo(
        name=name, metrics=list(metrics), unit=unit, higher_is_better=metrics, items=1,
        data=DATA, sha256="0", shares=[name for name, higher in metrics.items() if higher],
    )  # fmt: skip


TEXT = task("perplexity", "blocks", perplexity=False)
CHOICE = task("multiple-choice", "items", acc_norm=True, acc=True)
NEEDLES = task("needles", "samples", exact=True)


def cell(info: TaskInfo, recipe: str, value: float, model: str = "m", **more: Any) -> Cell:
    parsed = Recipe.parse(recipe)
    logits = parsed.logits
    return Cell(
        model=model, recipe=recipe, bits=16 if logits is None else logits.bits,
        granularity=None if logits is None else logits.granularity,
        range=None if logits is None else logits.range, weights=parsed.weight_bits,
        activations=parsed.activation_bits, task=info.name,
        metric=more.pop("metric", info.metrics[0]), value=value, stderr=0.01,
        ci_low=value - 0.02, ci_high=more.pop("ci_high", value + 0.02), n=more.pop("n", 8), seed=0,
        hits=1, **more,
    )  # fmt: skip


def delta(
    info: TaskInfo, recipe: str, value: float, *, level: bool, model: str = "m", **more: Any
) -> Delta:
    return Delta(
        model=model, recipe=recipe, against=more.pop("against", "none"), task=info.name,
        metric=info.metrics[0], value=value, ci_low=value - 0.01, ci_high=value + 0.01,
        n=more.pop("n", 8), margin=more.pop("margin", 0.01), is_level=level, **more,
    )  # fmt: skip


def test_one_model_says_the_fewest_bits_and_the_best_granularity() -> None:
    cells = [
        cell(TEXT, "none", 18.594),
        cell(TEXT, "logits8", 18.62),
        cell(TEXT, "logits6", 18.7),
        cell(TEXT, "logits6:row", 18.63),
        cell(TEXT, "logits4:row", 19.58),
    ]
    deltas = [
        delta(TEXT, "logits8", 0.02, level=True, margin=0.18594),
        delta(TEXT, "logits6", 0.1, level=True, margin=0.18594),
        delta(TEXT, "logits6:row", 0.04, level=True, margin=0.18594),
        delta(TEXT, "logits4:row", 0.98, level=False, margin=0.18594),
    ]
    assert headline(cells, deltas, tasks=[TEXT]) == (
        "m: attention logits at 6 bits per row keep the perplexity within 1 % of float (18.63 "
        "against 18.59, n = 8 blocks)."
    )


def test_one_model_of_which_no_width_is_level() -> None:
    cells = [cell(TEXT, "none", 20.0), cell(TEXT, "logits4", 25.0)]
    deltas = [delta(TEXT, "logits4", 5.0, level=False, margin=0.2)]
    assert headline(cells, deltas, tasks=[TEXT]) == (
        "m: no tried width of the attention logits is shown to stay within 1 % of the float "
        "perplexity 20.00 at 95 %; 4 bits per tensor differ by +5.00 [+4.99, +5.01] (n = 8)."
    )


def test_the_least_items_of_a_level_are_those_of_tangos_interval() -> None:
    assert (
        max(tango_interval(0, 0, LEAST_ITEMS)) <= 0.01 < max(tango_interval(0, 0, LEAST_ITEMS - 1))
    )


def test_few_units_prove_nothing() -> None:
    cells = [dataclasses.replace(cell(TEXT, name, 20.0), n=5) for name in ("none", "logits8")]
    deltas = [dataclasses.replace(delta(TEXT, "logits8", 0.0, level=False, margin=0.2), n=5)]
    assert headline(cells, deltas, tasks=[TEXT]).startswith(
        "m: n = 5 blocks are too few to show that a width of the attention logits stays within "
        "1 % of the float perplexity 20.00 at 95 % (6 are needed, or more); 8 bits per tensor "
    )


def test_one_model_without_quantized_logits() -> None:
    assert headline([cell(TEXT, "none", 20.0)], [], tasks=[TEXT]) == (
        "m: float perplexity 20.00; no quantized logits were tried."
    )


def test_other_recipes_are_listed() -> None:
    cells = [
        cell(CHOICE, "none", 0.5, n=900),
        cell(CHOICE, "w8a8", 0.49, n=900),
        cell(CHOICE, "w8a8+logits4", 0.3, n=900),
        cell(CHOICE, "logits8:head:static:asymmetric", 0.499, n=900),
    ]
    deltas = [
        delta(CHOICE, recipe, -0.1, level=recipe.startswith("logits8"))
        for recipe in ("w8a8", "w8a8+logits4", "logits8:head:static:asymmetric")
    ]
    assert headline(cells, deltas, tasks=[CHOICE]) == (
        "m: acc_norm of multiple-choice 0.500 in float, w8a8 0.490 (-1.0 points), w8a8+logits4 "
        "0.300 (-20.0 points). m: attention logits at 8 bits per head (static, asymmetric) keep "
        "the acc_norm of multiple-choice within 1 point of float (0.499 against 0.500, n = 900 "
        "items)."
    )


def test_the_best_granularity_follows_the_direction_of_the_metric() -> None:
    cells = [
        cell(CHOICE, "none", 0.5),
        cell(CHOICE, "logits6", 0.51),
        cell(CHOICE, "logits6:row", 0.495),
    ]
    deltas = [
        delta(CHOICE, "logits6", 0.01, level=True),
        delta(CHOICE, "logits6:row", -0.005, level=True),
    ]
    assert "at 6 bits per tensor keep" in headline(cells, deltas, tasks=[CHOICE])


def test_a_model_at_chance_is_said_to_be_and_nothing_else() -> None:
    cells = [
        cell(NEEDLES, "none", 0.02, n=50, chance=0.25, chance_p=0.9),
        cell(NEEDLES, "logits4", 0.02, n=50, chance=0.25, chance_p=0.9),
    ]
    deltas = [delta(NEEDLES, "logits4", 0.0, level=True)]
    assert headline(cells, deltas, tasks=[NEEDLES]) == (
        "needles: m is at chance (0.020, chance 0.25, p = 0.9, n = 50)."
    )


def test_few_items_do_not_prove_that_a_model_is_at_chance() -> None:
    """One right of three: the interval reaches to 79 %, so that nothing is known."""
    cells = [
        cell(NEEDLES, recipe, 1 / 3, n=3, chance=0.25, chance_p=0.58, ci_high=0.79)
        for recipe in ("none", "logits4")
    ]
    deltas = [delta(NEEDLES, "logits4", 0.0, level=True)]
    assert headline(cells, deltas, tasks=[NEEDLES]) == (
        "needles: m is not shown to be above chance (0.333, chance 0.25, p = 0.58, n = 3)."
    )
    assert chance_sentence(cells[1]) == (
        "needles: m with logits4 is not shown to be above chance (0.333, chance 0.25, p = 0.58, "
        "n = 3)."
    )


def test_the_test_of_several_orders_is_of_the_first() -> None:
    one = cell(
        NEEDLES, "none", 0.26, n=800, chance=0.25, chance_p=0.31, ci_high=0.29,
        details={"order_min": 0.25, "order_sd": 0.01},
    )  # fmt: skip
    assert chance_sentence(one) == (
        "needles: m is at chance (0.260 over all orders, chance 0.25, p = 0.31 in the first, "
        "n = 800)."
    )


@pytest.mark.parametrize(
    ("base", "value", "said"),
    [
        (20.0, 19.0, "w8a8 19.00 (-5.0 %)"),
        (0.8, 0.76, "w8a8 0.760 (-5.0 %)"),
        (-2.0, -2.1, "w8a8 -2.10 (-5.0 %)"),
        (0.0, 0.1, "w8a8 0.100 (+0.100)"),
    ],
    ids=["above one", "below one", "negative", "from zero"],
)
def test_what_is_better_when_higher_and_no_share_changes_in_percent(
    base: float, value: float, said: str
) -> None:
    bleu = dataclasses.replace(task("bleu", "items", bleu=True), shares=[])
    cells = [cell(bleu, "none", base), cell(bleu, "w8a8", value), cell(bleu, "logits4", value)]
    deltas = [delta(bleu, "logits4", value - base, level=False, margin=0.01 * abs(base))]
    found = headline(cells, deltas, tasks=[bleu])
    assert said in found
    assert "point" not in found
    assert ("within 1 % of" in found) == (base != 0)


def pair(levels: dict[tuple[str, str, str, str], bool]) -> tuple[list[Cell], list[Delta]]:
    """Figure 8's values, and deltas between the models that are level where it is said."""
    values = {
        "diff": {"none": 0.662, "logits6": 0.660, "logits4": 0.588},
        "base": {"none": 0.634, "logits6": 0.589, "logits4": 0.339},
    }
    cells = [
        cell(CHOICE, recipe, value, model, n=2000)
        for model, own in values.items()
        for recipe, value in own.items()
    ]
    deltas = [
        delta(
            CHOICE, recipe, values[model][recipe] - values[other][against], model=model,
            against_model=other, against=against, n=2000,
            level=levels.get((model, recipe, other, against), False),
        )
        for model, other in (("diff", "base"), ("base", "diff"))
        for recipe in values[model]
        for against in values[other]
    ]  # fmt: skip
    return cells, deltas


def test_two_models_say_the_fewest_bits_against_the_most() -> None:
    cells, deltas = pair(
        {
            ("diff", "logits4", "base", "logits6"): True,
            ("diff", "logits4", "base", "logits4"): True,
            ("diff", "logits6", "base", "logits6"): True,
            ("diff", "logits6", "base", "none"): True,
            ("diff", "none", "base", "none"): True,
            ("base", "none", "diff", "logits4"): True,
        }
    )
    said = headline(cells, deltas, tasks=[CHOICE])
    assert said.startswith(
        "diff at 4 bits per tensor is level with base at 6 bits per tensor in acc_norm of "
        "multiple-choice (0.588 against 0.589, difference -0.001 [-0.011, +0.009], margin 0.010, "
        "n = 2000 items). diff at 6 bits per tensor is better than base at 16 bits in acc_norm of "
        "multiple-choice (0.660 against 0.634, difference +0.026 [+0.016, +0.036], margin 0.010, "
        "n = 2000 items). diff: "
    )
    assert "base at 16 bits is" not in said


def test_two_models_that_are_level_at_equal_widths_say_the_most_bits() -> None:
    cells, deltas = pair(
        {
            ("base", "none", "diff", "none"): True,
            ("base", "logits4", "diff", "logits4"): True,
        }
    )
    said = headline(cells, deltas, tasks=[CHOICE])
    assert said.startswith("base at 16 bits is level with diff at 16 bits in acc_norm")
    assert "base at 4 bits per tensor is level" not in said


def test_two_models_of_which_none_is_level_say_what_was_seen() -> None:
    cells, deltas = pair({})
    assert headline(cells, deltas, tasks=[CHOICE]).startswith(
        "diff and base: neither is shown to be level with the other in acc_norm of "
        "multiple-choice: at 16 bits diff minus base is +0.028 [+0.018, +0.038]; at 4 bits per "
        "tensor diff minus base is +0.249 [+0.239, +0.259] (n = 2000 items)."
    )


def test_two_models_over_other_items_are_not_compared() -> None:
    cells, _ = pair({})
    assert headline(cells, [], tasks=[CHOICE]).startswith(
        "diff and base: acc_norm of multiple-choice 0.662 and 0.634 in float, which cannot be "
        "compared: they are over other items or tokens. diff: no tried width"
    )


def test_rows_that_only_guess_are_level_with_nothing() -> None:
    cells, deltas = pair({("diff", "logits4", "base", "logits6"): True})
    guessing = [
        cell(CHOICE, "logits6", 0.24, "base", chance=0.25, chance_p=0.7) if c.model == "base"
        and c.recipe == "logits6" else c
        for c in cells
    ]  # fmt: skip
    assert "is level with" in headline(cells, deltas, tasks=[CHOICE])
    assert "is level with" not in headline(guessing, deltas, tasks=[CHOICE])


def test_a_model_at_chance_is_not_compared() -> None:
    cells = [
        cell(NEEDLES, "none", 0.02, "a", n=50, chance=0.25, chance_p=1.0),
        cell(NEEDLES, "none", 0.9, "b", n=50, chance=0.25, chance_p=1e-20),
    ]
    assert headline(cells, [], tasks=[TEXT, NEEDLES]) == (
        "needles: a is at chance (0.020, chance 0.25, p = 1, n = 50)."
    )


def test_of_three_models_each_is_held_against_the_first() -> None:
    cells = [cell(TEXT, "none", 20.0 + i, model) for i, model in enumerate("abc")]
    deltas = [
        delta(TEXT, "none", i - 0.5, level=False, model="a", against_model=model)
        for i, model in enumerate("bc")
    ]
    said = headline(cells, deltas, tasks=[TEXT])
    assert "a and b: neither" in said
    assert "a and c: neither" in said
    assert "b and c" not in said


def test_nothing_measured_says_nothing() -> None:
    assert headline([], [], tasks=[TEXT]) == ""
