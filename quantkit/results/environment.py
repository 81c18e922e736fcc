"""What a number was computed with: versions and processor, read without importing any of it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

PACKAGES: Final = ("quantkit", "torch", "transformers", "onnx", "onnxruntime", "numpy")
EXTENSIONS: Final = (
    "avx2", "avx_vnni", "avx_vnni_int8", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_int8", "amx_bf16",
    "neon", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip
"""Vector extensions that kernels of matrix products look for, as Linux calls them; `asimd` is what
64-bit Arm calls NEON, and `asimddp` and `i8mm` are its int8 products."""
UNKNOWN: Final = "unknown"


def environment() -> dict[str, str]:
    """Returns versions, platform, processor, its extensions and how many of it, as strings."""
    found = {"python": platform.python_version(), "platform": platform.system()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    cpuinfo = _cpuinfo()
    found["processor"] = _processor(cpuinfo)
    found["extensions"] = extensions_of(cpuinfo)
    found["cores"] = str(os.cpu_count() or 1)
    return found


def extensions_of(cpuinfo: str) -> str:
    """Returns which of `EXTENSIONS` the text of /proc/cpuinfo lists, with spaces between.

    `none` where it lists others only, `unknown` where it lists nothing.
    """
    for line in cpuinfo.splitlines():
        key, _, values = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, Arm
            listed = set(values.split())
            return " ".join(name for name in EXTENSIONS if name in listed) or "none"
    return UNKNOWN


def _cpuinfo() -> str:
    """Returns the text of /proc/cpuinfo; empty where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _processor(cpuinfo: str) -> str:
    lines = cpuinfo.splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
