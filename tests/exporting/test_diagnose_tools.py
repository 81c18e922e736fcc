"""What onnxruntime's own quantizers write, of every form, is read and judged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.exporting import export_float
from quantkit.exporting.diagnosis.diagnose import diagnose
from quantkit.exporting.diagnosis.quantized_weights import blocks_of
from quantkit.results import Diagnosis
from tests.exporting.planted_graphs import data_info
from tests.onnx_runtime import graphs

Batches = list[dict[str, NDArray[Any]]]
PLANTED = "model.layers.1.mlp.down_proj"


class Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, batches: Batches) -> None:
        self.left = iter(batches)

    def get_next(self) -> Mapping[str, NDArray[Any]] | None:
        return next(self.left, None)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """The tools of onnxruntime log to the root logger."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def static(path: Path, batches: Batches, to: Path, **options: Any) -> Path:
    quantize_static(path, to, Reader(batches), **options)
    return to


@pytest.fixture
def mlp(tmp_path: Path) -> tuple[Path, Batches]:
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(1, 64, 4)).astype(np.float32)} for _ in range(3)]
    return graphs.saved(graphs.mlp(), tmp_path / "float"), batches


def judged(path: Path, quantized: Path, batches: Batches) -> Diagnosis:
    return diagnose(path, quantized, batches, data=data_info())


@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=str)
def test_static_forms(mlp: tuple[Path, Batches], tmp_path: Path, form: QuantFormat) -> None:
    path, batches = mlp
    result = judged(path, static(path, batches, tmp_path / "q.onnx", quant_format=form), batches)
    assert {f.kind for f in result.findings} <= {"domain"}  # QOperator has com.microsoft's QGemm
    assert result.in_float == result.weight_only == []
    tensors = {tensor.name: tensor for tensor in result.tensors}
    assert {"b", "c", "d", "e", "y"} == set(tensors)  # a: its Relu is in the grid of b
    assert all(tensor.sqnr_db > 30 for tensor in tensors.values())
    places = {(row.layer, row.place) for row in result.quantizers}
    assert {("a", "input"), ("c", "input"), ("c", "weight"), ("e", "weight")} <= places
    assert all(row.local_sqnr_db > 35 for row in result.quantizers)


def test_dynamic(mlp: tuple[Path, Batches], tmp_path: Path) -> None:
    path, batches = mlp
    quantize_dynamic(path, tmp_path / "q.onnx")
    result = judged(path, tmp_path / "q.onnx", batches)
    row = result.quantizers[0]
    assert (row.kind, row.place, row.layer, row.granularity) == ("dynamic", "input", "a", "call")
    x = [feeds["x"].astype(np.float64) for feeds in batches]
    scales = [(values.max() - values.min()) / 255 for values in x]
    assert np.allclose((row.scale_min, row.scale_max), (min(scales), max(scales)), rtol=1e-6)
    assert result.in_float == ["c", "e"]  # it takes weights in initializers only
    assert result.findings[0].kind == "in_float"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_matmul_nbits(tmp_path: Path, bits: int, symmetric: bool) -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(40, 24)).astype(np.float32)
    model = graphs.model(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="layer")],
        {"x": ["batch", 40]},
        {"y": ["batch", 24]},
        {"w": weight},
    )
    path = graphs.saved(model, tmp_path / "float")
    tool = MatMulNBitsQuantizer(onnx.load(path), bits=bits, block_size=16, is_symmetric=symmetric)
    tool.process()
    tool.model.save_model_to_file(str(tmp_path / "q.onnx"))
    batches: Batches = [{"x": np.eye(40, dtype=np.float32)}]
    result = judged(path, tmp_path / "q.onnx", batches)
    assert result.weight_only == ["layer"] and result.in_float == []
    assert [f.kind for f in result.findings if f.severity == "note"] == ["weight_only", "domain"]
    node = next(iter(ir.load(tmp_path / "q.onnx").graph))
    held = cast(NDArray[np.float32], blocks_of(node))
    import onnxruntime as ort

    session = ort.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    (real,) = session.run(None, batches[0])  # the identity times the weight
    assert np.allclose(held, real, atol=1e-5)
    (row,) = result.quantizers
    assert (row.kind, row.granularity, row.place) == ("weight", "group", "weight")
    noise = ((weight - real).astype(np.float64) ** 2).sum()
    db = 10 * np.log10((weight.astype(np.float64) ** 2).sum() / noise)
    assert abs(row.local_sqnr_db - db) < 1e-3


