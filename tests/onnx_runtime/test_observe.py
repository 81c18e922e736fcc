"""`observe_graph` against numpy over what ONNX's reference evaluator computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quantkit.errors import InputError
from quantkit.numerics.observers import Bundle
from quantkit.onnx_runtime import GraphBatch, observe, observe_graph
from tests.onnx_runtime.graphs import (
    Arrays,
    branching,
    convolutions,
    evaluated,
    mlp,
    model,
    saved,
    whole,
)

CASES = {
    "MatMul and Gemm": (mlp, {"x": (2, 5, 4)}, ["x", "b", "flat"]),
    "Conv": (convolutions, {"image": (3, 2, 5, 5)}, ["image", "b"]),
    "If": (branching, {"x": (4, 4)}, ["a"]),
}


def arrays(shapes: dict[str, tuple[int, ...]], batches: int) -> list[Arrays]:
    return [
        {name: whole(shape, 10 * index + 7) for name, shape in shapes.items()}
        for index in range(batches)
    ]


def fed(batches: Sequence[Arrays]) -> list[GraphBatch]:
    return [GraphBatch(feeds=each) for each in batches]


def cells(values: NDArray[Any]) -> dict[int, int]:
    """Counts by the upper 16 bits of a float32: sign, exponent, 7 bits of mantissa; no zeros."""
    bits = values[values != 0].astype(np.float32).view(np.uint32) >> 16
    found, counts = np.unique(bits, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def cells_of(bundle: Bundle) -> dict[int, int]:
    histogram = bundle.histogram
    found = {}
    for sign, octave, mantissa in histogram.counts[0].nonzero().tolist():
        code = (sign << 15) + ((histogram.first_octave + octave) << 7) + mantissa
        found[code] = int(histogram.counts[0, sign, octave, mantissa])
    return found


def assert_saw(bundle: Bundle, values: NDArray[Any]) -> None:
    """Every count and extreme of the bundle is that of these finite values."""
    values = values.reshape(-1).astype(np.float32)
    assert int(bundle.minmax.count) == values.size
    assert float(bundle.minmax.min) == values.min()
    assert float(bundle.minmax.max) == values.max()
    assert int(bundle.histogram.zeros) == int((values == 0).sum())
    assert cells_of(bundle) == cells(values)
    mean = values.astype(np.float64).mean()
    np.testing.assert_allclose(float(bundle.moments.mean), mean, rtol=1e-7, atol=1e-12)
    expected = np.sort(np.abs(values))[::-1][: bundle.topk.values.shape[1]]
    found = bundle.topk.values[0][: len(expected)]
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("external", [False, True], ids=["weights inside", "external data"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_default_tensors_are_what_numpy_counts(tmp_path: Path, case: Any, external: bool) -> None:
    make, shapes, expected = case
    batches = arrays(shapes, 3)
    path = saved(make(), tmp_path / "model", external=external)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}

    seen = observe_graph(path, fed(batches))

    assert list(seen) == expected
    reference = evaluated(make(), [n for n in expected if n not in shapes], batches)
    for name in shapes:
        reference[name] = [batch[name] for batch in batches]
    for name, bundle in seen.items():
        assert_saw(bundle, np.concatenate([part.reshape(-1) for part in reference[name]]))
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_batches_and_their_cut_do_not_matter(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    x = whole((6, 5, 4), 3)

    one = observe_graph(path, fed([{"x": x}]))
    many = observe_graph(path, fed([{"x": x[start : start + 2]} for start in (0, 2, 4)]))

    for name, bundle in one.items():
        other = many[name]
        for part in ("minmax", "topk", "histogram"):
            its, theirs = bundle.state()[part], other.state()[part]
            assert all(torch.equal(its[field], theirs[field]) for field in its), (name, part)


@pytest.mark.parametrize("limit", [1, 500, 10**9])
def test_several_sessions_see_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    path, batches = saved(mlp(), tmp_path), fed(arrays({"x": (2, 5, 4)}, 2))
    expected = observe_graph(path, batches, tensors=["*"])
    held: list[list[int]] = []
    plain = ort.InferenceSession.run

    def run(self: Any, names: Any, feeds: Any, *rest: Any) -> Any:
        values = plain(self, names, feeds, *rest)
        held.append([value.nbytes for value in values])
        return values

    monkeypatch.setattr(ort.InferenceSession, "run", run)

    seen = observe_graph(path, batches, tensors=["*"], bytes_at_once=limit)

    assert list(seen) == list(expected)
    for name, bundle in seen.items():
        assert torch.equal(bundle.histogram.counts, expected[name].histogram.counts)
        assert torch.equal(bundle.topk.signed, expected[name].topk.signed)
        assert int(bundle.minmax.count) == int(expected[name].minmax.count)
    of_shapes, *of_tensors = held
    assert sum(of_shapes) < 24 * len(expected) + 1  # at most three int64 a tensor
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in of_tensors)
    sessions = {1: len(expected), 10**9: 1}
    if limit in sessions:
        assert len(of_tensors) == 2 * sessions[limit]


def test_outputs_are_dropped_before_the_next_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(mlp(), tmp_path)
    outputs: list[weakref.ref[Any]] = []
    alive_at: list[int] = []
    plain_run, plain_count = ort.InferenceSession.run, observe._seen_of

    def alive() -> int:
        return sum(output() is not None for output in outputs)

    def run(self: Any, names: Any, feeds: Any, *rest: Any) -> Any:
        values = plain_run(self, names, feeds, *rest)
        outputs.extend(weakref.ref(value) for value in values)
        return values

    def count(*arguments: Any) -> Any:
        alive_at.append(alive())
        return plain_count(*arguments)

    def batches(count: int) -> Iterator[GraphBatch]:
        for batch in fed(arrays({"x": (2, 5, 4)}, count)):
            assert alive() == 0
            yield batch

    monkeypatch.setattr(ort.InferenceSession, "run", run)
    monkeypatch.setattr(observe, "_seen_of", count)
    names = ["a", "b", "c", "e"]
    kept = {}
    for number in (4, 16):
        alive_at.clear()
        seen = observe_graph(path, batches(number), tensors=names)
        kept[number] = sum(
            tensor.numel()
            for bundle in seen.values()
            for part in bundle.state().values()
            for tensor in part.values()
        )
        assert alive_at == [4, 3, 2, 1] * number

    assert len(outputs) == (4 + 16) * len(names)
    octaves = 24 * 2 * 128 * len(names)  # whole numbers below 2^24: no state can be larger
    assert kept[16] <= kept[4] + octaves


def test_padding_is_left_out_of_what_has_tokens(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    real = np.array([[True] * 5, [True] * 3 + [False] * 2])
    x = whole((2, 5, 4), 1)
    x[~real] = 1000.0  # padding holds anything

    seen = observe_graph(path, [GraphBatch(feeds={"x": x}, real=real)], tensors=["x", "b", "flat"])

    reference = evaluated(mlp(), ["b", "c"], [{"x": x}])
    assert_saw(seen["x"], x[real])
    assert_saw(seen["b"], reference["b"][0][real])
    assert_saw(seen["flat"], reference["c"][0][real])
    assert int(seen["x"].minmax.count) == 8 * 4


def test_a_batch_of_padding_alone_gives_no_element(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    batch = GraphBatch(feeds={"x": whole((1, 3, 4), 1)}, real=np.zeros((1, 3), bool))

    seen = observe_graph(path, [batch])

    assert all(int(bundle.minmax.count) == 0 for bundle in seen.values())
    assert all(bool(bundle.minmax.finish()[0].isnan()) for bundle in seen.values())


def test_nan_and_inf_are_counted(tmp_path: Path) -> None:
    x = whole((2, 5, 4), 1)
    x[0, 0, 0], x[1, 2, 3], x[1, 2, 2] = np.nan, np.inf, -np.inf
    finite = x[np.isfinite(x)]

    seen = observe_graph(saved(mlp(), tmp_path), fed([{"x": x}]), tensors=["x"])["x"].minmax

    assert (int(seen.count), int(seen.nan_count), int(seen.inf_count)) == (40, 1, 2)
    assert (float(seen.min), float(seen.max)) == (finite.min(), finite.max())


def test_float16_is_exact(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])],
        {"x": ["batch", 300]},
        {"y": ["batch", 300]},
        {},
        TensorProto.FLOAT16,
    )
    x = np.random.default_rng(0).normal(size=(7, 300)).astype(np.float16)

    seen = observe_graph(saved(made, tmp_path), fed([{"x": x}]), tensors=["a", "x"])

    assert list(seen) == ["x", "a"]
    assert_saw(seen["x"], x)
    assert_saw(seen["a"], np.maximum(x, 0))


def test_an_unneeded_output_is_not_computed(tmp_path: Path) -> None:
    """A graph whose last node would fail at run time: only what is asked for is run."""
    made = model(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Reshape", ["a", "wrong"], ["y"]),
        ],
        {"x": ["batch", 4]},
        {"y": [7, 7]},
        {"w": whole((4, 3), 1), "wrong": np.array([7, 7])},
    )
    path, batches = saved(made, tmp_path), fed(arrays({"x": (2, 4)}, 1))

    assert int(observe_graph(path, batches)["x"].minmax.count) == 8
    with pytest.raises(InputError, match=r"ONNX Runtime cannot run a batch: .*x \[2, 4\]"):
        observe_graph(path, batches, tensors=["y"])


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "no input": ([GraphBatch(feeds={})], r"lacks input 'x': expected x, got nothing\.$"),
    "unknown input": (
        [GraphBatch(feeds={"x": whole((1, 2, 4), 1), "mask": whole((1, 2), 1)})],
        r"no input 'mask'\. Available: x\.$",
    ),
    "wrong width": (
        [GraphBatch(feeds={"x": whole((1, 2, 3), 1)})],
        r"cannot run a batch: .*\(given x \[1, 2, 3\]\)$",
    ),
    "wrong type": (
        [GraphBatch(feeds={"x": np.zeros((1, 2, 4), np.int64)})],
        r"cannot run a batch: .*int64",
    ),
    "a mask of numbers": (
        [GraphBatch(feeds={"x": whole((1, 2, 4), 1)}, real=np.ones((1, 2), np.int64))],  # type: ignore[arg-type]
        r"real as bool \[batch, sequence\], got int64 \[1, 2\]\.$",
    ),
    "a mask of another batch": (
        [GraphBatch(feeds={"x": whole((1, 2, 4), 1)}, real=np.ones((3, 2), bool))],
        r"batch of 3, which no input has\.$",
    ),
    "nothing": ([], r"no batch to observe"),
}


@pytest.mark.parametrize("case", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_bad_batch_is_one_line(tmp_path: Path, case: tuple[Any, str]) -> None:
    batches, said = case

    with pytest.raises(InputError, match=said) as error:
        observe_graph(saved(mlp(), tmp_path), batches)

    assert "\n" not in str(error.value)


def test_an_iterator_cannot_be_gone_through_twice(tmp_path: Path) -> None:
    path, batches = saved(mlp(), tmp_path), fed(arrays({"x": (2, 5, 4)}, 2))

    with pytest.raises(InputError, match="more than once"):
        observe_graph(path, iter(batches), bytes_at_once=100)

    assert int(observe_graph(path, iter(batches))["x"].minmax.count) == 80


@pytest.mark.kind(8, "calibrate")
@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no ONNX file"), (b"not a graph", "cannot be read"), (b"", "no ONNX graph")],
    ids=["absent", "text", "empty"],
)
def test_a_file_that_is_no_graph(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InputError, match=said) as error:
        observe_graph(path, [])

    assert "\n" not in str(error.value)


@pytest.mark.kind(8, "calibrate")
def test_lost_weights_are_named(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path, external=True)
    (tmp_path / "model.onnx.data").unlink()

    with pytest.raises(InputError, match=r"model\.onnx.*no such file beside the graph") as error:
        observe_graph(path, fed(arrays({"x": (1, 2, 4)}, 1)))

    assert "\n" not in str(error.value)


def test_progress_and_the_file_by_itself(tmp_path: Path) -> None:
    """ONNX Runtime runs the untouched file to the same numbers that were observed."""
    path, batches = saved(mlp(), tmp_path), arrays({"x": (2, 5, 4)}, 2)
    steps: list[tuple[int, int]] = []

    seen = observe_graph(
        path,
        fed(batches),
        tensors=["y"],
        progress=lambda _, done, total: steps.append((done, total)),
    )

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert_saw(seen["y"], np.stack([session.run(["y"], dict(each))[0] for each in batches]))
    assert steps == [(0, 2), (1, 2), (2, 2)]
    onnx.checker.check_model(onnx.load(path))
