"""`make bench` takes hours, and a name that moved would end it: each import in it is tried."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def imported(tree: ast.Module) -> list[tuple[str, str]]:
    """Returns (module, name) of what is taken out of quantkit and benchmarks, in functions too."""
    return [
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
        if node.module.split(".")[0] in ("quantkit", "benchmarks")
    ]


def missing(source: str) -> list[str]:
    found = []
    for module, name in imported(ast.parse(source)):
        if not hasattr(importlib.import_module(module), name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_a_benchmark_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert not missing(path.read_text(encoding="utf-8"))


def test_a_name_that_moved_is_found() -> None:
    source = "def run():\n    from quantkit.exporting.rewrite_linear import match_linears\n"
    assert missing(source) == ["quantkit.exporting.rewrite_linear.match_linears"]
