"""`calibrate --weights`: written beside the ranges, chosen again, and read by the later stages."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import text_slice
from quantkit.calibration import load_weight_ranges
from quantkit.errors import InputError
from quantkit.jobs import CalibrateJob, ExportJob, SensitivityJob, SweepJob
from quantkit.models import load, sha256_of
from quantkit.numerics.affine import RangeError
from quantkit.pipelines import run_calibrate, run_export, run_sensitivity, run_sweep
from quantkit.probes import linear_modules
from quantkit.recipe import Recipe, WeightQuant
from quantkit.results import Ranges, Sensitivity, Sweep, WeightsInfo, read_json
from quantkit.sweeps import Subject, run_cells
from quantkit.tasks import Perplexity

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    letters = np.random.default_rng(0).integers(97, 123, 20_000)  # so that no block comes twice
    path = tmp_path / "corpus.txt"
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return path


def calibrated(folder: Path, corpus: Path, out: Path, **changes: Any) -> Path:
    job = CalibrateJob(
        model=str(folder), calib=str(corpus), seq_len=24, samples=8, out=str(out), **changes
    )
    return run_calibrate(job)


def weights_of(run: Path) -> WeightsInfo:
    found = read_json(run / "ranges.json", Ranges).weights
    assert found is not None
    return found


def rewritten(folder: Path, module: str, factor: float) -> None:
    """Saves the model with one weight multiplied."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        dict(model.named_modules())[module].weight.mul_(factor)
    model.save_pretrained(folder)


