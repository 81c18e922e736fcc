"""Every script of examples/ runs offline, and what it prints is right by other means."""

from __future__ import annotations

import json
import math
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import quantkit
from quantkit.calib_sets import text_slice
from quantkit.models import load
from quantkit.results import Export

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("[!m]*.py"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(
    name: str, *words: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Returns what the script prints, run as a program."""
    monkeypatch.setattr("sys.argv", [name, *map(str, words)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    return capsys.readouterr().out


def blocks(tokenizer: PreTrainedTokenizerBase, source: str, samples: int, seq_len: int) -> Tensor:
    found = text_slice(source, tokenizer, seq_len=seq_len, samples=samples)
    return torch.stack([row.long() for row in found.ids])


def perplexity(model: Any, ids: Tensor) -> float:
    with torch.inference_mode():
        return math.exp(model(ids, labels=ids).loss.item())


def test_every_script_is_short_and_says_what_it_is() -> None:
    assert SCRIPTS == ["own_attention.py", "own_calibration_set.py", "own_model.py",
                       "table5_hub_model.py"]  # fmt: skip
    for name in SCRIPTS:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 64
        said = text.split('"""')[1]
        assert "rints" in said and f"python examples/{name}" in said


def test_own_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    out = run("own_model.py", folder, capsys=capsys, monkeypatch=monkeypatch)

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = blocks(load(str(folder)).tokenizer, "docstrings", 4, 64)
    with torch.inference_mode():
        state = model.model(ids, output_hidden_states=True).hidden_states[1].abs()
    largest, channel = re.search(r"hidden state\|: (\S+) in channel (\d+)", out).groups()  # type: ignore[union-attr]
    assert float(largest) == pytest.approx(state.max().item(), abs=0.006)
    assert int(channel) == state.amax((0, 1)).argmax() == 5
    printed = {int(bits): float(value) for bits, value in re.findall(r"(\d+) bits: .* (\S+)", out)}
    assert list(printed) == [16, 8, 4]
    assert printed[16] == pytest.approx(perplexity(model, ids), rel=1e-4)
    assert abs(printed[4] - printed[16]) > abs(printed[8] - printed[16])
    export = quantkit.load(folder / "onnx")
    assert isinstance(export, Export) and export.passed and export.accuracy is not None
    both = export.accuracy
    said = (
        f"in ONNX Runtime: float {both.float:.2f}, int8 {both.quantized:.2f}, in {folder / 'onnx'}"
    )
    assert said in out
    assert export.accuracy.quantized == pytest.approx(export.accuracy.float, rel=0.05)


def test_own_attention(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("own_attention.py", capsys=capsys, monkeypatch=monkeypatch)

    kind = runpy.run_path(str(FOLDER / "own_attention.py"))["DifferentialAttention"]
    torch.manual_seed(0)
    layers = [kind(64), kind(64)]
    x = torch.cat([torch.randn(2, 24, 64) for _ in range(4)])
    valid = torch.ones(24, 24, dtype=torch.bool).tril()
    with torch.inference_mode():
        for index, layer in enumerate(layers):
            q, k = ((x @ linear.weight.T).view(8, 24, 4, 16) for linear in (layer.q, layer.k))
            logits = torch.einsum("bihd,bjhd->bhij", q, k) / 4
            for number, heads in ((1, logits[:, :2]), (2, logits[:, 2:])):
                wanted = heads[..., valid].max().item()
                said = re.search(rf"layer {index}, map {number}: max logit (\S+)", out)
                assert said is not None and float(said[1]) == pytest.approx(wanted, abs=1e-4)
            x = layer(x)
    assert "rows of the effective map sum to 0.50 0.50" in out  # 1 - lambda


def test_own_calibration_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run("own_calibration_set.py", tmp_path, capsys=capsys, monkeypatch=monkeypatch)

    manifest = tomllib.loads((tmp_path / "calib/mine/manifest.toml").read_text(encoding="utf-8"))
    assert f"set mine, 16 texts, sha256 {manifest['sha256'][:12]}" in out
    assert manifest["licence"] == "CC0-1.0"
    loaded = load("baseline")
    wanted = perplexity(loaded.model, blocks(loaded.tokenizer, "docstrings", 8, 64))
    printed = dict(re.findall(r"(\w+): perplexity (\S+)", out))
    assert float(printed["none"]) == pytest.approx(wanted, rel=1e-4)
    assert wanted < float(printed["w8a8"]) < 1.1 * wanted


def test_table5(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    out = run("table5_hub_model.py", tiny_folder, text, 3, capsys=capsys, monkeypatch=monkeypatch)

    loaded = load(str(tiny_folder))
    outputs: list[Tensor] = []
    for layer in loaded.model.model.layers:
        layer.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    with torch.inference_mode():
        loaded.model(blocks(loaded.tokenizer, str(text), 3, 128))
    pooled = torch.cat([state.flatten() for state in outputs]).abs().sort(descending=True).values
    wanted = [pooled[rank - 1].item() for rank in (1, 2, 3, 10, 100)] + [pooled.median().item()]
    rows = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    assert rows["tiny"] == ["top-1", "top-2", "top-3", "top-10", "top-100", "median"]
    assert list(map(float, rows["hidden states"])) == pytest.approx(wanted, abs=0.006)
    valid, whole = (list(map(float, rows[f"attention logits{more}"])) for more in ("", ", all"))
    assert all(one <= other for one, other in zip(valid[:5], whole[:5], strict=True))


def test_the_notebook_is_what_its_cells_give() -> None:
    made = runpy.run_path(str(FOLDER / "make_quickstart.py"))
    notebook = json.loads((FOLDER / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = notebook["cells"]
    assert [cell["source"] for cell in cells] == list(made["CELLS"])
    assert [len(cell.get("outputs", [])) for cell in cells] == [0, 0, 1, 1, 1, 1, 1]
    names: dict[str, object] = {}
    made["executed"](cells[1]["source"], names)
    (output,) = made["executed"](cells[3]["source"], names)
    figures = [
        [float(text) for text in re.findall(r"right\">([\d.]+)</td>", shown["data"]["text/html"])]
        for shown in (output, cells[3]["outputs"][0])
    ]
    assert len(figures[0]) == 14  # two rows of Table 5
    assert figures[0] == pytest.approx(figures[1], rel=2e-3)


def test_a_cell_says_what_it_prints_and_what_it_ends_with() -> None:
    executed = runpy.run_path(str(FOLDER / "make_quickstart.py"))["executed"]
    (printed, value) = executed("print(1)\nx = 2\nx + 1", {})
    assert printed == {"output_type": "stream", "name": "stdout", "text": "1\n"}
    assert value["data"] == {"text/plain": "3"}
    assert executed("x = 1", {}) == []
