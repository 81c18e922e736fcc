"""`compare`: every stage of several models in one folder, and the shipped pair's own defaults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from quantkit.errors import InputError
from quantkit.jobs import PAIR_DEFAULTS, CompareJob
from quantkit.models import shipped
from quantkit.pipelines import compare, run_compare, run_sweep
from quantkit.pipelines import export as export_stage
from quantkit.pipelines import stats as stats_stage
from quantkit.pipelines.runs import open_run
from quantkit.results import Export, Ranges, Stats, Sweep, read_json, write_json
from quantkit.sweeps import run as cells

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
NEEDLES = "needles:needles=1:queries=1:tokens=300"
SEQ_LEN, CALIB, EVAL = 32, 4, 6
FILES = ("stats.json", "ranges.json", "calibration.json", "export.json", "quantizers.json")


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tiny models in the place of those that ship, with how they would have been trained."""
    root = tmp_path_factory.mktemp("package") / "pair"
    made: Any
    for name, made in (
        ("baseline", LlamaForCausalLM(LlamaConfig(**SIZES))),
        ("diff", DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES))),
    ):
        torch.manual_seed(len(name))
        for parameter in made.parameters():
            if parameter.ndim > 1:  # far from uniform, so that no two rows of results are the same
                torch.nn.init.normal_(parameter, std=0.3)
        made.save_pretrained(root / name)
        _tokenizer().save_pretrained(root / name)
    for name in shipped.PAIR_RESULTS:
        (root / name).write_text(json.dumps({"from": name}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "pair_folder", lambda: root)
        yield root


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(3)
    words = ["".join(map(chr, draw.integers(97, 123, size=6))) for _ in range(400)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words), encoding="utf-8")
    return path


def job_of(text: Path, out: Path, **changes: Any) -> CompareJob:
    given = {
        "text": str(text),
        "seq_len": SEQ_LEN,
        "calib_samples": CALIB,
        "eval_samples": EVAL,
        "tasks": ("perplexity", NEEDLES),
        "items": 2,
        "bits": (16, 4),
        "granularity": ("head", "row"),
        "out": str(out),
    }
    return CompareJob.of_pair(**given | changes)


@pytest.fixture(scope="module")
def compared(pair: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> CompareJob:
    """A finished comparison of the pair."""
    job = job_of(text, tmp_path_factory.mktemp("runs") / "run")
    run_compare(job)
    return job


def folder_of(job: CompareJob) -> Path:
    assert job.out is not None
    return Path(job.out)


def test_every_stage_of_both_models_is_there(compared: CompareJob) -> None:
    folder = folder_of(compared)

    assert json.loads((folder / "run.json").read_text())["finished"]
    for model in ("baseline", "diff"):
        assert [name for name in FILES if not (folder / model / name).is_file()] == []
        assert (folder / model / "model.onnx").is_file()
        assert read_json(folder / model / "export.json", Export).passed
        assert read_json(folder / model / "ranges.json", Ranges).data.sequences == CALIB
    for name in shipped.PAIR_RESULTS:
        assert json.loads((folder / name).read_text()) == {"from": name}


def test_statistics_have_both_readings_and_the_lambdas(compared: CompareJob) -> None:
    folder = folder_of(compared)
    found = {m: read_json(folder / m / "stats.json", Stats) for m in ("baseline", "diff")}

    assert [len(stats.differential) for stats in found.values()] == [0, 2]
    for stats in found.values():
        every = stats.summary.attention_logit_unmasked
        assert every is not None and every.count > stats.summary.attention_logit.count


def test_the_sweep_has_every_row_of_both_models(compared: CompareJob) -> None:
    sweep = read_json(folder_of(compared) / "sweep.json", Sweep)

    rows = [(c.model, c.recipe, c.task) for c in sweep.cells if c.metric != "query_accuracy"]
    recipes = {"none", "logits4:head", "logits4:row", "logits4:head:static"}
    for model in ("baseline", "diff"):
        for task in ("perplexity", NEEDLES):
            assert {r for m, r, t in rows if (m, t) == (model, task)} == recipes
    assert {(mass.model, mass.task) for mass in sweep.attention_mass} == {
        ("baseline", NEEDLES),
        ("diff", NEEDLES),
    }
    assert sweep.ranges_sha256


def test_perplexity_is_that_of_the_blocks_after_calibrations(
    compared: CompareJob, pair: Path, text: Path
) -> None:
    sweep = read_json(folder_of(compared) / "sweep.json", Sweep)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = [alphabet.index("Ġ" if letter == " " else letter) for letter in text.read_text()]
    blocks = np.array(ids[: SEQ_LEN * (CALIB + EVAL)]).reshape(-1, SEQ_LEN)[CALIB:]
    for name, kind in (("baseline", LlamaForCausalLM), ("diff", DiffLlamaForCausalLM)):
        with torch.inference_mode():
            model: Any = kind.from_pretrained(pair / name, dtype=torch.float32)
            logits = model(torch.from_numpy(blocks)).logits.double().numpy()
        shifted = logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)
        likely = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        own = np.take_along_axis(likely, blocks[:, 1:, None], -1)
        (cell,) = (
            c for c in sweep.cells if (c.model, c.recipe, c.metric) == (name, "none", "perplexity")
        )
        assert cell.value == pytest.approx(float(np.exp(-own.mean())), rel=1e-4)
        assert cell.n == EVAL