def product(operator: str, weight: NDArray[np.float32]) -> tuple[onnx.ModelProto, list[int]]:
    """A product with `weight`, `[inputs, outputs]`, as the operator takes it; the shape of x."""
    rows, columns = weight.shape
    is_left = operator == "MatMul, left"
    options = {"transB": 1} if operator == "Gemm, turned" else {}
    held = weight.T.copy() if is_left or options else weight
    names = ["w", "x"] if is_left else ["x", "w"]
    constants = {"w": held}
    if operator.startswith("Gemm"):
        names, constants = [*names, "b"], constants | {"b": np.ones(columns, np.float32)}
    kind = operator.partition(",")[0]
    node = onnx.helper.make_node(kind, names, ["y"], name="layer", **options)
    shape = [rows, 7] if is_left else [7, rows]
    out = [columns, 7] if is_left else [7, columns]
    return graphs.model([node], {"x": shape}, {"y": out}, constants), shape


FORMS = {
    "MatMul": ("QOperator", "QDQ", "dynamic"),
    "MatMul, left": ("QOperator",),
    "Gemm": ("QOperator", "QDQ", "dynamic"),
    "Gemm, turned": ("QOperator", "QDQ", "dynamic"),
}


@pytest.mark.parametrize("columns", [48, 32], ids=["32x48", "32x32"])
@pytest.mark.parametrize(
    ("operator", "tool"), [(name, tool) for name, tools in FORMS.items() for tool in tools]
)
def test_weights_are_read_the_way_they_lie(
    tmp_path: Path, operator: str, tool: str, columns: int
) -> None:
    """One output of the weight has an outlier: its integers hold the others of it worst."""
    rng = np.random.default_rng(6)
    weight = rng.normal(size=(32, columns)).astype(np.float32)
    weight[3, 5] = 50.0
    made, shape = product(operator, weight)
    path = graphs.saved(made, tmp_path / "float")
    batches: Batches = [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(2)]
    if tool == "dynamic":
        quantize_dynamic(path, tmp_path / "q.onnx", per_channel=True)
    else:
        form = QuantFormat[tool]
        static(path, batches, tmp_path / "q.onnx", quant_format=form, per_channel=True)
    (row,) = [
        row for row in judged(path, tmp_path / "q.onnx", batches).quantizers if row.kind == "weight"
    ]
    held = {
        c.name: onnx.numpy_helper.to_array(c)
        for c in onnx.load(tmp_path / "q.onnx").graph.initializer
    }
    (name,) = [n for n, array in held.items() if array.ndim == 2]
    integers, stem = held[name].astype(np.float64), name.removesuffix("_quantized")
    scale, zero = (held[f"{stem}_{word}"].astype(np.float64) for word in ("scale", "zero_point"))
    lies_turned = operator == "MatMul, left" or (operator == "Gemm, turned" and tool != "dynamic")
    integers = integers.T if lies_turned else integers  # `[inputs, outputs]` from here on
    real = (integers - zero) * scale
    assert integers.shape == weight.shape and scale.size in (1, columns)
    noise = (weight - real) ** 2
    db = 10 * np.log10((weight.astype(np.float64) ** 2).sum() / noise.sum())
    assert db > 15  # it is the weight, and not its transpose
    assert abs(row.local_sqnr_db - db) < 1e-3
    assert np.isnan(row.local_inlier_sqnr_db)  # a weight's inliers are not looked at
    levels = (weight.astype(np.float64) ** 2).sum(0) / noise.sum(0)
    assert row.worst_channel == int(levels.argmin())
    assert abs(row.worst_channel_sqnr_db - 10 * np.log10(levels.min())) < 1e-3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Batches]:
    """A decoder with a channel of 300 in one input: what writes it is scaled, its reader back."""
    sizes = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "initializer_range": 0.15,
    }  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        mlp = model.get_submodule(PLANTED.removesuffix(".down_proj"))
        mlp.up_proj.weight[7] *= 400
        mlp.down_proj.weight[:, 7] /= 400
    path = export_float(model, tmp_path_factory.mktemp("llama"))
    rng = np.random.default_rng(4)
    inputs = {str(v.name): v for v in ir.load(path).graph.inputs}
    batches: Batches = []
    for _ in range(3):
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": rng.integers(0, 96, (1, 40)),
            "attention_mask": np.ones((1, 40), np.int64),
        }
        for name in inputs:
            if name.startswith("past"):
                feeds[name] = np.zeros((1, 2, 0, 12), np.float32)
        batches.append(feeds)
    return path, batches


