"""Integer types and granularities: limits, names, and that they load no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.numerics.granularity import (
    PerAxis,
    PerGroup,
    PerHead,
    PerRow,
    PerSequence,
    logit_granularity,
    weight_granularity,
)
from quantkit.numerics.qtypes import QType


@pytest.mark.parametrize(
    ("name", "qmin", "qmax"),
    [
        ("int2", -2, 1),
        ("int2n", -1, 1),
        ("int4", -8, 7),
        ("uint4", 0, 15),
        ("int6n", -31, 31),
        ("int8", -128, 127),
        ("int8n", -127, 127),
        ("uint8", 0, 255),
        ("int16", -32768, 32767),
        ("uint16", 0, 65535),
    ],
)
def test_limits_are_those_of_twos_complement(name: str, qmin: int, qmax: int) -> None:
    qtype = QType.parse(name)
    assert (qtype.qmin, qtype.qmax) == (qmin, qmax)
    assert qtype.levels == qmax - qmin + 1


@given(st.integers(2, 16), st.booleans(), st.booleans())
def test_parse_is_the_inverse_of_str(bits: int, signed: bool, narrow: bool) -> None:
    qtype = QType(bits=bits, signed=signed, narrow=narrow and signed)
    assert QType.parse(str(qtype)) == qtype


@pytest.mark.parametrize("text", ["", "int", "int1", "int17", "int08", "uint4n", "INT8", "8"])
def test_another_name_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError):
        QType.parse(text)


def test_logit_granularity_names_never_span_the_batch() -> None:
    assert logit_granularity("tensor") == PerSequence()
    assert logit_granularity("head") == PerHead()
    assert logit_granularity("row") == PerRow()
    with pytest.raises(InputError, match="Did you mean 'head'"):
        logit_granularity("heads")


def test_an_empty_group_is_an_input_error() -> None:
    with pytest.raises(InputError, match="group_size=0"):
        PerGroup(axis=0, group_size=0)


def test_types_and_granularities_load_no_torch() -> None:
    code = (
        "import sys; import quantkit.numerics.qtypes, quantkit.numerics.granularity; "
        "from quantkit.numerics import QType, PerHead; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_had() -> None:
    from quantkit import numerics

    for name in numerics.__all__:
        assert getattr(numerics, name) is not None
    with pytest.raises(AttributeError):
        numerics.nothing  # noqa: B018


def test_words_for_weights() -> None:
    assert weight_granularity("channel") == PerAxis(axis=0)
    assert weight_granularity("group:32") == PerGroup(axis=1, group_size=32)
    assert weight_granularity("group:1") == PerGroup(axis=1, group_size=1)
    for words in (
        "",
        "group",
        "group:",
        "group:x",
        "group:٣",
        "group:" + "9" * 5000,
        "group:1:2",
        "channel:4",
        "row:4",
    ):
        with pytest.raises(InputError, match="channel, or group:N"):
            weight_granularity(words)
    with pytest.raises(InputError, match="group_size=0"):
        weight_granularity("group:0")
