"""Makes the graphs of other tools, each in a process of its own, unless they are there already."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from quantkit.exporting import MODEL_FILE
from quantkit.models import sha256_of
from quantkit.results import FileInfo
from quantkit.results.io import read_plain, write_json

MAKERS = Path(__file__).parent
MADE_FILE, STDERR_FILE = "made.json", "stderr.txt"
NNCF = "nncf==3.4.0"
ONNXRUNTIME, TRANSFORMERS = "onnxruntime_tools.py", "transformers_exporter.py"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A graph that another tool makes; `calibrates` where it is given text."""

    label: str
    script: str
    method: str
    calibrates: bool = False


PEERS = {
    "ort-dynamic": Peer(label="onnxruntime dynamic int8", script=ONNXRUNTIME, method="dynamic"),
    "ort-dynamic-channel": Peer(
        label="onnxruntime dynamic int8, per channel", script=ONNXRUNTIME, method="dynamic-channel"
    ),
    "ort-static": Peer(
        label="onnxruntime static int8, per channel",
        script=ONNXRUNTIME,
        method="static",
        calibrates=True,
    ),
    "transformers-dynamic": Peer(
        label="transformers OnnxRuntimeQuantizer, dynamic", script=TRANSFORMERS, method="dynamic"
    ),
    "transformers-static": Peer(
        label="transformers OnnxRuntimeQuantizer, static",
        script=TRANSFORMERS,
        method="static",
        calibrates=True,
    ),
    "nncf": Peer(label="NNCF int8", script="nncf_onnx.py", method="default", calibrates=True),
    "nbits8": Peer(label="MatMulNBits, 8 bits", script=ONNXRUNTIME, method="nbits8"),
    "nbits4": Peer(label="MatMulNBits, 4 bits", script=ONNXRUNTIME, method="nbits4"),
}


def files_of(folder: Path) -> list[FileInfo]:
    """Returns the graph's files, hashed."""
    return [
        FileInfo(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.glob(f"{MODEL_FILE}*"))
    ]


def made(
    name: str,
    folder: Path,
    float_path: Path,
    float_files: Sequence[FileInfo],
    calib: Path,
    python: Path,
) -> dict[str, Any]:
    """Makes a peer's graph where it is not there yet; returns what its row says.

    Raises:
        CalledProcessError: the tool failed; its stderr is in a file beside the graph.
    """
    peer, note = PEERS[name], folder / MADE_FILE
    script = MAKERS / peer.script
    inputs = {
        "method": peer.method,
        "float": [file.sha256 for file in float_files],
        "maker": [sha256_of(path) for path in (script, MAKERS / "calibration.py")],
        "calibration": sha256_of(calib) if peer.calibrates else "",
    }
    if note.is_file():
        known: dict[str, Any] = read_plain(note)
        files = [dataclasses.asdict(file) for file in files_of(folder)]
        if known["inputs"] == inputs and known["files"] == files:
            return known
    print(f"making {name}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (note, *folder.glob(f"{MODEL_FILE}*")):
        old.unlink(missing_ok=True)
    command = [str(python), str(script), peer.method, str(folder)]
    command += ["--float", str(float_path), "--calib", str(calib)]
    started = time.perf_counter()
    with (folder / STDERR_FILE).open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
    found = {
        "inputs": inputs,
        "versions": json.loads(done.stdout.splitlines()[-1]),
        "made_s": round(time.perf_counter() - started, 1),
        "files": files_of(folder),
    }
    write_json(note, found)
    return found


def nncf_python(folder: Path) -> Path:
    """Returns the interpreter of NNCF's own environment, which is made where there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making an environment with {NNCF}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pinned = [f"{name}=={metadata.version(name)}" for name in ("onnx", "onnxruntime")]
        install = [str(python), "-m", "pip", "install", "--quiet", NNCF, *pinned]
        subprocess.run(install, check=True, stdout=sys.stderr)
    return python


def made_by(
    names: Sequence[str],
    work: Path,
    float_path: Path,
    float_files: Sequence[FileInfo],
    calib: Path,
    nncf_venv: Path,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns what the rows of the graphs say, and how the others failed, by name.

    A graph's folder is `work / name`.
    """
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in names:
        folder = work / name
        try:
            python = nncf_python(nncf_venv) if name == "nncf" else Path(sys.executable)
            found[name] = made(name, folder, float_path, float_files, calib, python)
        except subprocess.CalledProcessError as error:
            log = folder / STDERR_FILE
            lines = log.read_text().strip().splitlines() if log.is_file() else []
            failed[name] = (lines or [str(error)])[-1]
    return found, failed
