"""Planted shares of right items, from scores to the sentence."""

from __future__ import annotations

import numpy as np

from quantkit.pipelines.headline import headline
from quantkit.recipe import Recipe
from quantkit.results import Fired
from quantkit.sweeps.figures import between, cells_of, deltas_of, figures_of, spreads_of
from quantkit.tasks import Metric, Scores
from tests.pipelines.test_headline import task


def planted(shares: dict[str, dict[str, float]], n: int, groups: dict[str, str]) -> str:
    """Returns the headline of models that are right on nested items: all pairs as measured."""
    luck = np.random.default_rng(3).random(n)
    rows = [
        figures_of(
            model=model,
            group=groups.get(model, ""),
            recipe=Recipe.parse(recipe),
            task="multiple-choice",
            items=[f"item {i}" for i in range(n)],
            scores=Scores(
                metrics=(
                    Metric(
                        name="acc_norm",
                        total=(luck < share).astype(float),
                        weight=np.ones(n),
                        is_share=True,
                    ),
                )
            ),
            fired={"logits": Fired(hits=1, elements=1)},
            seed=0,
        )
        for model, own in shares.items()
        for recipe, share in own.items()
    ]
    cells = [found for row in rows for found in cells_of(row)]
    return headline(
        cells,
        [*deltas_of(rows), *between(rows)[0]],
        tasks=[task("multiple-choice", "items", acc_norm=True)],
        spreads=spreads_of(cells),
    )


FIGURE_8 = {
    "diff": {"none": 0.662, "logits6": 0.660, "logits4": 0.588},
    "base": {"none": 0.634, "logits6": 0.589, "logits4": 0.339},
}


def test_figure_8_with_enough_items() -> None:
    said = planted(FIGURE_8, 4000, {})
    assert "diff at 4 bits per tensor is level with base at 6 bits per tensor" in said
    assert "diff at 6 bits per tensor is better than base at 16 bits" in said
    assert "base at" not in said.replace("with base at", "").replace("than base at", "")
    assert "diff: attention logits at 6 bits per tensor keep the acc_norm" in said
    assert "base: no tried width of the attention logits is shown to stay within 1 point" in said


def test_thirty_items_show_a_gap_and_no_equality() -> None:
    said = planted(FIGURE_8, 30, {})
    assert said.startswith("diff at 4 bits per tensor is better than base at 4 bits per tensor")
    assert "level with" not in said
    assert said.count("n = 30 items are too few to show") == 2


def test_thirty_items_do_not_prove_that_a_model_is_itself() -> None:
    said = planted({"a": FIGURE_8["diff"], "b": FIGURE_8["diff"]}, 30, {})
    assert said.startswith(
        "a and b: neither is shown to be level with the other in acc_norm of multiple-choice: at "
        "16 bits a minus b is +0.000 [-0.114, +0.114]; at 4 bits per tensor a minus b is +0.000 "
        "[-0.114, +0.114] (n = 30 items)."
    )


def test_three_points_lost_are_never_level() -> None:
    shares = {
        "a": {"none": 0.57, "logits4": 0.57},
        "b": {"none": 0.60, "logits4": 0.60},
    }
    said = planted(shares, 2000, {})
    assert "with b at" not in said
    assert "than b at" not in said
    assert "b at 4 bits per tensor is better than a at 16 bits" in said


def test_seeds_are_compared_by_their_means() -> None:
    shares = {
        "d1": {"none": 0.66, "logits8": 0.66, "logits4": 0.59},
        "d2": {"none": 0.65, "logits8": 0.65, "logits4": 0.58},
        "base": {"none": 0.63, "logits8": 0.63, "logits4": 0.34},
    }
    said = planted(shares, 2000, {"d1": "diff", "d2": "diff"})
    assert said.startswith("diff and base in acc_norm of multiple-choice: at 16 bits 0.6")
    assert "(2 seeds, sd 0.00" in said
    assert "; at 4 bits per tensor 0." in said
    assert "(one seed, sampling error 0.01" in said
    assert (
        "diff (2 seeds): attention logits at 8 bits per tensor keep every seed's acc_norm of "
        "multiple-choice within 1 point of its float row (n = 2000 items each)."
    ) in said
    assert "level with" not in said


def test_a_seed_that_is_not_level_speaks_for_its_group() -> None:
    shares = {"d1": {"none": 0.66, "logits4": 0.66}, "d2": {"none": 0.66, "logits4": 0.5}}
    said = planted(shares, 2000, {"d1": "diff", "d2": "diff"})
    assert said == (
        "diff (2 seeds): no tried width of the attention logits is shown to keep every seed's "
        "acc_norm of multiple-choice within 1 point of its float row at 95 % (n = 2000 items each)."
    )
