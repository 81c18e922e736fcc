"""`quantkit sensitivity` from a run of ranges to its table, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from quantkit.calib_sets import text_slice
from quantkit.calibration import (
    WeightPlan,
    choose_weight_ranges,
    save_weight_ranges,
    weights_info,
)
from quantkit.cli.calibrate import calibrate
from quantkit.cli.group import OneLineErrors
from quantkit.cli.sensitivity import sensitivity
from quantkit.jobs import config_hash
from quantkit.jobs.sensitivity import SensitivityJob
from quantkit.models import load
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import parse_method
from quantkit.probes import Activation, attach
from quantkit.reporting import sensitivity_text
from quantkit.results import Range, Ranges, Sensitivity, read_json, write_json

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (calibrate, sensitivity):
    app.command()(command)

SEQ_LEN, CALIB = 16, 3
SMALL = ("--samples", 2, "--seq-len", SEQ_LEN)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The {n}th fox jumps over {n * n} lazy dogs. " for n in range(60)))
    return path


@pytest.fixture
def run(tiny_folder: Path, corpus: Path, tmp_path: Path) -> Path:
    """A folder with ranges.json of the first blocks of the corpus."""
    loaded = load(str(tiny_folder))
    text = text_slice(str(corpus), loaded.tokenizer, seq_len=SEQ_LEN, samples=CALIB)
    ends: dict[str, list[float]] = {}

    def look(visit: Activation) -> None:
        lo, hi = visit.tensor.aminmax()
        old = ends.get(visit.name, [0.0, 0.0])
        ends[visit.name] = [min(old[0], float(lo)), max(old[1], float(hi))]

    with torch.inference_mode(), attach(loaded.model, {"linear_input": look}):
        for block in text.ids:
            loaded.model(input_ids=block[None])
    tensors = {
        f"linear_input/{name}": Range(
            lo=lo, hi=hi, method="minmax", granularity="tensor", count=1, point="linear_input"
        )
        for name, (lo, hi) in ends.items()
    }
    ranges = Ranges(
        model=loaded.info(), data=text.info(1), method="minmax", environment={}, tensors=tensors
    )
    write_json(tmp_path / "run" / "ranges.json", ranges)
    return tmp_path / "run"


def invoke(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="quantkit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: Any) -> str:
    code, out, err = invoke("sensitivity", *arguments)
    assert (code, out) == (2, ""), err
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return err


def test_a_run(tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path) -> None:
    arguments = ("sensitivity", tiny_folder, "--ranges", run, "--eval", corpus, *SMALL)
    arguments += (*SMALL, "--top", 3, "--out", tmp_path / "out")
    code, out, err = invoke(*arguments)
    assert code == 0, err
    found = read_json(tmp_path / "out" / "sensitivity.json", Sensitivity)
    assert found.ranges == str(run)
    assert (found.recipe, found.data.sequences, found.data.skipped_blocks) == ("w8a8", 2, CALIB)
    assert found.data.shared_blocks == 0 and found.warnings == []
    assert not set(found.data.block_hashes) & set(found.calibration.block_hashes)
    assert [row.rank for row in found.rows] == list(range(1, 15))
    for row in found.rows[:3]:
        assert f"\n{row.rank} " in out and row.name in out
    assert found.rows[3].name not in out
    assert "11 more in sensitivity.json" in out
    assert "kept in float" in out or "no number of them" in out
    date = (tmp_path / "out" / "sensitivity.json").stat().st_mtime_ns
    code, again, _ = invoke(*arguments)
    assert (code, again) == (0, out)
    assert (tmp_path / "out" / "sensitivity.json").stat().st_mtime_ns == date
    code, out, err = invoke(*arguments, "--json", "--quiet")
    assert (code, err) == (0, "")
    assert out == (tmp_path / "out" / "sensitivity.json").read_text()


@pytest.mark.kind(4, "sensitivity", "cli")
def test_interrupted_it_goes_on(
    tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.search import divergence

    arguments = ("sensitivity", tiny_folder, "--ranges", run, "--eval", corpus, *SMALL)
    invoke(*arguments, "--out", tmp_path / "whole")
    real = divergence.Reference.divergence
    calls: list[int] = []

    def stopping(self: Any, logits: Any) -> Any:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(self, logits)

    monkeypatch.setattr(divergence.Reference, "divergence", stopping)
    code, out, err = invoke(*arguments, "--out", tmp_path / "out")
    assert (code, out) == (130, "")
    assert "the same command goes on" in err
    assert not (tmp_path / "out" / "sensitivity.json").exists()
    assert invoke(*arguments, "--out", tmp_path / "out")[0] == 0
    wanted = (tmp_path / "whole" / "sensitivity.json").read_bytes()
    assert (tmp_path / "out" / "sensitivity.json").read_bytes() == wanted
    whole = len((tmp_path / "whole" / "cells" / "sensitivity.jsonl").read_bytes().splitlines()) - 1
    assert len(calls) == whole + 1  # no cell twice but the one that was interrupted


@pytest.mark.parametrize("seq_len", [16, 40])
def test_overlap_is_refused_and_recorded_where_allowed(
    tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path, seq_len: int
) -> None:
    copy = tmp_path / "copy.txt"  # the same text by another name
    copy.write_text(corpus.read_text())
    arguments = (tiny_folder, "--ranges", run, "--samples", 4, "--modes", "enable-one")
    arguments += ("--seq-len", seq_len)
    said = refused(*arguments, "--eval", copy, "--out", tmp_path / "out")
    assert f"share {CALIB} blocks" in said and "--allow-overlap" in said
    assert not (tmp_path / "out").exists()  # a job that did nothing holds no folder
    code, out, _ = invoke("sensitivity", *arguments, "--eval", copy, "--allow-overlap")
    assert code == 0
    assert "WARNING: this text and calibration's share 3 blocks" in out
    found = read_json(next(tmp_path.glob("reports/*/sensitivity.json")), Sensitivity)
    assert found.data.shared_blocks == 3


def test_other_blocks_of_one_text_come_after_calibrations(
    tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path
) -> None:
    arguments = ("sensitivity", tiny_folder, "--ranges", run, "--eval", corpus, "--seq-len", 20)
    arguments += ("--samples", 2, "--modes", "enable-one", "--out", tmp_path / "out")
    assert invoke(*arguments)[0] == 0
    found = read_json(tmp_path / "out" / "sensitivity.json", Sensitivity)
    assert found.data.skipped_blocks == 3  # 3 x 16 tokens are calibration's; 3 x 20 >= 48 > 2 x 20


def test_text_that_changed_since_calibration_proves_nothing(
    tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Nothing here is in the other text, not one sentence of it. " * 9)
    corpus.write_text("Another one. " + corpus.read_text())
    arguments = (tiny_folder, "--ranges", run, "--eval", other, *SMALL, "--modes", "enable-one")
    assert "cannot be proven to be held out" in refused(*arguments, "--out", tmp_path / "out")
    code, out, _ = invoke("sensitivity", *arguments, "--allow-overlap")
    assert code == 0
    assert "WARNING: calibration's data have changed since" in out


def test_bad_input(tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path) -> None:
    given = (tiny_folder, "--ranges", run, "--eval", corpus, *SMALL)
    assert "Did you mean 'w8a8'" in refused(*given, "--quantize", "w8b8")
    assert "leaves nothing to switch" in refused(*given, "--quantize", "none")
    assert "--weights" in refused(*given, "--quantize", "w8")
    assert "Did you mean 'enable-one'" in refused(*given, "--modes", "enabel-one")
    assert "Did you mean 'layer'" in refused(*given, "--group", "layers")
    assert "between 0 and 1" in refused(*given, "--remaining", "10")
    assert "--top" in refused(*given, "--top", "0")
    assert "--ranges" in refused(tiny_folder)
    (tmp_path / "empty").mkdir()
    said = refused(tiny_folder, "--ranges", tmp_path / "empty")
    assert "no ranges.json" in said and "quantkit calibrate" in said
    assert not (tmp_path / "reports").exists()  # nothing is made for what cannot run
    assert "too short" in refused(*given, "--seq-len", "5000")


def test_ranges_of_another_model_are_refused(tiny_folder: Path, corpus: Path, run: Path) -> None:
    ranges = read_json(run / "ranges.json", Ranges)
    other = dataclasses.replace(ranges.model, name="twin", sha256="f" * 64)
    write_json(run / "ranges.json", dataclasses.replace(ranges, model=other))
    said = refused(tiny_folder, "--ranges", run, "--eval", corpus, *SMALL)
    assert "ranges of another model (twin, sha256 ffffffffff" in said


def test_ranges_of_another_width_or_file_are_refused(
    tiny_folder: Path, corpus: Path, run: Path
) -> None:
    path = run / "ranges.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "schema": "quantkit.ranges/9"}))
    given = (tiny_folder, "--ranges", run, "--eval", corpus, *SMALL)
    assert "version '9'" in refused(*given)
    tensor = plain["tensors"].pop("linear_input/model.layers.0.mlp.down_proj")
    path.write_text(json.dumps(plain))
    assert "layers.0.mlp.down_proj" in refused(*given)
    name = "linear_input/model.layers.1.mlp.up_proj"
    plain["tensors"] |= {
        "linear_input/model.layers.0.mlp.down_proj": tensor,
        name: {**plain["tensors"][name], "method": "mse", "bits": 8},
    }
    path.write_text(json.dumps(plain))
    said = refused(*given, "--quantize", "w8a4", "--out", "other")
    assert f"{name}' was chosen by mse for 8 bits, and is asked for 4" in said
    assert invoke("sensitivity", *given, "--out", "own", "--modes", "enable-one")[0] == 0


def test_ranges_of_weights_of_another_width_are_refused(
    tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path
) -> None:
    loaded = load(str(tiny_folder))
    plan = WeightPlan(method=parse_method("mse"), bits=4, granularity=weight_granularity("channel"))
    found, figures = choose_weight_ranges(loaded.model, plan)
    sha256 = save_weight_ranges(run / "weights.safetensors", found)
    ranges = read_json(run / "ranges.json", Ranges)
    info = weights_info(found, figures, sha256)
    write_json(run / "ranges.json", dataclasses.replace(ranges, weights=info))
    given = (tiny_folder, "--ranges", run, "--eval", corpus, *SMALL, "--modes", "enable-one")
    said = refused(*given, "--quantize", "w8a8", "--out", tmp_path / "out")
    assert "ranges of weights were chosen by mse for 4 bits, and are asked for 8" in said
    assert not list((tmp_path / "out").rglob("*.jsonl"))  # before anything is measured
    assert invoke("sensitivity", *given, "--quantize", "w4a8", "--out", tmp_path / "own")[0] == 0


def test_the_table_says_what_was_not_reached(
    tiny_folder: Path, corpus: Path, run: Path, tmp_path: Path
) -> None:
    arguments = ("sensitivity", tiny_folder, "--ranges", run, "--eval", corpus, *SMALL)
    code, out, _ = invoke(*arguments, "--remaining", "0.000001", "--out", tmp_path / "out")
    assert code == 0
    found = read_json(tmp_path / "out" / "sensitivity.json", Sensitivity)
    assert not found.reached and found.keep == []
    assert "no number of them leaves less than" in out and "all 14 leave" in out
    nothing = dataclasses.replace(found, kept=[], reached=True)
    write_json(tmp_path / "out" / "sensitivity.json", nothing)
    assert "there is no error to remove" in sensitivity_text(tmp_path / "out", 3)


def test_the_config_hash_covers_what_changes_numbers() -> None:
    one = SensitivityJob(model="m", ranges="r")
    changes: list[dict[str, Any]] = [
        {"ranges": "s"}, {"recipe": "w4a8"}, {"eval": "t"}, {"seq_len": 8}, {"samples": 9},
        {"batch_size": 1}, {"modes": ("enable-one",)}, {"group": "layer"}, {"weights": True},
        {"target_frac": 0.2}, {"allow_overlap": True},
    ]  # fmt: skip
    hashes = {config_hash(one), *(config_hash(dataclasses.replace(one, **c)) for c in changes)}
    assert len(hashes) == len(changes) + 1
    assert config_hash(dataclasses.replace(one, out="x", force=True)) == config_hash(one)
