"""Imports point down only: every import is read, also inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "quantkit"

# Top first. Units of one line are siblings: they do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__", "__main__"),
    ("cli", "api"),
    ("reporting",),
    ("pipelines",),
    ("search",),
    ("sweeps", "training"),
    ("tasks",),
    ("exporting",),
    ("quantization",),
    ("calibration", "monitoring", "outliers"),
    ("probes", "onnx_runtime"),
    ("calib_sets",),
    ("models",),
    ("results",),
    ("jobs",),
    ("recipe",),
    ("numerics",),
    ("processes", "progress"),
    ("errors",),
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
ONLY = {"reporting": {"results", "jobs", "recipe", "errors", "progress"}}
"""Units that may import less than everything below them."""
FREE = {"__version__"}
"""Names of the package itself that anyone may import: a string depends on nothing."""


def imported_modules(path: Path, module: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) of every import of a file.

    `module` is the file's own name in parts; a package's ends in `__init__`.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # one dot is the package that holds the file; each further dot one package up
            parts = list(module[: -node.level]) if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def violations(package: Path) -> list[str]:
    """Returns one sentence for every import that does not point down."""
    found = []
    units = {path.stem if path.is_file() else path.name for path in package.iterdir()}
    for path in sorted(package.rglob("*.py")):
        module = (package.name, *path.relative_to(package).with_suffix("").parts)
        unit = module[1]
        place = path.relative_to(package.parent).as_posix()
        if unit not in LEVEL:
            found.append(f"{place}: {unit!r} has no place in the layers")
            continue
        for line, name in imported_modules(path, module):
            parts = name.split(".")
            if parts[0] != package.name:
                continue
            target = parts[1] if len(parts) > 1 and parts[1] in units else "__init__"
            if target == unit or (target == "__init__" and parts[-1] in FREE):
                continue
            if target not in LEVEL:
                found.append(f"{place}:{line}: {target!r} has no place in the layers")
            elif LEVEL[target] <= LEVEL[unit]:
                found.append(f"{place}:{line}: {unit} imports {target}, which is not below it")
            elif target not in ONLY.get(unit, {target}):
                found.append(f"{place}:{line}: {unit} imports {target}, which it may not")
    return found


def test_imports_point_down() -> None:
    assert violations(PACKAGE) == []


PLANTED = {
    "upward": ("numerics/affine.py", "from quantkit.models import load", "imports models"),
    "inside a function": (
        "recipe.py",
        "def f():\n    import quantkit.probes.attach",
        "imports probes",
    ),
    "type checking": (
        "errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from quantkit import recipe",
        "imports recipe",
    ),
    "relative": ("models/deep/a.py", "from ... import tasks", "imports tasks"),
    "relative, by module": ("models/a.py", "from ..tasks.perplexity import x", "imports tasks"),
    "sibling": ("calibration.py", "from quantkit.outliers import collect", "imports outliers"),
    "by string": (
        "results/io.py",
        "import importlib\nimportlib.import_module('quantkit.cli')",
        "imports cli",
    ),
    "the package": ("results/io.py", "import quantkit", "imports __init__"),
    "down, but not allowed": ("reporting/a.py", "import quantkit.numerics", "it may not"),
    "no place": ("utils.py", "x = 1", "no place"),
}


@pytest.mark.parametrize("case", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(tmp_path: Path, case: tuple[str, str, str]) -> None:
    file, text, said = case
    package = tmp_path / "quantkit"
    for unit in LEVEL:
        (package / unit).mkdir(parents=True)
    path = package / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

    found = violations(package)

    assert len(found) == 1
    assert found[0].startswith(f"quantkit/{file}")
    assert said in found[0]


def test_what_points_down_is_not_a_violation(tmp_path: Path) -> None:
    package = tmp_path / "quantkit"
    for unit in LEVEL:
        (package / unit).mkdir(parents=True)
    (package / "models" / "a.py").write_text(
        "import torch\nfrom quantkit import __version__, errors\nfrom . import b\n"
        "from ..results import ModelInfo\nimport quantkit.models.b\n",
        encoding="utf-8",
    )

    assert violations(package) == []
