"""What a number was computed with: versions and processor, read without importing any of it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

PACKAGES: Final = ("quantkit", "torch", "transformers", "onnx", "onnxruntime", "numpy")


def environment() -> dict[str, str]:
    """Returns versions, platform, processor and number of processors, as strings."""
    found = {"python": platform.python_version(), "platform": platform.system()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["processor"] = _processor()
    found["cores"] = str(os.cpu_count() or 1)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
