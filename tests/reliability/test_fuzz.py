"""Kind 10: whatever a parser is given, it reads and can print again, or refuses in one line.

The first `CASES` inputs a parser of the run that `benchmarks/fuzz.py` makes large: 60 for each of
37 parsers and 2 or 6 for each of 9 pages that show what was read, 2,262 in all; and values of every
result class made from its annotations.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz
from benchmarks.fuzz import fed
from benchmarks.fuzz_targets import RESULTS, Target, targets
from quantkit.errors import InputError, QuantkitError
from quantkit.results import Ranges, Sweep, read_json, write_json
from quantkit.results.io import dumps

CASES = 60
TARGETS = list(targets())
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    float: st.floats() | st.sampled_from([5e-324, -0.0, 1.7e308]),
    int: st.integers(),
    str: TEXT,
    bool: st.booleans(),
    type(None): st.none(),
}


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=pytest.mark.kind(10, target.stage), id=target.name)
        for target in TARGETS
    ],
)
def test_damaged_input_is_read_or_refused_in_one_line(target: Target, tmp_path: Path) -> None:
    cases = CASES // target.cost

    found = fed(target, cases, 0, tmp_path)

    assert found.failures == {}
    assert (found.cases, found.accepted + found.refused) == (cases, cases)
    assert found.accepted >= len(target.seeds)


def test_no_parser_takes_everything_or_nothing(tmp_path: Path) -> None:
    assert len(TARGETS) >= 36
    for target in TARGETS:
        damaged = set(fuzz.inputs(target, CASES, 0)) - set(target.seeds)
        assert len(damaged) > CASES // 3, target.name


def _refuses_nothing(text: bytes, _: Path) -> None:
    raise KeyError(text)


def _says_too_much(_: bytes, __: Path) -> None:
    error = InputError("")
    error.args = ("two\nlines",)
    raise error


def _is_slow(_: bytes, __: Path) -> None:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass


def _takes_memory(_: bytes, __: Path) -> None:
    assert len(b"x" * (250 << 20))


def _reads_another(_: bytes, __: Path) -> None:
    raise AssertionError("another value")


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (_refuses_nothing, "KeyError"),
        (_says_too_much, "an example is refused"),
        (_says_too_much, "an error of several lines"),
        (_is_slow, "takes more than"),
        (_takes_memory, "takes more than 200 MB"),
        (_reads_another, "AssertionError: another value"),
    ],
    ids=["another error", "a refused example", "several lines", "slow", "memory", "no round trip"],
)
def test_a_planted_fault_is_found(
    use: Callable[[bytes, Path], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if use is _is_slow:
        monkeypatch.setattr(fuzz, "MOST_S", 0.01)
    planted = Target(name="planted", stage="cli", damage="bytes", seeds=(b"seed",), use=use)

    found = fed(planted, 2, 0, tmp_path)

    assert found.failed
    assert any(wrong.startswith(said) for wrong in found.failures)


def test_cases_follow_from_the_seed() -> None:
    first, again, other = (list(fuzz.inputs(TARGETS[0], 40, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "message", ["one\ntwo\r\n\u2028three", "x" * 30_000], ids=["lines", "long"]
)
def test_an_error_is_one_line_whatever_it_quotes(message: str) -> None:
    said = str(QuantkitError(f"got {message}, expected a word."))

    assert len(said.splitlines()) == 1
    assert len(said) <= fuzz.MOST_CHARACTERS
    assert said.startswith("got ")
    assert said.endswith("expected a word.")


@pytest.mark.kind(10, "report")
@pytest.mark.parametrize("name", RESULTS)
def test_any_value_of_a_result_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    cls = RESULTS[name][0]
    path = tmp_path / "result.json"

    @settings(
        derandomize=True, database=None, deadline=None, max_examples=8,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(_values(cls))
    def check(value: Any) -> None:
        text = dumps(value)
        path.write_bytes(text.encode())
        assert dumps(read_json(path, cls)) == text

    check()


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation; short lists, since a result has many."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = {
            field.name: st.just(field.default)
            if field.name == "schema"
            else _values(hints[field.name])
            for field in dataclasses.fields(kind)
        }
        return st.builds(kind, **parts)  # type: ignore[arg-type]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_values, args))
    if origin is dict:
        return st.dictionaries(TEXT, _values(args[1]), max_size=1)
    if origin in (list, tuple):
        items = st.lists(_values(args[0]), max_size=2)
        return items.map(tuple) if origin is tuple else items
    return LEAVES[kind]


@pytest.mark.kind(10, "report")
def test_a_name_that_is_no_text_is_written_and_read(tmp_path: Path) -> None:
    found = read_json(RESULTS["ranges"][1][1], Ranges)
    odd = dataclasses.replace(found, method="models/b\udcffse")

    write_json(tmp_path / "ranges.json", odd)

    assert read_json(tmp_path / "ranges.json", Ranges).method == "models/b?se"


@pytest.mark.kind(10, "report")
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"schema": ', '"cells": [], "schema": ', "the field 'cells' stands there twice"),
        ('"seed": 0', '"seed": NaN', "NaN is no number of JSON"),
        ('"seed": 0', '"seed": -Infinity', "-Infinity is no number of JSON"),
        ('"seed": 0', f'"seed": {"9" * 5000}', "is not JSON: Exceeds the limit"),
        ('"value": 0.47', f'"value": {"9" * 400}', "expected a number below 1.8e308"),
        ('"multiple-choice"', '"\\ud800"', "half a surrogate pair"),
    ],
    ids=["twice", "NaN", "infinity", "digits", "above float64", "half a pair"],
)
def test_what_json_allows_or_its_reader_lets_pass_is_refused(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.json"
    text = RESULTS["sweep"][1][1].read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")

    with pytest.raises(InputError, match=said):
        read_json(path, Sweep)
