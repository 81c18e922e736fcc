"""What the machine has, seen without importing anything heavy: processor, memory, GPU, cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

CPU_FEATURES: Final = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AMX int8": ("amx_int8",),
    "AMX bf16": ("amx_bf16",),
}
_PROVIDERS: Final = "import json, onnxruntime as o; print(json.dumps(o.get_available_providers()))"


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


def usable_cores() -> int:
    """Returns the cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # no Linux
        return os.cpu_count() or 0


def thread_limits() -> dict[str, str]:
    """Returns the environment's limits of threads, by their names."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> dict[str, int] | None:
    """Returns the `total` and `available` memory, or None where Linux does not say."""
    try:
        text = meminfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    kilobytes = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            kilobytes[key] = int(number[0])
    if not {"MemTotal", "MemAvailable"} <= kilobytes.keys():
        return None
    return {
        "total": kilobytes["MemTotal"] * 1024,
        "available": kilobytes["MemAvailable"] * 1024,
    }


def nvidia_gpus() -> list[str]:
    """Returns one line a GPU as nvidia-smi names it; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    out = _output(query, 10)
    return [line.strip() for line in (out or "").splitlines() if line.strip()]


def onnx_providers() -> list[str] | None:
    """Returns ONNX Runtime's providers, asked in a process of its own; None where it has none."""
    try:
        metadata.version("onnxruntime")
    except metadata.PackageNotFoundError:
        return None
    out = _output([sys.executable, "-c", _PROVIDERS], 60)
    try:
        found: Any = json.loads(out or "null")
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _output(command: list[str], limit_s: float) -> str | None:
    """Returns what a program prints, or None where it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


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


def cache_entries(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of everything that lies in the cache, by name."""
    try:
        found = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return {}
    return {path.name: folder_bytes(path) for path in found}


def folder_bytes(folder: Path) -> int:
    """Returns the size of the files in a folder, or of a file; 0 where there is none."""
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else [folder]:
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total
