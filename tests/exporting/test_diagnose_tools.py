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
