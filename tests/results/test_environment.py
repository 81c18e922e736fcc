"""What a number was computed with: the vector extensions, from texts of real processors."""

from __future__ import annotations

import pytest

from quantkit.results.environment import environment, extensions_of

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse2 fma avx avx2 avx512f avx512dq avx_vnni avx512_vnni amx_bf16 amx_tile amx_int8
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes crc32 asimddp sve i8mm bf16
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (XEON, "avx2 avx_vnni avx512f avx512_vnni amx_int8 amx_bf16"),
        (GRAVITON, "asimd asimddp i8mm bf16 sve"),
        ("flags\t\t: fpu sse2 avx\n", "none"),
        ("flags\t\t: xavx2 avx512_vnnix\n", "none"),
        ("model name\t: avx2\n", "unknown"),
        ("", "unknown"),
    ],
    ids=["x86", "arm", "none of them", "whole words only", "no line of flags", "no file"],
)
def test_extensions_are_those_of_the_first_processor(text: str, expected: str) -> None:
    assert extensions_of(text) == expected


def test_an_environment_names_processor_and_extensions() -> None:
    found = environment()
    assert all(isinstance(value, str) and value for value in found.values())
    assert {"python", "platform", "onnxruntime", "processor", "extensions", "cores"} <= set(found)