def test_static_decoder_names_the_planted_layer(
    llama: tuple[Path, Batches], tmp_path: Path
) -> None:
    path, batches = llama
    options: dict[str, Any] = {"per_channel": True, "op_types_to_quantize": ["MatMul", "Gemm"]}
    result = judged(path, static(path, batches, tmp_path / "q.onnx", **options), batches)
    assert result.metric == "kl"
    first = result.findings[0]
    assert (first.severity, first.kind) == ("costly", "outliers")
    assert first.where == f"input of {PLANTED}"
    assert first.share > 0.4
    row = next(row for row in result.quantizers if row.name == first.quantizer)
    assert row.median_steps < 2
    logits = [row for row in result.quantizers if row.place == "logits"]
    assert len(logits) == 2 and all(row.hidden_frac > 0.4 for row in logits)


def test_static_decoder_with_its_mask_in_the_range(
    llama: tuple[Path, Batches], tmp_path: Path
) -> None:
    path, batches = llama
    options: dict[str, Any] = {"op_types_to_quantize": ["MatMul", "Gemm", "Add", "Softmax"]}
    result = judged(path, static(path, batches, tmp_path / "q.onnx", **options), batches)
    first = result.findings[0]
    assert (first.severity, first.kind) == ("broken", "mask")
    assert first.where.startswith("logits of model.layers.")
    masks = [f for f in result.findings if f.kind == "mask"]
    assert len(masks) == 2  # one a layer


def test_padding_counts_in_no_figure(llama: tuple[Path, Batches], tmp_path: Path) -> None:
    """A decoder's earlier positions do not see what comes after them, so figures stay."""
    path, batches = llama
    options: dict[str, Any] = {"per_channel": True, "op_types_to_quantize": ["MatMul", "Gemm"]}
    quantized = static(path, batches, tmp_path / "q.onnx", **options)
    padded: Batches = []
    for feeds in batches:
        wide = {name: np.pad(feeds[name], ((0, 0), (0, 24))) for name in list(feeds)[:2]}
        wide["input_ids"][:, 40:] = 95
        padded.append({**feeds, **wide})
    plain, other = (
        diagnose(path, quantized, some, data=data_info(), alone_samples=3)
        for some in (batches, padded)
    )
    assert other.total == pytest.approx(plain.total, rel=1e-4)
    assert [f.where for f in other.findings] == [f.where for f in plain.findings]
    for one, two in zip(plain.tensors, other.tensors, strict=True):
        assert two.name == one.name
        if one.op == "Softmax":  # weights of hidden keys, all 0, are there, too
            continue
        assert two.elements == one.elements, one.name
        assert two.relative_error == pytest.approx(one.relative_error, rel=1e-3), one.name
    for before, behind in zip(plain.quantizers, other.quantizers, strict=True):
        expected = pytest.approx(before.alone, rel=1e-3, abs=1e-7, nan_ok=True)
        assert behind.alone == expected, before.name
