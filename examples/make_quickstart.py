"""Writes quickstart.ipynb beside itself: its cells, run, with what a notebook would show of them.

Prints nothing but what its cells print. Run it after a change of the API.

    python examples/make_quickstart.py [FILE.ipynb]
"""

import ast
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

CELLS = (
    "# quantkit in five cells\nTwo models that ship with it, the same but for their attention: "
    "where are their outliers, and what does each bit of their attention logits cost?",
    'import quantkit\n\ndata = {"seq_len": 128, "samples": 8}',
    'quantkit.stats("baseline", "docstrings", **data)',
    'quantkit.stats("diff", "docstrings", **data)',
    'quantkit.sweep(["baseline", "diff"], eval="docstrings", calib=None, **data,\n'
    '               bits=(16, 6, 4), granularity="head")',
    'found = quantkit.calibrate("diff", "docstrings", **data, method="mse")\nfound',
    'quantkit.sensitivity("diff", found, eval="docstrings", seq_len=128, samples=4)',
)
"""The first is text."""


def executed(source: str, names: dict[str, object]) -> list[dict[str, object]]:
    """Returns the outputs of a cell: what it printed, and its last expression."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    text = printed.getvalue()
    outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    if value is not None:
        shown = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = value._repr_html_()
        outputs.append({"output_type": "display_data", "data": shown, "metadata": {}})
    return outputs


def main(path: Path) -> None:
    names: dict[str, object] = {}
    cells: list[dict[str, object]] = [{"cell_type": "markdown", "source": CELLS[0]}]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for count, source in enumerate(CELLS[1:], 1):
            outputs = executed(source, names)
            cells.append({"cell_type": "code", "execution_count": count, "source": source,
                          "outputs": outputs})  # fmt: skip
    for count, cell in enumerate(cells):
        cell |= {"id": f"cell-{count}", "metadata": {}}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel},
                "cells": cells}  # fmt: skip
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "quickstart.ipynb"))
