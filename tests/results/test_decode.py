"""Lists of numbers and names are read whole; what is no such list is still named by its place."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.results import decode


def read(plain: Any, kind: Any) -> Any:
    return decode(plain, kind, "f: ", "x", False)


def test_whole_numbers_among_floats_become_floats() -> None:
    found = read([1, 2.5, -3], list[float])
    assert found == [1.0, 2.5, -3.0]
    assert [type(value) for value in found] == [float] * 3


def test_what_only_json_lacks_is_read_inside_of_lists() -> None:
    first, second, third, last = read([0.5, None, "inf", "-inf"], list[float])
    assert (first, third, last) == (0.5, math.inf, -math.inf)
    assert math.isnan(second)


def test_a_list_is_copied_and_a_tuple_is_one() -> None:
    plain = [1, 2]
    assert read(plain, list[int]) == plain
    assert read(plain, list[int]) is not plain
    assert read(plain, tuple[int, ...]) == (1, 2)
    assert read([], list[str]) == []
    assert read([[1], [2, 3.5]], list[list[float]]) == [[1.0], [2.0, 3.5]]


@pytest.mark.parametrize(
    ("plain", "kind", "said"),
    [
        ([1, True], list[int], r"field `x\[1\]`: expected a whole number, got True"),
        ([1.5, False], list[float], r"field `x\[1\]`: expected a number, got False"),
        ([1, 2.0], list[int], r"field `x\[1\]`: expected a whole number, got 2\.0"),
        (["a", None], list[str], r"field `x\[1\]`: expected a string, got null"),
        ([1.0, "nan"], list[float], r"field `x\[1\]`: expected a number, got 'nan'"),
        ("abc", list[str], "field `x`: expected a list, got 'abc'"),
    ],
)
def test_the_item_that_is_of_another_kind_is_named(plain: Any, kind: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(plain, kind)
