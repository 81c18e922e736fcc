"""Kind 6: graphs as other tools write them are quantized to what numpy computes, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import erf
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.exporting.prepare import prepare_graph
from quantkit.onnx_runtime import GraphBatch, load_float_graph, observe_graph, open_graph
from tests.reliability.graph_makers import (
    MIDDLE,
    OUT,
    ROWS,
    WIDE,
    Array,
    numpys,
    relu,
    samples,
    saved,
    two_layers,
)  # fmt: skip
from tests.reliability.one_line import ran, refused

pytestmark = pytest.mark.kind(6, "export", "cli")
Change = Callable[[onnx.ModelProto], None]
FEW = ("--samples", 8, "--eval-samples", 4, "--quiet")


def tensor(name: str, value: object) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def gelu(x: Array) -> Array:
    return (x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2).astype(np.float32)


def microsofts(model: onnx.ModelProto) -> None:
    undeclared(model)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def undeclared(model: onnx.ModelProto) -> None:
    node = model.graph.node[1]
    node.op_type, node.domain = "Gelu", "com.microsoft"


def long_name(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "ai.onnx"
    model.graph.node[0].domain = "ai.onnx"


def weights_are_inputs(model: onnx.ModelProto) -> None:
    for weight in model.graph.initializer:
        shape = list(weight.dims)
        value = helper.make_tensor_value_info(weight.name, TensorProto.FLOAT, shape)
        model.graph.input.append(value)


def constant_nodes(model: onnx.ModelProto) -> None:
    for weight in model.graph.initializer:
        model.graph.node.insert(0, helper.make_node("Constant", [], [weight.name], value=weight))
    del model.graph.initializer[:]


def function(at: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = model.graph.node[at]
        names = [f"p{i}" for i in range(len(node.input))]
        inner = [helper.make_node(node.op_type, names, ["q"])]
        opsets = [helper.make_opsetid("", 21)]
        model.functions.append(helper.make_function("own", "Own", names, ["q"], inner, opsets))
        model.opset_import.append(helper.make_opsetid("own", 1))
        node.op_type, node.domain = "Own", "own"

    return change


def body_of_if(model: onnx.ModelProto) -> None:
    """The last layer is one branch; the other is never taken."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "te"]
    last = model.graph.node.pop()
    then = [helper.make_node("MatMul", last.input, ["t"])]
    other = [helper.make_node("Identity", ["w2"], ["e"])]
    branches = {
        "then_branch": helper.make_graph(then, "then", [], value[:1]),
        "else_branch": helper.make_graph(other, "else", [], value[1:]),
    }
    model.graph.initializer.append(tensor("yes", True))
    model.graph.node.append(helper.make_node("If", ["yes"], ["y"], **branches))