def test_without_the_option_nothing_changes(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = calibrated(tiny_folder, corpus, tmp_path / "run")
    assert read_json(run / "ranges.json", Ranges).weights is None
    assert not (run / "weights.safetensors").exists()


def test_beside_the_ranges_or_chosen_again(tiny_folder: Path, corpus: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"weights": "group:20", "weight_method": "mse", "weight_bits": 4}
    once = calibrated(tiny_folder, corpus, tmp_path / "once", **asked)
    info = weights_of(once)
    path = once / "weights.safetensors"
    assert (info.method, info.bits, info.granularity, info.group_size) == ("mse", 4, "group", 20)
    assert info.sha256 == sha256_of(path)
    found = load_weight_ranges(path, info.sha256)
    names = [name for name, _ in linear_modules(load(str(tiny_folder)).model)]
    assert list(info.modules) == names and found.absmax.keys() == set(names)
    assert found.absmax[UP].shape == (48, 2)
    assert all(f.sqnr_db >= f.absmax_sqnr_db for f in info.modules.values())

    first = calibrated(tiny_folder, corpus, tmp_path / "first")
    again = run_calibrate(CalibrateJob(from_run=str(first), out=str(tmp_path / "again"), **asked))
    assert weights_of(again) == info
    assert (again / "weights.safetensors").read_bytes() == path.read_bytes()
    # another choice in the same folder leaves no ranges of weights behind
    run_calibrate(CalibrateJob(from_run=str(first), out=str(again), force=True))
    assert not (again / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("method", "bits", "warns"), [("mse", 4, True), ("mse", 8, False), ("minmax", 4, False)]
)
def test_clipping_on_a_coarse_grid_is_warned_of(
    method: str, bits: int, warns: bool, tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = calibrated(
        tiny_folder, corpus, tmp_path / "run",
        weights="channel", weight_method=method, weight_bits=bits,
    )  # fmt: skip
    said = read_json(run / "ranges.json", Ranges).warnings
    assert any("--weight-method minmax" in warning for warning in said) is warns


def test_chosen_again_from_another_model_is_refused(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    first = calibrated(tiny_folder, corpus, tmp_path / "first")
    rewritten(tiny_folder, UP, 2.0)
    job = CalibrateJob(
        from_run=str(first), weights="channel", weight_method="mse", out=str(tmp_path / "again")
    )
    with pytest.raises(InputError, match=r"first was observed on .*tiny as it was .*calibrate"):
        run_calibrate(job)
    shutil.rmtree(tiny_folder)
    with pytest.raises(InputError, match="tiny"):
        run_calibrate(job)


def test_with_smoothing_they_are_those_of_the_smoothed_weights(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"weights": "channel", "weight_method": "minmax"}
    run = calibrated(tiny_folder, corpus, tmp_path / "run", smooth="0.7", **asked)
    ranges = read_json(run / "ranges.json", Ranges)
    reads = next(g for g in ranges.smoothing.values() if UP in g.linears)
    makes = next(g for g in ranges.smoothing.values() if g.producer == UP)
    weight = dict(load(str(tiny_folder)).model.named_modules())[UP].weight.detach().numpy()
    rows, columns = (np.array(g.scales, np.float32) for g in (makes, reads))
    moved = np.abs(weight * columns / rows[:, None]).max(1, keepdims=True)
    assert ranges.weights is not None
    found = load_weight_ranges(run / "weights.safetensors", ranges.weights.sha256)
    np.testing.assert_allclose(found.absmax[UP].numpy(), moved, rtol=1e-6)
    assert np.abs(moved / np.abs(weight).max(1, keepdims=True) - 1).max() > 0.01
    again = run_calibrate(CalibrateJob(from_run=str(run), out=str(tmp_path / "again"), **asked))
    assert weights_of(again) == ranges.weights


def test_a_weight_that_is_not_finite_stops_the_run(
    tiny_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quantkit.pipelines.weights as module

    first = calibrated(tiny_folder, corpus, tmp_path / "first")
    loaded = load(str(tiny_folder))
    with torch.no_grad():
        dict(loaded.model.named_modules())[UP].weight[1, 2] = torch.inf
    monkeypatch.setattr(module, "load", lambda *_args, **_options: loaded)
    job = CalibrateJob(
        from_run=str(first), weights="channel", weight_method="mse", out=str(tmp_path / "again")
    )
    with pytest.raises(RangeError, match=rf"{UP}\.weight"):
        run_calibrate(job)
    assert not list((tmp_path / "again").glob("*.safetensors"))
    assert not (tmp_path / "again" / "ranges.json").exists()


def sweep(folder: Path, corpus: Path, run: Path, out: Path, *recipes: str) -> list[float]:
    job = SweepJob(
        models=(str(folder),), eval=str(corpus), ranges=(str(run),), bits=(16,), seq_len=24,
        samples=4, recipes=recipes, out=str(out),
    )  # fmt: skip
    cells = read_json(run_sweep(job) / "sweep.json", Sweep).cells
    return [cell.value for cell in cells if cell.metric == "perplexity"]


def test_a_sweep_takes_them(tiny_folder: Path, corpus: Path, tmp_path: Path) -> None:
    rewritten(tiny_folder, UP, 40.0)  # so that its grid is felt
    plain = calibrated(tiny_folder, corpus, tmp_path / "plain")
    values = {"": sweep(tiny_folder, corpus, plain, tmp_path / "sweep", "w3")}
    for words in ("channel", "group:8"):
        run = run_calibrate(
            CalibrateJob(
                from_run=str(plain), weights=words, weight_method="mse", weight_bits=3,
                out=str(tmp_path / words.replace(":", "-")),
            )
        )  # fmt: skip
        values[words] = sweep(tiny_folder, corpus, run, tmp_path / f"sweep-{run.name}", "w3")
    assert len({value[0] for value in values.values()}) == 1
    assert len({value[1] for value in values.values()}) == 3
    away = {words: abs(value[1] - value[0]) for words, value in values.items()}
    assert away["group:8"] < away[""]
    with pytest.raises(InputError, match="for 3 bits, and are asked for 8"):
        sweep(tiny_folder, corpus, tmp_path / "channel", tmp_path / "other", "w8")


def test_a_kept_cell_of_other_ranges_of_weights_is_measured_again(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    rewritten(tiny_folder, UP, 40.0)
    loaded = load(str(tiny_folder))
    text = text_slice(str(corpus), loaded.tokenizer, seq_len=24, samples=4, skip=8)
    plain = calibrated(tiny_folder, corpus, tmp_path / "plain")

    def value(words: str, store: str) -> float:
        out = tmp_path / f"{words}-{store}".replace(":", "-")
        asked = CalibrateJob(
            from_run=str(plain), weights=words, weight_method="mse", weight_bits=3, out=str(out)
        )
        run = run_calibrate(asked)
        subject = Subject(
            loaded=loaded,
            group=loaded.name,
            tasks=[Perplexity.of(text, loaded.tokenizer, batch_size=2)],
            ranges=read_json(run / "ranges.json", Ranges),
            weight_ranges=load_weight_ranges(run / "weights.safetensors", weights_of(run).sha256),
        )
        recipes = [Recipe(), Recipe(weights=WeightQuant(bits=3))]
        return run_cells(subject, recipes, store=tmp_path / store)[1].scores.metrics[0].value

    assert value("channel", "kept") != value("group:8", "kept")
    assert value("group:8", "fresh") == value("group:8", "kept")


def test_a_file_that_changed_or_went_is_named(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = calibrated(tiny_folder, corpus, tmp_path / "run", weights="channel", weight_method="mse")
    path = run / "weights.safetensors"
    kept = path.read_bytes()
    jobs: list[tuple[Any, Any]] = [
        (run_sweep, SweepJob(models=(str(tiny_folder),), recipes=("w8",), ranges=(str(run),))),
        (run_export, ExportJob(model=str(tiny_folder), recipe="w8a8", ranges=str(run))),
        (run_sensitivity, SensitivityJob(model=str(tiny_folder), ranges=str(run))),
    ]
    for number, (verb, job) in enumerate(jobs):
        asked = dataclasses.replace(
            job, eval=str(corpus), seq_len=24, out=str(tmp_path / f"out-{number}")
        )
        path.write_bytes(kept[:-4] + b"\0\0\0\1")
        with pytest.raises(InputError, match=r"run/weights\.safetensors is not the file"):
            verb(asked)
        path.unlink()
        with pytest.raises(InputError, match=r"no such file: .*run/weights\.safetensors"):
            verb(asked)
        path.write_bytes(kept)


def test_sensitivity_measures_under_them(tiny_folder: Path, corpus: Path, tmp_path: Path) -> None:
    rewritten(tiny_folder, UP, 40.0)
    totals = []
    chosen: dict[str, Any] = {"weights": "channel", "weight_method": "mse", "weight_bits": 3}
    for name, changes in (("plain", {}), ("weights", chosen)):
        run = calibrated(tiny_folder, corpus, tmp_path / name, **changes)
        job = SensitivityJob(
            model=str(tiny_folder), ranges=str(run / "ranges.json"), recipe="w3a8",
            eval=str(corpus), seq_len=24, samples=2, out=str(tmp_path / f"out-{name}"),
        )  # fmt: skip
        totals.append(read_json(run_sensitivity(job) / "sensitivity.json", Sensitivity).total_kl)
    assert totals[0] != totals[1]


def test_an_export_takes_channels_and_refuses_groups(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    import onnx

    run = calibrated(
        tiny_folder, corpus, tmp_path / "run", weights="channel", weight_method="mse", weight_bits=4
    )
    asked = ExportJob(
        model=str(tiny_folder), recipe="w4a8", ranges=str(run), eval=str(corpus), seq_len=24,
        eval_samples=4, out=str(tmp_path / "export"),
    )  # fmt: skip
    out = run_export(asked)
    graph = onnx.load(out / "model.onnx").graph
    arrays = {t.name: t for t in graph.initializer}
    absmax = load_weight_ranges(run / "weights.safetensors", weights_of(run).sha256).absmax[UP]
    scale = onnx.numpy_helper.to_array(arrays[f"{UP}.weight_scale"])
    assert np.array_equal(scale, absmax.numpy()[:, 0] / np.float32(7))
    by_group = run_calibrate(
        CalibrateJob(
            from_run=str(run), weights="group:8", weight_method="mse", out=str(tmp_path / "groups")
        )
    )
    refused = dataclasses.replace(
        asked, recipe="w8a8", ranges=str(by_group), out=str(tmp_path / "refused")
    )
    with pytest.raises(InputError, match=r"one scale a channel: calibrate --weights channel"):
        run_export(refused)
    assert not list((tmp_path / "refused").glob("**/*.onnx"))
