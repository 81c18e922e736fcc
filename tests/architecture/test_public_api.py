"""The verbs are functions, whatever modules have been imported."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import quantkit

ROOT = Path(__file__).parents[2]
VERBS = (
    "calibrate",
    "compare",
    "diagnose",
    "export",
    "load",
    "record",
    "record_qk",
    "report",
    "sensitivity",
    "stats",
    "sweep",
    "train",
)


def test_public_names() -> None:
    assert sorted(quantkit.__all__) == ["QuantkitQuantizer", "__version__", *VERBS]
    assert dir(quantkit) == sorted(quantkit.__all__)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_a_function(verb: str) -> None:
    assert callable(getattr(quantkit, verb))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'quantkit' has no attribute 'calibrat'"):
        _ = quantkit.calibrat


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert quantkit.__version__ == project["version"]
