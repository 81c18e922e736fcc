"""Kind 5: which axis a scale belongs to, told by figures that no other axis gives.

Each output channel has a magnitude of its own, so that a transposed scale cannot go unseen. The
grid is compared with ONNX's reference evaluator, which is told the axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from quantkit.calibration.weights import WeightPlan, choose_weight_ranges
from quantkit.errors import InputError
from quantkit.numerics.affine import (
    affine_params,
    expand_groups,
    fake_quantize,
    quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import PerAxis, PerGroup, PerTensor
from quantkit.numerics.methods import WEIGHT_METHODS, parse_method
from quantkit.numerics.observers import Bundle
from quantkit.numerics.qtypes import QType
from quantkit.probes import attach
from quantkit.quantization import fake_quantized
from tests.conftest import make_tiny

INT8 = QType(bits=8, narrow=True)


@pytest.fixture(autouse=True)
def one_thread_without_gradients() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def skewed(*shape: int, axis: int) -> Tensor:
    """Numbers whose magnitude doubles along one axis: a wrong one ruins all but the last."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + axis))
    powers = 2.0 ** torch.arange(shape[axis], dtype=torch.float32)
    return x * powers.view([-1 if a == axis else 1 for a in range(len(shape))])


def onnx_round_trip(weight: Tensor, scale: Tensor, axis: int) -> np.ndarray[Any, Any]:
    """QuantizeLinear and DequantizeLinear along an axis, by ONNX's reference evaluator."""
    shape = list(weight.shape)
    zeros = helper.make_tensor("z", TensorProto.INT8, [shape[axis]], [0] * shape[axis])
    steps = helper.make_tensor("s", TensorProto.FLOAT, [shape[axis]], scale.reshape(-1).tolist())
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis),
        ],
        "round trip",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [steps, zeros],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.checker.check_model(model)
    (found,) = ReferenceEvaluator(model).run(None, {"x": weight.numpy()})  # type: ignore[misc]
    return np.asarray(found)


SHAPES = {
    "matrix": ((6, 5), 0),
    "transposed matrix": ((6, 5), 1),
    "convolution": ((6, 3, 3, 2), 0),
    "grouped convolution": ((6, 1, 3, 3), 0),
    "transposed convolution": ((4, 6, 3, 2), 1),
    "one input": ((6, 1), 0),
    "one output": ((1, 6), 0),
    "one element": ((1, 1), 0),
}


@pytest.mark.kind(5, "numerics", "export")
@pytest.mark.parametrize("layout", ["contiguous", "transposed in memory", "every other"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_scale_a_channel_is_that_of_onnx(name: str, layout: str) -> None:
    shape, axis = SHAPES[name]
    weight = skewed(*shape, axis=axis)
    if layout == "transposed in memory":
        weight = weight.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "every other":
        wide = torch.full((*shape[:-1], 2 * shape[-1]), 1e6)
        wide[..., ::2] = weight
        weight = wide[..., ::2]
    absmax = reduce_absmax(weight, PerAxis(axis=axis))
    others = tuple(a for a in range(len(shape)) if a != axis)
    wanted = np.abs(weight.numpy()).max(axis=others, keepdims=True)
    np.testing.assert_array_equal(absmax.numpy(), wanted)
    scale = symmetric_scale(absmax, INT8)
    ours = fake_quantize(weight, scale, 0, INT8)
    np.testing.assert_array_equal(ours.numpy(), onnx_round_trip(weight, scale, axis))
    # half of the channel's own step, which is 2^-5 of the last one's: no other axis is so fine
    error = (ours.double() - weight.double()).abs()
    assert bool((error <= 0.500001 * scale.double()).all())


@pytest.mark.kind(5, "numerics")
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 7])
def test_groups_run_along_their_axis(size: int, axis: int) -> None:
    x = skewed(5, 7, axis=axis % 2)
    groups = PerGroup(axis=axis, group_size=size)
    per_group = reduce_absmax(x, groups)
    wide = expand_groups(per_group, groups, x.shape)
    turned = np.moveaxis(np.abs(x.numpy()), axis, 1)
    wanted = np.empty_like(turned)
    for row in range(turned.shape[0]):
        for start in range(0, turned.shape[1], size):
            wanted[row, start : start + size] = turned[row, start : start + size].max()
    np.testing.assert_array_equal(np.moveaxis(wide.numpy(), axis, 1), wanted)


