"""The grid against ONNX Runtime and ONNX's reference evaluator, bit for bit."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper
from onnx.reference import ReferenceEvaluator

from quantkit.numerics.affine import affine_params, dequantize, fake_quantize, quantize
from quantkit.numerics.qtypes import QType

KINDS = {
    "int4": T.INT4,
    "uint4": T.UINT4,
    "int8": T.INT8,
    "uint8": T.UINT8,
    "int16": T.INT16,
    "uint16": T.UINT16,
}


def build(kind: int, scale: list[float], zero_point: list[int], axis: int | None) -> bytes:
    """QuantizeLinear -> DequantizeLinear at opset 21; gives q as int32, and the values."""
    shape = [] if axis is None else [len(scale)]
    attributes = {} if axis is None else {"axis": axis}
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
            helper.make_node("Cast", ["q"], ["qi"], to=T.INT32),
        ],
        "grid",
        [helper.make_tensor_value_info("x", T.FLOAT, ["a", "b"])],
        [
            helper.make_tensor_value_info("qi", T.INT32, ["a", "b"]),
            helper.make_tensor_value_info("y", T.FLOAT, ["a", "b"]),
        ],
        [
            helper.make_tensor("s", T.FLOAT, shape, scale),
            helper.make_tensor("z", kind, shape, zero_point),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def in_runtime(model: bytes, x: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def in_reference(model: bytes, x: np.ndarray) -> list[np.ndarray]:
    return list(ReferenceEvaluator(onnx.load_from_string(model)).run(None, {"x": x}))


def values(scale: float, qtype: QType, zero_point: int) -> np.ndarray:
    """Every tie of the type and its neighbours, beyond both ends, and random numbers."""
    near = np.arange(qtype.qmin - zero_point - 3, qtype.qmax - zero_point + 4, dtype=np.float64)
    near = near[:: max(1, len(near) // 4000)]
    ties = np.concatenate([near, near + 0.5]).astype(np.float32) * np.float32(scale)
    up, down = np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))
    noise = np.random.default_rng(1).standard_normal(2000).astype(np.float32)
    spread = noise * np.float32(scale * qtype.levels / 3)
    special = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, scale, -scale], np.float32)
    x = np.concatenate([ties, up, down, spread, special]).astype(np.float32)
    return x[: len(x) // 3 * 3].reshape(3, -1)


def agree(name: str, x: np.ndarray, got: list[np.ndarray], scale: object, zp: object) -> None:
    qtype, t = QType.parse(name), torch.from_numpy(x)
    s = torch.tensor(scale, dtype=torch.float32)
    z = torch.tensor(zp, dtype=torch.int32)
    q = quantize(t, s, z, qtype)
    assert np.array_equal(q.numpy(), got[0])
    for mine in (dequantize(q, s, z), fake_quantize(t, s, z, qtype)):
        assert np.array_equal(mine.numpy().view(np.int32), got[1].view(np.int32))


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 1.0], ids=lambda w: f"zero point at {w}")
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0123, 3.7e-5, 1.7e4])
@pytest.mark.parametrize("name", KINDS)
def test_both_witnesses_agree_per_tensor(name: str, scale: float, where: float) -> None:
    qtype = QType.parse(name)
    zp = round(qtype.qmin + where * (qtype.qmax - qtype.qmin))
    scale = float(np.float32(scale))
    model = build(KINDS[name], [scale], [zp], None)
    x = values(scale, qtype, zp)
    agree(name, x, in_runtime(model, x), scale, zp)
    agree(name, x, in_reference(model, x), scale, zp)


@pytest.mark.kind(5, "numerics")
@pytest.mark.parametrize("name", KINDS)
def test_both_witnesses_agree_per_axis(name: str) -> None:
    qtype = QType.parse(name)
    scale = [float(np.float32(s)) for s in (0.1, 0.37, 2.0)]
    zp = [qtype.qmin, 0, qtype.qmax]
    model = build(KINDS[name], scale, zp, 0)
    x = values(0.1, qtype, 0)
    column = [[s] for s in scale], [[z] for z in zp]
    agree(name, x, in_runtime(model, x), *column)
    agree(name, x, in_reference(model, x), *column)


@pytest.mark.parametrize("name", KINDS)
def test_the_runtime_agrees_where_the_reference_wraps(name: str) -> None:
    # The reference casts to int32 before it saturates, so it is no witness beyond 2^31 steps.
    qtype = QType.parse(name)
    zp = (qtype.qmin + qtype.qmax) // 2
    big = [np.inf, -np.inf, 3e38, -3e38, 3e9, -3e9, 2.0**31, -(2.0**31), 1e20, 0.0, -0.0, 5e-1]
    x = np.array([big] * 3, np.float32)
    for scale in (1.0, float(np.finfo(np.float32).tiny)):
        agree(name, x, in_runtime(build(KINDS[name], [scale], [zp], None), x), scale, zp)


def test_affine_params_are_those_of_dynamic_quantize_linear() -> None:
    graph = helper.make_graph(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])],
        "dynamic",
        [helper.make_tensor_value_info("x", T.FLOAT, ["n"])],
        [
            helper.make_tensor_value_info("q", T.UINT8, ["n"]),
            helper.make_tensor_value_info("s", T.FLOAT, []),
            helper.make_tensor_value_info("z", T.UINT8, []),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(2)
    qtype = QType(bits=8, signed=False)
    for case in range(200):
        x = (
            rng.standard_normal(64) * 10.0 ** rng.integers(-6, 6) + rng.normal() * (case % 3)
        ).astype(np.float32)
        q, s, z = session.run(None, {"x": x})
        t = torch.from_numpy(x)
        scale, zp = affine_params(t.amin(), t.amax(), qtype)
        assert (float(scale), int(zp)) == (float(s), int(z))
        assert np.array_equal(quantize(t, scale, zp, qtype).numpy(), q)
