"""Which tensor of a decoder graph is what, with a cache of any type, on a graph made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from quantkit.errors import InputError
from quantkit.onnx_runtime import open_decoder

TYPES = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.INT8: np.int8,
    TensorProto.UINT8: np.uint8,
}


def counting(folder: Path, dtype: int, shape: tuple[Any, ...] = ("b", 2, "p", 3)) -> Path:
    """A decoder whose cache keeps the token's number and whose logits are the cache's sum."""
    info = helper.make_tensor_value_info
    constants = [
        helper.make_tensor("axes", TensorProto.INT64, [2], [1, 3]),
        helper.make_tensor("wide", TensorProto.INT64, [4], [1, 2, 1, 3]),
        helper.make_tensor("sum", TensorProto.INT64, [2], [1, 3]),
        helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
        helper.make_tensor("last", TensorProto.INT64, [1], [2]),
        helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
    ]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["small"], to=dtype),
        helper.make_node("Unsqueeze", ["small", "axes"], ["rows"]),
        helper.make_node("Expand", ["rows", "wide"], ["new"]),
        helper.make_node("Concat", ["past", "new"], ["present"], axis=2),
        helper.make_node("Cast", ["present"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["real", "sum"], ["each"], keepdims=0),
        helper.make_node("ReduceSum", ["each", "axis"], ["all"], keepdims=1),
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["ids", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "all"], ["flat"]),
        helper.make_node("Unsqueeze", ["flat", "last"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "counting",
        [info("input_ids", TensorProto.INT64, ["b", "s"]), info("past", dtype, shape)],
        [
            info("logits", TensorProto.FLOAT, ["b", "s", 1]),
            info("present", dtype, ["b", 2, "t", 3]),
        ],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("dtype", TYPES, ids=[kind.__name__ for kind in TYPES.values()])
def test_a_cache_of_any_type_may_be_empty_and_is_handed_back(dtype: int, tmp_path: Path) -> None:
    decoder = open_decoder(counting(tmp_path, dtype))
    (entry,) = decoder.layout.past
    assert (entry.name, entry.heads, entry.width, entry.dtype) == ("past", 2, 3, TYPES[dtype])
    first = decoder.run(np.array([[1, 2], [3, 4]]))
    assert first.present[0].dtype == TYPES[dtype] and first.present[0].shape == (2, 2, 2, 3)
    assert first.logits[:, 0, 0].tolist() == [18, 42]  # 6 entries a token
    second = decoder.run(np.array([[5], [6]]), past=first.present)
    assert second.present[0].shape == (2, 2, 3, 3)
    assert second.present[0][:, 0, :, 0].tolist() == [[1, 2, 5], [3, 4, 6]]
    assert second.logits[:, 0, 0].tolist() == [48, 78]


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (TensorProto.INT32, ("b", 2, "p", 3), r"'past' tensor\(int32\) is neither tokens"),
        (TensorProto.INT8, ("b", "h", "p", 3), "'past' has no fixed heads and width"),
    ],
    ids=["another type", "heads that vary"],
)
def test_what_is_no_cache_is_refused(
    dtype: int, shape: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        open_decoder(counting(tmp_path, dtype, shape))


def test_a_cache_of_another_length_or_a_mask_that_it_lacks_is_refused(tmp_path: Path) -> None:
    decoder = open_decoder(counting(tmp_path, TensorProto.INT8))
    ids = np.array([[1, 2]])
    past = decoder.run(ids).present
    with pytest.raises(InputError, match="expected a cache of 1 tensors, got 2"):
        decoder.run(ids, past=[*past, *past])
    with pytest.raises(InputError, match=r"expected a mask \[1, 2 \+ 2\], got \[1, 2\]"):
        decoder.run(ids, np.ones((1, 2), np.int64), past)
    with pytest.raises(InputError, match="no attention mask, so it cannot take padding"):
        decoder.run(ids, np.array([[1, 0]]))