@pytest.mark.kind(5, "numerics")
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_empty_dimensions(shape: tuple[int, int], axis: int) -> None:
    x = torch.empty(shape)
    absmax = reduce_absmax(x, PerAxis(axis=axis))
    assert absmax.shape == tuple(n if a == axis else 1 for a, n in enumerate(shape))
    assert not absmax.any()
    scale = symmetric_scale(absmax, INT8)
    assert fake_quantize(x, scale, 0, INT8).shape == x.shape
    assert float(symmetric_scale(reduce_absmax(x, PerTensor()), INT8)) == 1.0
    groups = PerGroup(axis=axis, group_size=3)
    per_group = reduce_absmax(x, groups)
    assert expand_groups(per_group, groups, x.shape).shape == x.shape
    bundle = Bundle.empty(shape[0]).update(x, torch.arange(shape[1]))
    assert int(bundle.pool().minmax.count) == 0
    assert bundle.pool().minmax.finish()[0].isnan().all()


@pytest.mark.kind(5, "sweep", "calibrate")
@pytest.mark.parametrize("recipe", ["w4", "w4:group3"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (5, 1)], ids=str)
def test_layers_of_one_channel(sizes: tuple[int, int], recipe: str) -> None:
    inputs, outputs = sizes
    model = nn.Sequential(nn.Linear(inputs, outputs))
    before = model[0].weight.clone()
    with fake_quantized(model, recipe):  # type: ignore[arg-type]
        assert model(torch.randn(2, inputs)).shape == (2, outputs)
        found = model[0].weight.clone()
    assert torch.equal(model[0].weight, before)
    if inputs == 1:  # a channel of one weight is the end of its own range
        torch.testing.assert_close(found, before, rtol=1e-6, atol=0)
    plan = WeightPlan(method=parse_method("minmax"), bits=4, granularity=PerAxis(axis=0))
    ranges, _ = choose_weight_ranges(model, plan)
    assert ranges.scale("0", before.shape, 4).shape == (outputs, 1)


def by_channel(weight: np.ndarray[Any, Any], bits: int, axis: int) -> np.ndarray[Any, Any]:
    """The symmetric narrow grid of each channel, a number at a time."""
    top = 2 ** (bits - 1) - 1
    turned = np.moveaxis(weight, axis, 0)
    out = np.empty_like(turned)
    for channel, row in enumerate(turned):
        scale = np.float32(np.abs(row).max() / np.float32(top))
        steps = np.clip(np.rint(row / scale), -top, top).astype(np.float32)
        out[channel] = steps * scale
    return np.moveaxis(out, 0, axis)


@pytest.mark.kind(5, "sweep", "calibrate")
@pytest.mark.parametrize("calibrated", [False, True], ids=["by recipe", "by calibrated ranges"])
def test_gpt2_has_a_scale_an_output_and_its_head_none(calibrated: bool) -> None:
    """Conv1D keeps `[in, out]`; its head is the embedding, which stays in float."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = GPT2LMHeadModel(config).eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Conv1D)}
    for module in layers.values():
        module.weight.copy_(skewed(*module.weight.shape, axis=1).clamp(-1e4, 1e4) * 1e-3)
    embedding = model.transformer.wte.weight.clone()
    ranges = None
    if calibrated:
        plan = WeightPlan(method=parse_method("minmax"), bits=8, granularity=PerAxis(axis=0))
        ranges, _ = choose_weight_ranges(model, plan)
        assert {n: list(x.shape) for n, x in ranges.absmax.items()} == {
            n: [m.weight.shape[1], 1] for n, m in layers.items()
        }
    with fake_quantized(model, "w8", weight_ranges=ranges) as quantizers:
        found = {n: m.weight.clone() for n, m in layers.items()}
        assert torch.equal(model.transformer.wte.weight, embedding)
        assert model.lm_head.weight is model.transformer.wte.weight
        model(torch.arange(5)[None])
    for name, module in layers.items():
        wanted = by_channel(module.weight.numpy(), 8, axis=1)
        np.testing.assert_array_equal(found[name].numpy(), wanted)
        assert not np.array_equal(wanted, by_channel(module.weight.numpy(), 8, axis=0))
    assert set(quantizers.fired) == {f"weight/{name}" for name in layers}


@pytest.mark.kind(5, "sweep")
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_quantized_neither_once_nor_twice(tied: bool) -> None:
    model = make_tiny(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    head, table = model.lm_head.weight.clone(), model.model.embed_tokens.weight.clone()
    with fake_quantized(model, "w4"):
        assert torch.equal(model.lm_head.weight, head)
        assert torch.equal(model.model.embed_tokens.weight, table)
        model(torch.arange(5)[None])


@pytest.mark.kind(5, "sweep", "calibrate")
@pytest.mark.parametrize("method", WEIGHT_METHODS)
def test_expanded_and_strided_weights(method: str) -> None:
    """Weights that are views: every row the same memory, or columns of something wider."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False))
    row = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    model[0].weight = nn.Parameter(row.expand(4, 6), requires_grad=False)
    model[1].weight = nn.Parameter(skewed(6, 4, axis=1).t(), requires_grad=False)
    assert not model[0].weight.is_contiguous() and not model[1].weight.is_contiguous()
    plain = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False))
    for index in (0, 1):
        plain[index].weight = nn.Parameter(model[index].weight.clone().contiguous())
    plan = WeightPlan(method=parse_method(method), bits=4, granularity=PerAxis(axis=0))
    ours, wanted = (choose_weight_ranges(m, plan)[0].absmax for m in (model, plain))
    assert all(torch.equal(ours[name], wanted[name]) for name in ("0", "1"))
    strides = [module.weight.stride() for module in model]
    with fake_quantized(model, "w4"), fake_quantized(plain, "w4"):  # type: ignore[arg-type]
        assert all(torch.equal(model[n].weight, plain[n].weight) for n in (0, 1))
    assert [module.weight.stride() for module in model] == strides


