"""`calibrate` as a stage: folders that go on, ranges chosen again, smoothing, early stops."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import InputError
from quantkit.jobs import CalibrateJob, ExportJob, SweepJob
from quantkit.models import load
from quantkit.numerics.affine import RangeError
from quantkit.pipelines import run_calibrate, run_sweep
from quantkit.quantization import smoothed
from quantkit.results import Calibration, Cell, Ranges, Sweep, read_json


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    letters = np.random.default_rng(0).integers(97, 123, 20_000)  # so that no block comes twice
    path = tmp_path / "corpus.txt"
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return path


def job(folder: Path, corpus: Path, out: Path, **changes: Any) -> CalibrateJob:
    return dataclasses.replace(
        CalibrateJob(model=str(folder), calib=str(corpus), seq_len=24, samples=20, out=str(out)),
        **changes,
    )


def ranges_of(folder: Path) -> Ranges:
    return read_json(folder / "ranges.json", Ranges)


def test_files_of_a_run(tiny_folder: Path, corpus: Path, tmp_path: Path) -> None:
    folder = run_calibrate(job(tiny_folder, corpus, tmp_path / "out"))
    assert sorted(p.name for p in folder.iterdir()) == [
        "calibration.json", "config.toml", "observations.safetensors", "ranges.json", "run.json",
    ]  # fmt: skip
    ranges, calibration = ranges_of(folder), read_json(folder / "calibration.json", Calibration)
    assert ranges.tensors.keys() == {t.name for t in calibration.tensors}
    assert len(ranges.tensors) == 2 * 7 + 2
    assert [p.samples for p in ranges.stability] == [12, 16, 20]
    assert any("65,536" in warning for warning in ranges.warnings)
    for tensor in calibration.tensors:
        low, high = ranges.tensors[tensor.name].lo, ranges.tensors[tensor.name].hi
        lows, highs = (x if isinstance(x, list) else [x] for x in (low, high))
        assert (tensor.min, tensor.max) == (min(lows), max(highs))
        assert [n for n, _ in tensor.stability] == [12, 16, 20]


@pytest.mark.parametrize(
    "method", ["mse", "two-sided-percentile:99.9,attention_logit=entropy", "moving-average"]
)
def test_chosen_again_equals_chosen_at_once(
    method: str, tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"method": method, "bits": (8, 4), "exclude_first": True}
    once = run_calibrate(job(tiny_folder, corpus, tmp_path / "once", **changes))
    first = run_calibrate(job(tiny_folder, corpus, tmp_path / "first"))
    (tiny_folder / "config.json").unlink()  # the model is not asked for
    again = run_calibrate(CalibrateJob(from_run=str(first), out=str(tmp_path / "again"), **changes))
    assert ranges_of(again).tensors == ranges_of(once).tensors
    one, two = (read_json(f / "calibration.json", Calibration) for f in (once, again))
    assert [dataclasses.replace(t, stability=[]) for t in one.tensors] == two.tensors
    assert ranges_of(again).stability == [] and ranges_of(once).stability
    assert any("chosen again" in warning for warning in ranges_of(again).warnings)
    if method == "mse":
        assert set(next(iter(ranges_of(again).tensors.values())).other_bits) == {"4"}


def test_the_same_choice_again_keeps_its_stability(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    first = run_calibrate(job(tiny_folder, corpus, tmp_path / "first"))
    again = run_calibrate(CalibrateJob(from_run=str(first), out=str(tmp_path / "again")))
    assert ranges_of(again).stability == ranges_of(first).stability != []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"from_run": "nowhere"}, "no such file: nowhere"),
        ({"method": "moving-average:0.5"}, "constant 0.01, asked for 0.5"),
    ],
)
def test_what_cannot_be_chosen_again(
    changes: dict[str, Any], said: str, tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    first = run_calibrate(job(tiny_folder, corpus, tmp_path / "first"))
    asked = {"from_run": str(first), "out": str(tmp_path / "again")} | changes
    with pytest.raises(InputError, match=said):
        run_calibrate(CalibrateJob(**asked))


def test_a_guard_stops_the_run_and_leaves_what_was_observed(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.zero_()
    model.save_pretrained(tiny_folder)
    out = tmp_path / "out"
    asked = job(tiny_folder, corpus, out)
    with pytest.raises(RangeError, match=r"layers\.1\.mlp\.down_proj holds .*--from .*out"):
        run_calibrate(asked)
    assert not (out / "ranges.json").exists()
    with pytest.raises(RangeError):  # the same again, without another pass
        run_calibrate(asked)
    folder = run_calibrate(
        CalibrateJob(from_run=str(out), allow=("zero",), out=str(tmp_path / "allowed"))
    )
    found = ranges_of(folder)
    name = "linear_input/model.layers.1.mlp.down_proj"
    assert found.tensors[name].waived == ["zero"]
    assert found.allowed == ["zero"]
    assert (found.tensors[name].lo, found.tensors[name].hi) == (0.0, 0.0)


@pytest.mark.kind(4, "calibrate")
def test_it_goes_on_without_another_pass_over_what_is_kept(
    tiny_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between the pass and the choice: the observations are taken up."""
    import quantkit.pipelines.calibrate as module

    asked = job(tiny_folder, corpus, tmp_path / "out")
    whole = ranges_of(run_calibrate(job(tiny_folder, corpus, tmp_path / "whole")))

    def interrupted(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "choose_ranges", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_calibrate(asked)
    with monkeypatch.context() as patch:
        patch.setattr(module, "observe", interrupted)
        found = ranges_of(run_calibrate(asked))
    assert found.tensors == whole.tensors
    assert found.stability == whole.stability


def test_another_model_in_the_same_folder_is_refused(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    asked = job(tiny_folder, corpus, tmp_path / "out")
    folder = run_calibrate(asked)
    plain = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**plain, "finished": False}))
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tiny_folder)
    with pytest.raises(InputError, match="from another model"):
        run_calibrate(asked)


