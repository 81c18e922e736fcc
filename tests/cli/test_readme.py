"""The README names every command and every module, and nothing that is not there."""

import json
import re
from pathlib import Path

from typer.main import get_command

from quantkit.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_is_in_the_table_and_no_other() -> None:
    commands = set(get_command(app).commands)
    named = set(re.findall(r"^\| `quantkit (\w+)", README, flags=re.MULTILINE))
    assert named == commands


def test_every_module_is_named() -> None:
    modules = [path for path in (ROOT / "quantkit").rglob("*.py") if path.stem[0] != "_"]
    in_cli = [path for path in modules if path.parent.name == "cli"]
    stems = {path.stem for path in modules if path not in in_cli}
    missing = sorted(stem for stem in stems if not re.search(rf"\b{stem}\b", README))
    assert not missing


def test_the_makefile_runs_what_the_example_says() -> None:
    recipe = re.sub(r"\s*\\\n\s*", " ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    shown = re.search(r"`(quantkit compare --out[^`]*)`", README)
    assert shown is not None
    assert re.sub(r"\s+", " ", shown[1]) in recipe


def test_the_table_of_exports_is_the_benchmarks() -> None:
    """The README quotes `benchmarks/results/export_peers.json`, row by row."""
    text = (ROOT / "benchmarks/results/export_peers.json").read_text(encoding="utf-8")
    graphs = json.loads(text)["graphs"]
    lines = README.split("| | perplexity | beside float")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == len(graphs)
    for row, graph in zip(rows, graphs, strict=True):
        name = graph["graph"]
        assert name in row[0] or (name.startswith("quantkit") and "auto" in row[0])
        if graph["perplexity"] < 1e6:
            assert row[1] == f"{graph['perplexity']:.2f}"
            assert row[2].split(" ")[0] in (f"{graph['ratio']:.3f}", "1")
        for place, key in ((3, "prefill_ms"), (4, "decode_ms")):
            assert row[place] == f"{graphs[0][key] / graph[key]:.2f}x"
