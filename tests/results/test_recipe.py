"""Recipes: `parse` and `str` are inverses, and errors teach."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.recipe import LogitQuant, Recipe

logit_quants = st.builds(
    LogitQuant,
    bits=st.integers(2, 15),
    granularity=st.sampled_from(["tensor", "head"]),
    range=st.sampled_from(["dynamic", "static"]),
    symmetric=st.booleans(),
) | st.builds(
    LogitQuant, bits=st.integers(2, 15), granularity=st.just("row"), symmetric=st.booleans()
)
recipes = st.builds(
    Recipe,
    weights=st.none() | st.integers(2, 16),
    activations=st.none() | st.integers(2, 16),
    logits=st.none() | logit_quants,
)


@given(recipes)
def test_parse_is_the_inverse_of_str(recipe: Recipe) -> None:
    assert Recipe.parse(str(recipe)) == recipe


@given(st.text(alphabet="wa0123456789logits+:headrw nonemyc", max_size=20))
def test_any_text_is_a_recipe_or_an_input_error(text: str) -> None:
    try:
        recipe = Recipe.parse(text)
    except InputError:
        return
    assert Recipe.parse(str(recipe)) == recipe


@pytest.mark.parametrize(
    "name",
    ["none", "w8", "a16", "w8a8", "w8a8+logits4", "logits6", "logits4:head", "logits4:row",
     "logits4:tensor:static", "w4a8+logits8:head:static", "logits4:asymmetric",
     "logits4:row:asymmetric", "logits8:head:static:asymmetric",
     "logits8:tensor:static:asymmetric"],
)  # fmt: skip
def test_canonical_names_stay(name: str) -> None:
    assert str(Recipe.parse(name)) == name


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("logits4:tensor:dynamic", "logits4"),
        ("logits4:static", "logits4:tensor:static"),
        ("logits4:static:head", "logits4:head:static"),
        ("logits4+w8a8", "w8a8+logits4"),
        ("logits4:symmetric", "logits4"),
        ("logits4:asymmetric:static", "logits4:tensor:static:asymmetric"),
        (" W8A8 ", "w8a8"),
    ],
)
def test_other_spellings_have_one_name(name: str, canonical: str) -> None:
    assert str(Recipe.parse(name)) == canonical


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("w8a8+logit4", "Did you mean 'w8a8+logits4'"),
        ("", "Examples:"),
        ("w8+", "Examples:"),
        ("w", "Examples:"),
        ("none+w8", "'none'"),
        ("logits4:hed", "Did you mean 'head'"),
        ("logits4:", "unknown option ''"),
        ("logits4:row:static", "cannot have a static range per row"),
        ("logits4:head:row", "twice"),
        ("logits4:symmetric:asymmetric", "twice"),
        ("logits4:asymetric", "Did you mean 'asymmetric'"),
        ("logits4:row:static:asymmetric", "cannot have a static range per row"),
        ("logits4+logits6", "twice"),
        ("w8+a8", "twice"),
        ("logits16", "Leave the part out"),
        ("logits1", "2 to 15"),
        ("w1a8", "2 to 16"),
        ("w8a" + "9" * 5000, "2 to 16"),
    ],
)
def test_errors_teach(name: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        Recipe.parse(name)


def test_what_a_recipe_needs() -> None:
    assert Recipe.parse("none").is_float
    assert not Recipe.parse("w8").needs_ranges
    assert Recipe.parse("w8a8").needs_ranges
    assert not Recipe.parse("logits4:row").needs_ranges
    assert Recipe.parse("logits4:head:static").needs_ranges


def test_a_name_says_which_grid() -> None:
    """Where nothing is said it is the symmetric one, as names always meant."""
    assert Recipe.parse("logits4:head").logits == LogitQuant(bits=4, granularity="head")
    found = Recipe.parse("logits4:asymmetric").logits
    assert found == LogitQuant(bits=4, symmetric=False)
