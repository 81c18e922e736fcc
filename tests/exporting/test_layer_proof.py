"""Faults planted into graphs that quantkit wrote: each is found, and at the layer where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import GateError
from quantkit.exporting.any_graph import graph_layers, quantize_layers
from quantkit.exporting.graphs import save_graph
from quantkit.exporting.grid_proof import GridProof
from quantkit.exporting.layer_proof import prove_layers
from quantkit.exporting.prepare import prepare_graph
from quantkit.jobs import ExportFormat
from quantkit.results import Range

Plant = Callable[[onnx.ModelProto], None]
LIMIT = 1 << 20
RECIPES = ["w8a8", "w8a8-dynamic", "w8", "w8a16", "w16a16", "w4:group16", "w8a16-block", "a8"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """The float graph, prepared, and the quantized one, in which something may be changed."""

    float_path: Path
    path: Path
    form: ExportFormat
    ranges: dict[str, Range]
    quantizers: list[str]

    def planted(self, plant: Plant) -> None:
        model = onnx.load(self.path)
        plant(model)
        onnx.save(model, self.path)

    def proofs(self, limit: int = LIMIT) -> dict[str, GridProof]:
        found = prove_layers(
            self.float_path,
            self.path,
            graph_layers(prepare_graph(self.float_path), self.form.recipe),
            self.form.recipe,
            ranges=self.ranges,
            quantizers=self.quantizers,
            feeds={"image": noise(2, 3, 8, 8, seed=5)},
            bytes_at_once=limit,
        )
        return {proof.what: proof for proof in found}

    def failed(self) -> list[str]:
        return [name for proof in self.proofs().values() for name in proof.failed]


def case_of(folder: Path, word: str, keep: tuple[str, ...] = ()) -> Case:
    """A convolution, a Gemm with all its options and a square MatMul."""
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c"], name="stem", strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node(
            "Gemm", ["f", "w2", "b2"], ["g"], name="up", transB=1, alpha=0.5, beta=2.0
        ),
        helper.make_node("Tanh", ["g"], ["t"]),
        helper.make_node("MatMul", ["t", "w3"], ["y"], name="down"),
    ]
    constants = {
        "w1": noise(4, 3, 3, 3),
        "b1": noise(4),
        "w2": noise(24, 36),
        "b2": noise(24),
        "w3": noise(24, 24),
    }
    if word == "w8a16-block":  # MatMulNBits has no factor
        nodes[3] = helper.make_node("Gemm", ["f", "w2", "b2"], ["g"], name="up", transB=1)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ("batch", 3, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, folder / "float.onnx")
    form = ExportFormat.parse(word)
    model = prepare_graph(folder / "float.onnx")
    float_path = save_graph(model, folder / "prepared")
    layers = graph_layers(model, form.recipe)
    ends = {"image": (-2.5, 2.5), "r": (0.0, 8.0), "f": (0.0, 8.0), "t": (-1.0, 1.0)}
    ranges = {
        name: Range(
            lo=ends[tensor][0], hi=ends[tensor][1], method="minmax", granularity="tensor",
            count=1, point="linear_input",
        )
        for name, tensor in layers.observed.items()
    }  # fmt: skip
    infos = quantize_layers(
        model, layers, form.recipe, ranges=ranges, keep=keep, storage=form.storage
    )
    return Case(
        float_path=float_path,
        path=save_graph(model, folder / "out"),
        form=form,
        ranges=ranges,
        quantizers=[info.name for info in infos],
    )


def change(name: str, at: int | tuple[int, ...] | None, to: Callable[[float], float]) -> Plant:
    """Changes one number of an initializer; all of them where `at` is None."""

    def plant(model: onnx.ModelProto) -> None:
        tensor = next(x for x in model.graph.initializer if x.name == name)
        array = np.array(numpy_helper.to_array(tensor))
        place = ... if at is None else at
        array[place] = to(array[place])
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return plant


def attribute(node: str, name: str, value: float) -> Plant:
    def plant(model: onnx.ModelProto) -> None:
        found = next(x for x in model.graph.node if x.name == node)
        kept = [a for a in found.attribute if a.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, helper.make_attribute(name, value)])

    return plant


def reads(node: str, place: int, tensor: str) -> Plant:
    def plant(model: onnx.ModelProto) -> None:
        next(x for x in model.graph.node if x.name == node).input[place] = tensor

    return plant


def coarser(x: float) -> float:
    return x * 1.02


def higher(x: float) -> float:
    return x + 1


@pytest.mark.parametrize("word", RECIPES)
def test_what_quantkit_writes_is_proven(tmp_path: Path, word: str) -> None:
    case = case_of(tmp_path, word)
    proofs = case.proofs()
    assert all(proof.passed for proof in proofs.values()), [x.said for x in proofs.values()]
    recipe = case.form.recipe
    kinds = {"products"} | ({"weights"} if recipe.weights else set())
    assert set(proofs) == kinds | ({"inputs"} if recipe.activations else set())
    assert {"product/up", "product/down"} <= set(proofs["products"].off)
    assert set(case.quantizers) <= {name for proof in proofs.values() for name in proof.off}
    for proof in proofs.values():
        assert proof.sums.cosine == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("word", "plant", "named"),
    [
        ("w8a8", change("down.weight_scale", 3, coarser), "weight/down"),
        ("w8a8", change("down.weight_quantized", (2, 3), higher), "weight/down"),
        ("w8a8", change("up.weight_zero_point", 3, higher), "weight/up"),
        ("w8a8", attribute("weight/down/dequantize", "axis", 0), "weight/down"),
        ("w8a8", change("linear_input/down/scale", None, coarser), "linear_input/down"),
        ("w8a8", change("linear_input/down/zero_point", None, higher), "linear_input/down"),
        ("w8a8", change("linear_input/stem/scale", None, coarser), "linear_input/stem"),
        ("w8a8", change("stem.weight_scale", 1, coarser), "weight/stem"),
        ("w8a8", change("stem.bias_quantized", 1, lambda x: x + 2), "bias/stem"),
        (
            "w8a8",
            change("linear_input/stem/result/zero_point", None, higher),
            "linear_input/stem/result",
        ),
        ("w8a8", change("up/scaled_bias", 2, coarser), "product/up"),
        ("w8a8", attribute("up/product", "alpha", 0.6), "product/up"),
        ("w8a8-dynamic", change("linear_input/down/axes", 0, lambda _: 0), "linear_input/down"),
        ("w8a8-dynamic", change("linear_input/up/scale", None, coarser), "linear_input/up"),
        (
            "w8a8-dynamic",
            reads("linear_input/up/rescale", 1, "linear_input/up/least"),
            "product/up",
        ),
        ("w8", change("down.weight_scale", 3, coarser), "weight/down"),
        ("w8a16", change("linear_input/down/scale", None, coarser), "linear_input/down"),
        ("w4:group16", change("down.weight_scale", (1, 3), coarser), "weight/down"),
        ("w8a16-block", change("down.weight_scale", (3, 0), coarser), "weight/down"),
        ("w8a16-block", change("up.weight_quantized", (3, 1, 2), higher), "weight/up"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_planted_fault_is_named(tmp_path: Path, word: str, plant: Plant, named: str) -> None:
    case = case_of(tmp_path, word)
    assert case.failed() == []
    case.planted(plant)
    failed = case.failed()
    assert named in failed
    # a wrong layer gives the others other inputs, and they do with those what they should
    assert {name.split("/")[1] for name in failed} == {named.split("/")[1]}


def test_groups_of_layers_give_the_same_figures(tmp_path: Path) -> None:
    case = case_of(tmp_path, "w8a8")
    once, one_by_one = case.proofs(), case.proofs(limit=1)
    for what, proof in once.items():
        assert one_by_one[what].off == pytest.approx(proof.off)


def test_halves_of_layers_are_proven(tmp_path: Path) -> None:
    case = case_of(tmp_path, "w8a8", keep=("weight/up", "linear_input/down", "weight/stem"))
    proofs = case.proofs()
    assert set(proofs["weights"].off) == {"weight/down"}
    assert set(proofs["inputs"].off) == {"linear_input/up"}
    assert set(proofs["products"].off) == {"product/up", "product/down"}
    assert all(proof.passed for proof in proofs.values())


def test_a_quantizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    case = case_of(tmp_path, "w8a8")
    case.quantizers.append("weight/elsewhere")
    with pytest.raises(GateError, match="'weight/elsewhere' is not in the graph"):
        case.proofs()


def test_nothing_proven_is_no_pass() -> None:
    proof = GridProof(what="weights", unit="steps", most=1.0)
    assert not proof.passed
    proof.add("weight/a", noise(2, 2), noise(2, 2), float("nan"))
    assert not proof.passed
    assert proof.said == "1 of 1 weights are off: weight/a by inf steps"