@pytest.mark.kind(5, "numerics", "calibrate")
def test_strided_and_expanded_activations_are_counted_once_an_element() -> None:
    x = skewed(3, 8, axis=1)
    views = {
        "transposed": x.t().contiguous().t(),
        "expanded": x[:1].expand(5, 8),
        "flipped": x.flip(1),
    }
    for name, view in views.items():
        bundle = Bundle.empty(len(view)).update(view, torch.arange(8))
        assert bundle.minmax.count.tolist() == [8] * len(view), name
        values = view.double().numpy()
        np.testing.assert_allclose(bundle.moments.mean.numpy(), values.mean(1), rtol=1e-12)
        assert bundle.topk.signed[:, 0].tolist() == [
            float(row[np.abs(row).argmax()]) for row in view.numpy()
        ]


@pytest.mark.kind(5, "probes", "sweep")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, groups=2),
        nn.ConvTranspose1d(4, 6, 3),
        nn.Conv2d(4, 4, 1, groups=4),
    ],
    ids=["grouped", "transposed", "depthwise"],
)
def test_convolutions_are_no_linear_layers(layer: nn.Module) -> None:
    """They stay in float, rather than get the scale of a matrix, and the file of ranges agrees."""
    shape = (1, 4, 8, 8) if isinstance(layer, nn.Conv2d) else (1, 4, 8)
    model = nn.Sequential(layer, nn.Linear(layer(torch.ones(shape)).shape[-1], 3))
    before = layer.weight.clone()
    with fake_quantized(model, "w4") as quantizers:  # type: ignore[arg-type]
        assert torch.equal(layer.weight, before)
        model(torch.ones(shape))
    assert set(quantizers.fired) == {"weight/1"}
    with attach(model, {"linear_input": lambda visit: None}) as attachment:
        model(torch.ones(shape))
    assert set(attachment.hits["linear_input"]) == {"1"}


@pytest.mark.kind(5, "numerics")
@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there_is_named(axis: int) -> None:
    for granularity in (PerAxis(axis=axis), PerGroup(axis=axis, group_size=2)):
        with pytest.raises(InputError, match=f"axis of a tensor of rank 2, got axis={axis}"):
            reduce_absmax(torch.ones(3, 4), granularity)


@pytest.mark.kind(5, "numerics", "export")
@pytest.mark.parametrize("axis", [0, 1])
def test_an_asymmetric_scale_and_its_zero_point_keep_their_channel(axis: int) -> None:
    """uint8 along an axis, against ONNX; the offset of each channel is its own as well."""
    qtype = QType(bits=8, signed=False)
    x = skewed(5, 6, axis=axis) + 3.0 * torch.arange(5)[:, None]
    other = 1 - axis
    scale, zero_point = affine_params(x.amin(other, True), x.amax(other, True), qtype)
    size = x.shape[axis]
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis),
        ],
        "round trip",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 6])],
        [
            helper.make_tensor_value_info("q", TensorProto.UINT8, [5, 6]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 6]),
        ],
        [
            helper.make_tensor("s", TensorProto.FLOAT, [size], scale.flatten().tolist()),
            helper.make_tensor("z", TensorProto.UINT8, [size], zero_point.flatten().tolist()),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    q, y = ReferenceEvaluator(model).run(None, {"x": x.numpy()})  # type: ignore[misc]
    np.testing.assert_array_equal(quantize(x, scale, zero_point, qtype).numpy(), q)
    np.testing.assert_array_equal(fake_quantize(x, scale, zero_point, qtype).numpy(), y)