def body_of_loop(model: onnx.ModelProto) -> None:
    """The output goes twice through a product with the identity."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["s", "eye"], ["s2"]),
            helper.make_node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []),
         info("s", TensorProto.FLOAT, None)],
        [info("c2", TensorProto.BOOL, []), info("s2", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model.graph.node[2].output[0] = "z"
    constants = {"eye": np.eye(OUT, dtype=np.float32), "times": np.array(2), "yes": True}
    model.graph.initializer.extend(tensor(name, value) for name, value in constants.items())
    model.graph.node.append(helper.make_node("Loop", ["times", "yes", "z"], ["y"], body=body))


def empty_input(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("most", np.float32(1)))
    node = model.graph.node[1]
    node.op_type, node.input[:] = "Clip", ["a", "", "most"]


def no_rows(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("none", np.zeros((0, MIDDLE), np.float32)))
    node = model.graph.node[1]
    node.op_type, node.input[:] = "Concat", ["a", "none"]
    node.attribute.append(helper.make_attribute("axis", 0))


def no_columns(model: onnx.ModelProto) -> None:
    """A layer of no outputs beside the last one."""
    model.graph.initializer.append(tensor("w0", np.zeros((MIDDLE, 0), np.float32)))
    model.graph.node[2].output[0] = "z"
    model.graph.node.append(helper.make_node("MatMul", ["b", "w0"], ["nothing"], "empty"))
    model.graph.node.append(helper.make_node("Concat", ["z", "nothing"], ["y"], axis=1))


def integer_product(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("i2", 2 * np.eye(OUT, dtype=np.int64)))
    model.graph.node[2].output[0] = "z"
    model.graph.node.extend(
        [
            helper.make_node("Cast", ["z"], ["whole"], to=TensorProto.INT64),
            helper.make_node("MatMul", ["whole", "i2"], ["twice"], "integers"),
            helper.make_node("Cast", ["twice"], ["real"], to=TensorProto.FLOAT),
            helper.make_node("Sub", ["real", "real"], ["zero"]),
            helper.make_node("Add", ["z", "zero"], ["y"]),
        ]
    )


def odd_names(model: onnx.ModelProto) -> None:
    model.graph.node[0].name = "a/../b\n<script>{0}%s"
    model.graph.node[2].name = "n" * 3000


def no_names(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = ""


def unsorted(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def unchanged(model: onnx.ModelProto) -> None:
    """Nothing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph that is to be quantized.

    Attributes:
        layers: How many weights are on a grid afterwards.
    """

    change: Change = unchanged
    opset: int = 21
    ir_version: int = 10
    between: Callable[[Array], Array] = relu
    layers: int = 2


CASES = {
    **{f"opset {n}": Case(opset=n) for n in (11, 12, 13, 15, 18, 20, 23)},
    "opset 7 of IR version 3": Case(change=weights_are_inputs, opset=7, ir_version=3),
    "com.microsoft": Case(change=microsofts, between=gelu),
    "com.microsoft, opset 13": Case(change=microsofts, opset=13, between=gelu),
    "com.microsoft, not imported": Case(change=undeclared, between=gelu),
    "ai.onnx by its long name": Case(change=long_name),
    "ai.onnx by its long name, opset 13": Case(change=long_name, opset=13),
    "weights that are inputs": Case(change=weights_are_inputs),
    "weights in Constant nodes": Case(change=constant_nodes),
    "weights in Constant nodes, opset 13": Case(change=constant_nodes, opset=13),
    "a function between": Case(change=function(1)),
    "a layer that is a function": Case(change=function(0)),
    "a layer in an If": Case(change=body_of_if, layers=1),
    "a layer in an If, opset 13": Case(change=body_of_if, opset=13, layers=1),
    "a Loop": Case(change=body_of_loop),
    "a Loop, opset 13": Case(change=body_of_loop, opset=13),
    "an empty optional input": Case(change=empty_input, between=lambda x: np.minimum(x, 1)),
    "a tensor of no rows": Case(change=no_rows, between=lambda x: x),
    "a layer of no outputs": Case(change=no_columns),
    "a product of integers": Case(change=integer_product),
    "odd names": Case(change=odd_names),
    "no names": Case(change=no_names),
    "nodes in no order": Case(change=unsorted),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_of_any_make_is_what_numpy_computes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = two_layers(case.opset, case.ir_version)
    case.change(model)
    path = saved(model, tmp_path / "net.onnx")
    before = path.read_bytes()
    out = tmp_path / "out"

    ran("export", path, "--calib", samples(tmp_path / "x.npz"), *FEW, "--out", out)

    expected = numpys(ROWS, case.between)
    (got,) = ort.InferenceSession(out / "model.onnx").run(None, {"x": ROWS})
    worst = np.abs(got - expected).max() / np.abs(expected).max()
    assert 0 < worst < 0.04  # of 8 bits, and not of float
    written = onnx.load(out / "model.onnx")
    kinds = [weight.data_type for weight in written.graph.initializer if len(weight.dims) == 2]
    assert kinds.count(TensorProto.INT8) == case.layers
    assert path.read_bytes() == before


def test_other_libraries_warnings_stay_off_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a handler of its own Python writes them to stderr, here with a traceback."""
    model = two_layers()
    unsorted(model)
    for name in ("onnx_ir", "onnxscript"):
        assert logging.getLogger(name).hasHandlers()
    prepare_graph(saved(model, tmp_path / "net.onnx"))
    assert capfd.readouterr() == ("", "")


def no_opset(model: onnx.ModelProto) -> None:
    model.ClearField("opset_import")


