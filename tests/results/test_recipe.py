"""Recipes: `parse` and `str` are inverses, and errors teach."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.recipe import (
    ActivationQuant,
    BitsAndBytes,
    CacheQuant,
    LogitQuant,
    ProbabilityQuant,
    QueryKeyQuant,
    Recipe,
    WeightQuant,
)

logit_quants = st.builds(
    LogitQuant,
    bits=st.integers(2, 15),
    granularity=st.sampled_from(["tensor", "head"]),
    range=st.sampled_from(["dynamic", "static"]),
    symmetric=st.booleans(),
) | st.builds(
    LogitQuant, bits=st.integers(2, 15), granularity=st.just("row"), symmetric=st.booleans()
)
weight_quants = st.builds(
    WeightQuant, bits=st.integers(2, 16), group_size=st.none() | st.integers(2, 512)
)
four_bits = st.builds(
    BitsAndBytes, format=st.sampled_from(["nf4", "fp4"]), block=st.sampled_from([64, 128, 4096])
)
activation_quants = st.builds(
    ActivationQuant,
    bits=st.integers(2, 16),
    range=st.sampled_from(["dynamic", "static"]),
    symmetric=st.booleans(),
) | st.builds(
    ActivationQuant,
    bits=st.integers(2, 16),
    granularity=st.just("token"),
    range=st.just("dynamic"),
    symmetric=st.booleans(),
)
query_key_quants = st.builds(
    QueryKeyQuant,
    bits=st.integers(2, 15),
    granularity=st.sampled_from(["token", "head", "tensor"]),
    smooth=st.booleans(),
)
probability_quants = st.builds(ProbabilityQuant, bits=st.integers(2, 15)) | st.builds(
    ProbabilityQuant,
    bits=st.integers(2, 15),
    range=st.sampled_from(["dynamic", "static"]),
    granularity=st.sampled_from(["tensor", "head"]),
)
cache_quants = st.builds(
    CacheQuant,
    bits=st.integers(2, 15),
    granularity=st.sampled_from(["tensor", "head"]),
    range=st.sampled_from(["dynamic", "static"]),
    symmetric=st.booleans(),
) | st.builds(CacheQuant, bits=st.integers(2, 15), symmetric=st.booleans())
recipes = st.builds(
    Recipe,
    weights=st.none() | weight_quants | four_bits,
    activations=st.none() | activation_quants,
    logits=st.none() | logit_quants,
    queries_keys=st.none() | query_key_quants,
    probabilities=st.none() | probability_quants,
    cache=st.none() | cache_quants,
) | st.builds(
    Recipe,
    weights=st.builds(
        BitsAndBytes, format=st.just("llm-int8"), threshold=st.sampled_from([0.0, 3.5, 6.0, 20.0])
    ),
    logits=st.none() | logit_quants,
    cache=st.none() | cache_quants,
)


@pytest.mark.kind(10, "sweep")
@given(recipes)
def test_parse_is_the_inverse_of_str(recipe: Recipe) -> None:
    assert Recipe.parse(str(recipe)) == recipe


@pytest.mark.kind(10, "sweep")
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
     "logits8:tensor:static:asymmetric", "w4a16:group64", "w8a8:token", "w8a8:dynamic:symmetric",
     "qk8", "qk8:smooth", "qk4:head", "probs8", "probs8:dynamic", "probs8:static", "kv4",
     "kv4:static", "kv4:tensor:static", "nf4", "nf4:group128+a8", "llm-int8", "llm-int8:3.5",
     "fp4+logits4+qk8+probs8+kv8"],
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
        ("w8+a8", "w8a8"),
        ("w4a8:token:group32", "w4a8:group32:token"),
        ("probs8:row", "probs8:dynamic"),
        ("kv8:static:head", "kv8:static"),
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
        ("w8+w4", "names weights twice"),
        ("w8+nf4", "names weights twice"),
        ("w8a8+a4", "names activations twice"),
        ("llm-int8+a8", "leave a8 out"),
        ("w8:token", "unknown option 'token' of weights"),
        ("a8:group32", "unknown option 'group32' of inputs"),
        ("w8a8:token:static", "static range per token"),
        ("probs8:unit:head", "have one scale"),
        ("nf4:group32", "takes groups of 64"),
        ("kv16", "2 to 15 bits"),
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