def test_until_stable_says_how_many_it_took(tiny_folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "same.txt"
    corpus.write_text("abcdefghijklmnopqrstuvwx" * 400, encoding="utf-8")  # 24 letters: a block
    folder = run_calibrate(
        job(tiny_folder, corpus, tmp_path / "out", samples=None, until_stable=0.01)
    )
    found = ranges_of(folder)
    assert found.data.sequences == 24 and len(found.data.block_hashes) == 24
    assert found.until_stable_frac == 0.01
    assert found.stability[-1].moved_max_frac == 0.0
    count = found.tensors["linear_input/model.layers.0.mlp.down_proj"].count
    assert count == 24 * 24 * 48


def test_smoothed_ranges_are_those_of_the_smoothed_model(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = run_calibrate(job(tiny_folder, corpus, tmp_path / "out", smooth="0.5"))
    found = ranges_of(folder)
    assert len(found.smoothing) == 2 * 3  # norm -> q, k, v; norm -> gate, up; up -> down
    assert {group.alpha for group in found.smoothing.values()} == {0.5}
    assert (folder / "smoothing.json").is_file()
    loaded = load(str(tiny_folder))
    seen: dict[str, list[float]] = {}

    def look(module: Any, args: Any, name: str) -> None:
        seen.setdefault(name, []).extend([float(args[0].min()), float(args[0].max())])

    from functools import partial

    from quantkit.calib_sets import text_slice

    text = text_slice(str(corpus), loaded.tokenizer, seq_len=24, samples=20)
    handles = [
        module.register_forward_pre_hook(partial(look, name=f"linear_input/{name}"))
        for name, module in loaded.model.named_modules()
        if name.endswith("_proj")
    ]
    with torch.no_grad(), smoothed(loaded.model, found.smoothing):
        for batch in text.batches(4):
            loaded.model(input_ids=batch.input_ids)
    for handle in handles:
        handle.remove()
    for name, ends in seen.items():
        assert found.tensors[name].lo == pytest.approx(min(ends), rel=1e-4), name
        assert found.tensors[name].hi == pytest.approx(max(ends), rel=1e-4), name


def test_a_sweep_takes_ranges_and_smoothing(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = run_calibrate(job(tiny_folder, corpus, tmp_path / "ranges", smooth="auto"))
    asked = SweepJob(
        models=(str(tiny_folder),), eval=str(corpus), ranges=(str(run),), bits=(16,), seq_len=24,
        samples=4, recipes=("w8a8", "logits8:head:static"), out=str(tmp_path / "sweep"),
    )  # fmt: skip
    sweep = read_json(run_sweep(asked) / "sweep.json", Sweep)
    cells = perplexities(sweep)
    assert [cell.recipe for cell in cells] == ["none", "w8a8", "logits8:head:static"]
    assert sweep.data.skipped_blocks == 20 and sweep.data.shared_blocks == 0
    assert cells[1].value == pytest.approx(cells[0].value, rel=0.05)
    assert cells[1].value != cells[0].value
    with pytest.raises(InputError, match=r"share .* --allow-overlap"):
        run_sweep(
            dataclasses.replace(
                asked, eval=str(copy(corpus, tmp_path)), out=str(tmp_path / "overlap")
            )
        )
    allowed = dataclasses.replace(
        asked, eval=str(copy(corpus, tmp_path)), allow_overlap=True, out=str(tmp_path / "allowed")
    )
    sweep = read_json(run_sweep(allowed) / "sweep.json", Sweep)
    assert sweep.data.shared_blocks == 4
    assert any("not held out" in warning for warning in sweep.data.warnings)


def perplexities(sweep: Sweep) -> list[Cell]:
    return [cell for cell in sweep.cells if cell.metric == "perplexity"]


def copy(corpus: Path, folder: Path) -> Path:
    path = folder / "another-name.txt"
    path.write_bytes(corpus.read_bytes())
    return path


def test_a_word_mistyped_does_not_hold_the_folder(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    with pytest.raises(InputError, match="no such file"):
        run_calibrate(job(tiny_folder, tmp_path / "corpse.txt", out))
    assert not out.exists()
    assert (run_calibrate(job(tiny_folder, corpus, out)) / "ranges.json").is_file()


def test_a_run_whose_result_is_gone_is_not_finished(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    asked = job(tiny_folder, corpus, tmp_path / "out")
    first = ranges_of(run_calibrate(asked))
    (tmp_path / "out" / "ranges.json").unlink()
    assert ranges_of(run_calibrate(asked)).tensors == first.tensors


def test_ranges_that_never_become_stable_say_so(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    for samples, said in ((40, "after 40 samples, the most that were asked for"), (20, "too few")):
        asked = job(
            tiny_folder, corpus, tmp_path / str(samples), until_stable=1e-6, samples=samples
        )
        assert any(said in warning for warning in ranges_of(run_calibrate(asked)).warnings)


def test_heads_and_convolutions_of_an_image_model(tmp_path: Path) -> None:
    """The classifier is a linear layer too; the patch embedding is none."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        image_size=16, patch_size=8,
    )  # fmt: skip
    ViTForImageClassification(config).eval().save_pretrained(tmp_path / "vit")
    asked = CalibrateJob(model=str(tmp_path / "vit"), samples=3, out=str(tmp_path / "out"))
    found = ranges_of(run_calibrate(asked))
    assert "linear_input/classifier" in found.tensors
    assert any("1 convolution of vit" in warning for warning in found.warnings)
    assert found.data.source == "shapes"


def test_experts_without_ranges_are_said(tmp_path: Path, corpus: Path, tokenizer: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    folder = tmp_path / "moe"
    MixtralForCausalLM(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = ranges_of(run_calibrate(job(folder, corpus, tmp_path / "out")))
    assert any("hold the weights of all experts as one" in w for w in found.warnings)


def test_kept_quantizers_of_a_sweep(tiny_folder: Path, corpus: Path, tmp_path: Path) -> None:
    run = run_calibrate(job(tiny_folder, corpus, tmp_path / "ranges", bits=(4,), method="mse"))
    every = tuple(ranges_of(run).tensors)
    asked = SweepJob(
        models=(str(tiny_folder),), eval=str(corpus), ranges=(str(run),), bits=(16,), seq_len=24,
        samples=2, recipes=("a4",), out=str(tmp_path / "sweep"),
    )  # fmt: skip
    sweep = read_json(run_sweep(asked) / "sweep.json", Sweep)
    assert sweep.kept == [] and len(sweep.ranges_sha256) == 64
    inputs = tuple(name for name in every if name.startswith("linear_input/"))
    kept = dataclasses.replace(asked, keep=inputs[1:], out=str(tmp_path / "kept"))
    found = read_json(run_sweep(kept) / "sweep.json", Sweep)
    assert found.kept == list(inputs[1:]) and found.ranges_sha256 != sweep.ranges_sha256
    pairs = [perplexities(one) for one in (found, sweep)]
    assert pairs[0][1].hits < pairs[1][1].hits
    errors = [abs(cells[1].value - cells[0].value) for cells in pairs]
    assert errors[0] < errors[1]
    with pytest.raises(InputError, match="'linear_input/nothing' is none of"):
        run_sweep(
            dataclasses.replace(
                asked, keep=("linear_input/nothing",), out=str(tmp_path / "unknown")
            )
        )
    wide = dataclasses.replace(asked, recipes=("a8",), out=str(tmp_path / "wide"))
    with pytest.raises(InputError, match=r"chosen by mse for 4 bits.*--bits 4,8"):
        run_sweep(wide)
    assert not (tmp_path / "wide").exists()  # said before anything was measured


def test_recipes_that_need_ranges_say_so() -> None:
    with pytest.raises(InputError, match="give --ranges RUN"):
        SweepJob(models=("m",), recipes=("w8a8",))
    with pytest.raises(InputError, match="neither is given"):
        SweepJob(models=("m",), ranges=("r",))
    assert ExportJob(model="m", keep=("a",)).keep == ("a",)


@pytest.mark.kind(4, "calibrate", "cli")
def test_two_processes_fix_the_ranges_of_one(
    tiny_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    options = ["--calib", str(corpus), "--seq-len", "24", "--samples", "18", "--batch-size", "2"]
    options += ["--method", "mse", "--quiet"]
    command = ["calibrate", str(tiny_folder), *options, "--out"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for prefix, out in (([], "one"), (launch, "two")):
        done = subprocess.run(
            [sys.executable, *prefix, "-m", "quantkit", *command, str(tmp_path / out)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (ranges_of(tmp_path / name) for name in ("one", "two"))
    assert one.tensors == two.tensors
    assert [p.samples for p in one.stability] == [p.samples for p in two.stability]
    assert one.stability == two.stability
    assert not list((tmp_path / "two").glob("*part*"))