def opset(number: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = number

    return change


def newer_ir(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def own_domain(model: onnx.ModelProto) -> None:
    own_domain_undeclared(model)
    model.opset_import.append(helper.make_opsetid("my.ops", 1))


def own_domain_undeclared(model: onnx.ModelProto) -> None:
    model.graph.node[1].domain = "my.ops"


def one_name(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = "same"


def calls_itself(model: onnx.ModelProto) -> None:
    function(1)(model)
    inner = model.functions[0]
    inner.node[0].op_type, inner.node[0].domain = "Own", "own"
    inner.opset_import.append(helper.make_opsetid("own", 1))


def sparse(model: onnx.ModelProto) -> None:
    del model.graph.initializer[0]
    values, places = tensor("w1", np.ones(2, np.float32)), tensor("", np.array([0, 5]))
    weight = helper.make_sparse_tensor(values, places, [WIDE, MIDDLE])
    model.graph.sparse_initializer.append(weight)


REFUSED: dict[str, tuple[Change, str]] = {
    "no opset": (no_opset, "says no opset of ONNX's operators"),
    "a negative opset": (opset(-3), "expected 1 or more, got -3"),
    "an opset to come": (opset(999), "Opset 999 is und"),
    "a newer IR version": (newer_ir, "Unsupported model IR version: 99"),
    "a domain without schemas": (own_domain, "my.ops:Relu(-1) is not a registered function/op"),
    "a domain that is not imported": (own_domain_undeclared, 'Relu, "my.ops", -1)'),
    "nodes of one name": (one_name, "two nodes with same node name (same)"),
    "a function of itself": (calls_itself, "Cyclic dependency detected between functions"),
    "a sparse weight": (sparse, "the weight 'w1' is sparse: expected dense ones"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_session_can_run_is_one_line(name: str, tmp_path: Path) -> None:
    change, said = REFUSED[name]
    model = two_layers()
    change(model)
    path = saved(model, tmp_path / "net.onnx")
    npz = samples(tmp_path / "x.npz")
    line = refused("export", path, "--calib", npz, "--quiet", "--out", tmp_path / "o")
    assert str(path) in line and said in line
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("storage", ["qdq", "matmulnbits"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (7, 5), (33, 1), (50, 5)], ids=["1x1", "7x5", "33x1", "50x5"]
)
def test_four_bits_in_odd_sizes(rows: int, columns: int, storage: str, tmp_path: Path) -> None:
    """Groups of 16 along the rows: the last one is shorter, or the only one is."""
    rng = np.random.default_rng(rows)
    weight = rng.normal(size=(rows, columns)).astype(np.float32)
    x = rng.normal(size=(6, rows)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "odd")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", columns])],
        [tensor("w", weight)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21)]
    path = saved(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "n.onnx")
    options = ("--quantize", "w4:group16", "--storage", storage, "--out", tmp_path / "out")

    ran("export", path, "--calib", tmp_path / "x.npz", "--samples", 4, "--eval-samples", 2, "-q",
        *options)  # fmt: skip

    session = open_graph(tmp_path / "out" / "model.onnx")  # it keeps activations in float
    (got,) = session.run(None, {"x": x})
    expected = np.zeros_like(got)
    for start in range(0, rows, 16):
        group = weight[start : start + 16]
        scale = np.abs(group).max(0) / 7
        expected += x[:, start : start + 16] @ (np.round(group / scale) * scale)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.kind(6, "stats")
def test_weights_beyond_what_a_protobuf_holds(tmp_path: Path) -> None:
    """The second weight begins 3 GiB into a file whose hole takes no room on the disk."""
    far, weight = 3 << 30, numpy_helper.to_array(two_layers().graph.initializer[1])
    model = two_layers()
    held = model.graph.initializer[1]
    held.ClearField("raw_data")
    held.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": far, "length": weight.nbytes}.items():
        held.external_data.add(key=key, value=str(value))
    path = saved(model, tmp_path / "net.onnx")
    with (tmp_path / "w.bin").open("wb") as file:
        file.seek(far)
        file.write(weight.tobytes())

    value = load_float_graph(path).graph.initializers["w2"].const_value
    assert value is not None
    np.testing.assert_array_equal(value.numpy(), weight)
    seen = observe_graph(path, [GraphBatch(feeds={"x": ROWS})], tensors=["y"])["y"]
    assert float(seen.minmax.max) == pytest.approx(numpys(ROWS).max(), rel=1e-5)
