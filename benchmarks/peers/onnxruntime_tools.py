"""ONNX Runtime's own quantization tools, with the options that their documentation recommends.

`dynamic*`: int8 weights, activations at run time, every operator that the tool takes. `static`:
Q/DQ, min-max, per channel, all MatMul and Gemm. `nbits*`: MatMulNBits in groups of 32, symmetric,
int8 arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import onnx
from calibration import Order, run_maker
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

BLOCK = 32
INT8_ARITHMETIC = 4
"""MatMulNBits' `accuracy_level`: inputs are quantized to 8 bits, which is its fastest on a CPU."""


class Prompts(CalibrationDataReader):
    """Hands out one prompt at a time."""

    def __init__(self, order: Order) -> None:
        self._rest: Iterator[dict[str, NDArray[Any]]] = iter(order.feeds())

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._rest, None)


def dynamic(order: Order, *, per_channel: bool) -> None:
    quantize_dynamic(
        str(order.float_path),
        str(order.path),
        per_channel=per_channel,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
    )


def static(order: Order) -> None:
    quantize_static(
        str(order.float_path),
        str(order.path),
        Prompts(order),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        use_external_data_format=True,
    )


def nbits(order: Order, *, bits: int) -> None:
    tool = MatMulNBitsQuantizer(
        onnx.load(str(order.float_path)),
        bits=bits,
        block_size=BLOCK,
        is_symmetric=True,
        accuracy_level=INT8_ARITHMETIC,
    )
    tool.process()
    tool.model.save_model_to_file(str(order.path), use_external_data_format=True)


if __name__ == "__main__":
    run_maker(
        {
            "dynamic": partial(dynamic, per_channel=False),
            "dynamic-channel": partial(dynamic, per_channel=True),
            "static": static,
            "nbits8": partial(nbits, bits=8),
            "nbits4": partial(nbits, bits=4),
        },
        "onnx",
        "onnxruntime",
    )
