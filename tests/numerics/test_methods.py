"""Range methods: names and their inverse, bad words, and which point takes which."""

from __future__ import annotations

import pytest

from quantkit.errors import InputError
from quantkit.numerics.methods import (
    METHODS,
    WEIGHT_METHODS,
    EntropyRange,
    Method,
    MinMaxRange,
    MovingAverageRange,
    MseRange,
    TwoSidedPercentile,
    UpperPercentile,
    check_weight_method,
    parse_method,
    parse_methods,
)

NAMES: dict[str, Method] = {
    "minmax": MinMaxRange(),
    "moving-average": MovingAverageRange(),
    "moving-average:0.1": MovingAverageRange(averaging_constant=0.1),
    "upper-percentile": UpperPercentile(),
    "upper-percentile:99.9": UpperPercentile(upper_pct=99.9),
    "two-sided-percentile": TwoSidedPercentile(),
    "two-sided-percentile:99.0": TwoSidedPercentile(upper_pct=99.0),
    "entropy": EntropyRange(),
    "entropy:64": EntropyRange(candidates=64),
    "mse": MseRange(),
    "mse:16": MseRange(candidates=16),
}
POINTS = ("linear_input", "attention_logit")


@pytest.mark.parametrize(("name", "method"), NAMES.items(), ids=NAMES)
def test_a_name_is_the_inverse_of_its_parameters(name: str, method: Method) -> None:
    assert str(method) == name
    assert parse_method(name) == method


def test_a_default_written_out_is_the_same_method() -> None:
    assert parse_method("two-sided-percentile:99.99") == TwoSidedPercentile()
    assert parse_method("moving-average:0.01") == MovingAverageRange()


def test_every_method_has_a_name_and_says_what_it_depends_on() -> None:
    methods = [parse_method(name) for name in METHODS]

    assert {str(m) for m in methods if m.depends_on_bits} == {"entropy", "mse"}
    assert {str(m) for m in methods if m.is_order_dependent} == {"moving-average"}
    assert set(METHODS) == {name for name in NAMES if ":" not in name}


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "msee": "unknown range method 'msee'. Did you mean 'mse'",
        "": "unknown range method ''.",
        "minmax:3": "takes no parameter",
        "mse:many": "Expected mse:WHOLE NUMBER",
        "mse:2.5": "Expected mse:WHOLE NUMBER",
        "mse:1": "4 to 1024 candidates",
        "upper-percentile:": "Expected upper-percentile:NUMBER",
        "upper-percentile:0.9999": "in percent",
        "upper-percentile:101": "in percent",
        "two-sided-percentile:nan": "finite",
        "moving-average:0": "in .0, 1.",
        "moving-average:2": "in .0, 1.",
    }.items(),
)
def test_a_bad_word_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_method(text)


def test_points_override_the_default() -> None:
    words = "mse,attention_logit=upper-percentile:99.9"

    chosen = parse_methods(words, POINTS)

    assert chosen.of("linear_input") == MseRange()
    assert chosen.of("attention_logit") == UpperPercentile(upper_pct=99.9)
    assert chosen.methods == (MseRange(), UpperPercentile(upper_pct=99.9))
    assert str(chosen) == words
    assert parse_methods(str(chosen), POINTS) == chosen


def test_without_a_default_it_is_minmax() -> None:
    chosen = parse_methods("attention_logit=mse", POINTS)

    assert chosen.of("linear_input") == MinMaxRange()
    assert str(chosen) == "minmax,attention_logit=mse"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mse,linear_inptu=minmax", "Did you mean 'linear_input'"),
        ("mse,minmax", "one default range method"),
        ("linear_input=mse,linear_input=minmax", "one range method for linear_input"),
        (",mse", "unknown range method ''"),
    ],
)
def test_bad_lists_are_refused(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_methods(words, POINTS)


def test_the_ends_of_a_percentile_and_who_is_named() -> None:
    for kind in (UpperPercentile, TwoSidedPercentile):
        assert kind(upper_pct=100.0).upper_pct == 100.0
        for wrong in (50.0, 100.1, -1.0):
            with pytest.raises(InputError, match=kind.name):
                kind(upper_pct=wrong)
    for searched in (MseRange, EntropyRange):
        for good in (4, 1024):
            assert searched(candidates=good).candidates == good
        for wrong in (3, 1025):
            with pytest.raises(InputError, match=searched.name):
                searched(candidates=wrong)


@pytest.mark.parametrize("name", METHODS)
def test_weights_take_the_methods_that_are_listed_and_no_other(name: str) -> None:
    method = parse_method(name)
    if name in WEIGHT_METHODS:
        check_weight_method(method)
    else:
        with pytest.raises(InputError, match="Weights take minmax, upper-percentile or mse"):
            check_weight_method(method)
