"""Docstrings of the standard library of the Python that runs: English that is always at hand.

What is held out goes by the names of modules, not by their text: a text that the next version of
Python words a little otherwise would fall on the other side, and what a model trained on one
version never saw would be training text on another.
"""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quantkit.calib_sets.held_out import HELD_OUT, is_held_out, normalised, without_repeats
from quantkit.errors import InputError

DOCSTRINGS: Final = "docstrings"
"""Name of the source of text, and of the calibration set of its held-out part."""

_LEFT_OUT: Final = frozenset({
    # tests, and what distributions package apart: another installation, another text
    "test", "tests", "idle_test", "idlelib", "lib2to3", "distutils", "ensurepip", "venv",
    "tkinter", "turtle", "turtledemo",
    # tables with one generated sentence each
    "encodings", "pydoc_data",
})  # fmt: skip


def module_docstrings(*, share: float, held_out: bool) -> dict[str, str]:
    """Returns module -> its docstrings in the order of the source, an empty line between two.

    Args:
        share: Of the modules, by the hash of their names, that are held out; at least `HELD_OUT`,
            so that no training on this source reads the calibration set `docstrings`.
        held_out: Whether these are returned, or the others.

    Raises:
        InputError: the standard library is not there as source code.
    """
    share = max(share, HELD_OUT)
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for name, path in sorted(_modules(root)):
        if is_held_out(f"{DOCSTRINGS}:{name}", share) == held_out:
            text = normalised("\n\n".join(_docstrings(path)))
            if text:
                texts[name] = text
    if not texts and not any(root.glob("*.py")):
        raise InputError(
            f"{DOCSTRINGS}: the standard library's source code is not in {root}: expected .py "
            "files; name another text."
        )
    return texts


def held_out_docstrings() -> list[str]:
    """Returns what training on this source never reads: a document a module, no paragraph twice.

    Raises:
        InputError: as `module_docstrings`.
    """
    texts = module_docstrings(share=HELD_OUT, held_out=True).values()
    return without_repeats(texts, set())[0]


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (name, file) of the modules of the standard library, unsorted."""
    for path in root.rglob("*.py"):
        below = path.relative_to(root).with_suffix("").parts
        if below[0] in sys.stdlib_module_names and not _LEFT_OUT.intersection(below):
            yield ".".join(below).removesuffix(".__init__"), path


@functools.cache  # it does not change under a run, whose every stage reads the set again
def _docstrings(path: Path) -> tuple[str, ...]:
    """Returns the docstrings of a file's module, classes and functions, none of it imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stray escapes in other people's strings
        tree = ast.parse(path.read_bytes(), path.name)
    return tuple(text for node in _documented(tree) if (text := ast.get_docstring(node)))


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(node: ast.AST) -> Iterator[_Documented]:
    """Yields what can have a docstring, in the order of the source (`ast.walk` goes by depth)."""
    if isinstance(node, _Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _documented(child)
