"""What `export FILE.onnx` refuses to pass: faults in what was written, and nothing to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import GateError
from quantkit.exporting.output_agreement import OutputAgreement, OutputSums
from quantkit.jobs import ExportJob
from quantkit.pipelines import export_graph
from quantkit.pipelines.graph_parity import output_entries
from quantkit.results import Export

NONE = np.zeros(0)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def image_net(path: Path, behind: str = "Identity", domain: str = "") -> Path:
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "w1"], ["a"], name="stem", strides=[2, 2]),
        node("Relu", ["a"], ["b"]),
        node("Flatten", ["b"], ["f"]),
        node("MatMul", ["f", "w2"], ["h"], name="head"),
        node(behind, ["h"] + ["none", "none"] * (behind == "Slice"), ["y"], domain=domain),
    ]
    constants = {"w1": noise(4, 3, 3, 3), "w2": noise(196, 5)}
    if behind == "Slice":
        constants["none"] = np.zeros(1, np.int64)
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, 16, 16))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    given = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, given)
    opsets = [helper.make_opsetid("", 21), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def export(path: Path, out: Path, **options: Any) -> Export:
    job = ExportJob(model=str(path), samples=6, eval_samples=4, **options)
    return export_graph.export_graph_into(job, out)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, to: Callable[[Any], Any]) -> None:
    """Changes an initializer of what the passes made, before it is written."""
    passes = export_graph.quantize_layers

    def faulty(graph: ir.Model, *args: Any, **options: Any) -> Any:
        found = passes(graph, *args, **options)
        value = graph.graph.initializers[name]
        assert value.const_value is not None
        array = np.array(value.const_value.numpy())
        value.const_value = ir.tensor(np.asarray(to(array), array.dtype), name=name)
        return found

    monkeypatch.setattr(export_graph, "quantize_layers", faulty)


def test_each_kind_is_proven(tmp_path: Path) -> None:
    found = export(image_net(tmp_path / "net.onnx"), tmp_path / "out")
    assert found.passed
    (few,) = found.model.warnings
    assert few.startswith("shapes: 6 images are fewer than the 300")
    weights, inputs, products = found.parity["quantized"]
    assert "2 weights" in weights.reference
    assert "3 inputs" in inputs.reference
    assert "2 products" in products.reference
    assert min(x.cosine for x in found.parity["quantized"]) > 0.99999
    assert [x.reference.split(":")[0] for x in found.parity["outputs"]] == [
        "the float graph in ONNX Runtime"
    ]


@pytest.mark.parametrize(
    ("tensor", "to", "said"),
    [
        ("head.weight_scale", lambda x: x * 1.1, "1 of 2 weights are off: weight/head by"),
        (
            "linear_input/head/scale",
            lambda x: x * 1.1,
            "1 of 3 inputs are off: linear_input/head by",
        ),
        (
            "linear_input/stem/zero_point",
            lambda x: x + 9,
            "1 of 3 inputs are off: linear_input/stem by",
        ),
    ],
    ids=["scale of a weight", "scale of an input", "zero point"],
)
def test_a_planted_fault_fails_the_export_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str, to: Any, said: str
) -> None:
    plant(monkeypatch, tensor, to)
    found = export(image_net(tmp_path / "net.onnx"), tmp_path / "out")
    assert not found.passed
    (failed,) = [x for entries in found.parity.values() for x in entries if not x.passed]
    assert said in failed.reference


def test_what_is_written_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "linear_input/head/scale", lambda x: x * 0)
    with pytest.raises(GateError, match="linear_input/head/quantize' has the scale 0"):
        export(image_net(tmp_path / "net.onnx"), tmp_path / "out")


@pytest.mark.kind(6, "export")
def test_a_domain_of_the_file_s_own_is_allowed(tmp_path: Path) -> None:
    path = image_net(tmp_path / "net.onnx", "Gelu", "com.microsoft")
    found = export(path, tmp_path / "out")
    assert found.passed
    assert found.domains == ["ai.onnx", "com.microsoft"]
    # ONNX knows no shape behind that operator, and the file states none: its own fault, and said
    warning, _few = found.model.warnings
    assert "ONNX's checker refuses the file as it was: Field 'shape'" in warning


@pytest.mark.kind(6, "export")
def test_a_domain_that_nobody_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = export_graph.quantize_layers

    def foreign(graph: ir.Model, *args: Any, **options: Any) -> Any:
        found = passes(graph, *args, **options)
        node = next(node for node in graph.graph if node.op_type == "Relu")
        node.op_type, node.domain = "QuickGelu", "com.microsoft"
        graph.opset_imports["com.microsoft"] = 1
        return found

    monkeypatch.setattr(export_graph, "quantize_layers", foreign)
    with pytest.raises(GateError, match=r"is of the operator domain com\.microsoft"):
        export(image_net(tmp_path / "net.onnx"), tmp_path / "out")


def test_an_empty_output_is_no_pass(tmp_path: Path) -> None:
    found = export(image_net(tmp_path / "net.onnx", "Slice"), tmp_path / "out")
    assert found.parity["outputs"] == []
    assert all(entry.passed for entry in found.parity["quantized"])
    assert not found.passed


def test_nothing_quantized_is_no_pass(tmp_path: Path) -> None:
    keep = ("weight/stem", "weight/head", "linear_input/head")
    found = export(image_net(tmp_path / "net.onnx"), tmp_path / "out", keep=keep)
    assert found.quantizers == []
    assert not found.passed


@pytest.mark.parametrize("kept", ["weight/stem", "linear_input/stem", "linear_input/stem/result"])
def test_a_convolution_that_is_kept_is_reported_whole(tmp_path: Path, kept: str) -> None:
    found = export(image_net(tmp_path / "net.onnx"), tmp_path / "out", keep=(kept,))
    assert found.passed
    assert set(found.kept) == {"weight/stem", "linear_input/stem", "linear_input/stem/result"}
    assert {info.name for info in found.quantizers} == {"weight/head", "linear_input/head"}


@pytest.mark.parametrize(
    ("name", "passed"), [("logits", False), ("hidden", True)], ids=["logits", "features"]
)
def test_ties_matter_where_one_is_chosen(name: str, passed: bool) -> None:
    """Half of the rows have two entries that differ in their last bits."""
    before = np.array([[1.0, 1.0 + 1e-6, 0.0], [0.0, 3.0, 1.0]])
    behind = np.array([[1.0 + 2e-6, 1.0, 0.0], [0.0, 3.0, 1.0]])
    sums = OutputSums()
    sums.add(before, behind)
    found = OutputAgreement(
        outputs={name: sums}, float_nll=NONE, quantized_nll=NONE, predicted=NONE, shape=(2, 4)
    )
    (entry,) = output_entries(found, "the file as it was", is_float=True)
    assert (entry.top1_agreement, entry.passed) == (0.5, passed)
