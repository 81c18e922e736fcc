"""Help and reports come at once: what needs no tensor loads no tensor library."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "optimum", "accelerate")
LIGHT = (
    "quantkit",
    "quantkit.cli",
    "quantkit.api",
    "quantkit.reporting",
    "quantkit.results",
    "quantkit.jobs",
    "quantkit.recipe",
    "quantkit.numerics.qtypes",
    "quantkit.numerics.granularity",
    "quantkit.numerics.methods",
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_no_heavy_package(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"

    done = python("-c", code)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_help_loads_no_heavy_package() -> None:
    done = python("-X", "importtime", "-m", "quantkit", "--help")

    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "quantkit" in loaded
    assert loaded.isdisjoint(HEAVY)