def test_a_sweep_with_the_runs_ranges_is_the_same(compared: CompareJob, tmp_path: Path) -> None:
    folder = folder_of(compared)
    ranges = (str(folder / "baseline"), str(folder / "diff"))
    swept = compared.sweep(ranges)
    changes = {"tasks": ("perplexity",), "items": 200, "out": str(tmp_path / "sweep")}
    alone = run_sweep(type(swept)(**{**vars(swept), **changes}))

    def values(path: Path) -> dict[tuple[str, str], float]:
        found = read_json(path / "sweep.json", Sweep).cells
        return {(c.model, c.recipe): c.value for c in found if c.metric == "perplexity"}

    assert values(alone) == values(folder)


def test_force_removes_what_the_pair_brought(tmp_path: Path, text: Path, pair: Path) -> None:
    write_json(tmp_path / "run.json", {"config_hash": "other", "command": "compare"})
    for name in shipped.PAIR_RESULTS:
        (tmp_path / name).write_text("{}")
    open_run("compare", job_of(text, tmp_path, force=True))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "run.json"]


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("what is finished was made again")


def test_a_finished_run_computes_nothing(
    compared: CompareJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "load_all", _refuse)

    assert run_compare(compared) == folder_of(compared)


def test_an_interrupted_run_makes_only_what_is_missing(
    compared: CompareJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(folder_of(compared), folder)
    before = read_json(folder / "sweep.json", Sweep)
    plain = json.loads((folder / "run.json").read_text())
    write_json(folder / "run.json", plain | {"finished": False})
    (folder / "sweep.json").unlink()
    sorted((folder / "cells").rglob("*.json"))[0].unlink()
    monkeypatch.setattr(stats_stage, "collect", _refuse)
    monkeypatch.setattr(export_stage, "calibrate", _refuse)
    monkeypatch.setattr(export_stage, "export_and_prove", _refuse)
    measured: list[str] = []
    real: Callable[..., Any] = cells._measured

    def counted(*arguments: Any) -> Any:
        measured.append(arguments[4])
        return real(*arguments)

    monkeypatch.setattr(cells, "_measured", counted)
    run_compare(job_of(Path(compared.text), folder))

    assert len(measured) == 1
    after = read_json(folder / "sweep.json", Sweep)
    assert (after.cells, after.deltas) == (before.cells, before.deltas)
    assert json.loads((folder / "run.json").read_text())["finished"]


def test_defaults_of_the_pair_are_fields_like_any_others() -> None:
    job = CompareJob.of_pair()

    assert job.models == ("baseline", "diff")
    assert {name: getattr(job, name) for name in PAIR_DEFAULTS} == PAIR_DEFAULTS
    assert [name for name, value in PAIR_DEFAULTS.items()
            if getattr(CompareJob(models=("m",)), name) == value] == []  # fmt: skip
    assert CompareJob.of_pair(items=200).items == 200


def test_a_default_that_would_be_unread_is_left_out() -> None:
    assert CompareJob.of_pair(tasks=("perplexity",)).items == 200
    assert CompareJob.of_pair(bits=(16,)).range == ("dynamic",)
    assert CompareJob.of_pair(granularity=("row",)).range == ("dynamic",)
    with pytest.raises(InputError, match="--items is not read"):
        CompareJob.of_pair(tasks=("perplexity",), items=9)


def test_a_path_that_hides_the_pair_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diff").mkdir()

    with pytest.raises(InputError, match=r"\./diff hides the shipped model"):
        CompareJob.of_pair()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"tasks": ("neddles",)}, "Did you mean 'needles'", id="unknown-task"),
        pytest.param({"tasks": ("needles:shots=2",)}, "unknown option", id="option-of-a-task"),
        pytest.param({"tasks": ()}, "--task is empty", id="no-task"),
        pytest.param({"range": ("statc",)}, "--range does not take 'statc'", id="unknown-range"),
        pytest.param(
            {"range": ("static",), "granularity": ("row",)}, "no rows per row", id="static-row"
        ),
        pytest.param({"range": ("static",), "bits": (16,)}, "--range is not read", id="static-16"),
        pytest.param({"items": 9}, "--items is not read", id="items-of-perplexity"),
        pytest.param({"items": 0, "tasks": ("icl",)}, "--items takes", id="no-items"),
        pytest.param(
            {"tasks": ("image-classification=photos",)}, "takes language models", id="images"
        ),
    ],
)
def test_bad_input_costs_no_model(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        CompareJob(models=("m",), **changes)


def test_a_comparison_without_static_rows_reads_its_own_text() -> None:
    job = CompareJob(models=("m",), text="t.txt", calib_samples=3, eval_samples=5, bos="never")
    swept = job.sweep()

    assert (swept.eval, swept.calib, swept.calib_samples) == ("t.txt", "t.txt", 3)
    assert (swept.samples, swept.bos, swept.ranges) == (5, "never", ())
