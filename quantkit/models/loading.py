"""`load(NAME_OR_PATH)`: a shipped name, a local transformers folder, a `.gguf` file or a hub id."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quantkit.errors import InputError, suggest
from quantkit.models.families import attention_layout, layer_modules
from quantkit.models.shipped import (
    SHIPPED,
    dequantized,
    quiet_transformers,
    sha256_of,
    smollm2_gguf,
)
from quantkit.results import ModelInfo

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEQUANTIZED: Final = (
    "the checkpoint was already quantized ({what}) and is used dequantized: its 'float' row is not "
    "the original model"
)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONNECT_TIMEOUT_S: Final = 3.0
_HUB_TIMEOUT_S: Final = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to be measured.

    Attributes:
        name: Short name for reports; `source`: what the user gave.
        model: In eval mode, without gradients.
        tokenizer: None where the folder has none.
        sha256: Hash of the weights, hex.
    """

    name: str
    source: str
    model: PreTrainedModel
    tokenizer: Any
    sha256: str
    warnings: tuple[str, ...] = ()

    def info(self) -> ModelInfo:
        """Returns what a result file says about the model."""
        config: Any = self.model.config
        heads = int(config.num_attention_heads)
        return ModelInfo(
            name=self.name,
            source=self.source,
            sha256=self.sha256,
            architecture=type(self.model).__name__,
            parameters=sum(p.numel() for p in self.model.parameters()),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            layers=len(layer_modules(self.model)),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            maps=attention_layout(config).maps,
            hidden_size=int(config.hidden_size),
            warnings=list(self.warnings),
        )


def load(name_or_path: str, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Returns the model with this name or at this path, checked for NaN and inf.

    Raises:
        InputError: nothing there, no weights, NaN weights (by name), no network for a hub id, an
            unknown dtype or device.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}.{suggest(dtype, DTYPES)}")
    _check_device(device)
    path = Path(name_or_path).expanduser()
    if name_or_path in SHIPPED and not path.exists():
        folder, sha256 = dequantized(smollm2_gguf())
        warnings = (DEQUANTIZED.format(what="GGUF, 4 bits"),)
        return _from_folder(folder, name_or_path, name_or_path, dtype, device, sha256, warnings)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(
                f"{name_or_path} is a file; expected a .gguf file or a transformers folder."
            )
        folder, sha256 = dequantized(path)
        warnings = (DEQUANTIZED.format(what="GGUF"),)
        return _from_folder(folder, path.stem, name_or_path, dtype, device, sha256, warnings)
    if path.is_dir():
        weights = _weight_files(path, name_or_path)
        sha256 = _hash_all(weights)
        return _from_folder(path, path.resolve().name, name_or_path, dtype, device, sha256, ())
    if _HUB_ID.fullmatch(name_or_path):
        return _from_hub(name_or_path, dtype, device)
    raise InputError(
        f"model {name_or_path!r}: no such folder or file, and not the name of a shipped model."
        + suggest(name_or_path, SHIPPED)
    )


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"unknown device {device!r}; expected cpu, cuda or cuda:N.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r}: torch sees no CUDA device here; use --device cpu.")


def _weight_files(folder: Path, given: str) -> list[Path]:
    if not (folder / "config.json").is_file():
        raise InputError(f"{given} has no config.json: expected a transformers model folder.")
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = sorted(folder.glob("*.bin"))
        hint = (
            f" {pickled[0].name} is a pickle, which quantkit does not open: convert it with "
            "save_pretrained(..., safe_serialization=True)."
            if pickled
            else " Save the model with save_pretrained()."
        )
        raise InputError(f"{given} holds no weights (*.safetensors).{hint}")
    return found


def _hash_all(files: list[Path]) -> str:
    if len(files) == 1:
        return sha256_of(files[0])
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


def _from_folder(
    folder: Path,
    name: str,
    source: str,
    dtype: str,
    device: str,
    sha256: str,
    warnings: tuple[str, ...],
) -> LoadedModel:
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=DTYPES[dtype],
                local_files_only=True,
                output_loading_info=True,
            )
            model, report = loaded
            tokenizer = _tokenizer(folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{source} cannot be loaded: {_first_line(error)}") from error
    except Exception as error:  # safetensors raises a type of its own for a broken file
        if type(error).__name__ == "SafetensorError":
            raise InputError(f"{source}: broken weights file: {_first_line(error)}") from error
        raise
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise InputError(
            f"{source}: the checkpoint lacks {len(missing)} weights of {type(model).__name__}, "
            f"which would be random; the first is {missing[0]!r}. Get the checkpoint again."
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        warnings = (*warnings, DEQUANTIZED.format(what="quantization_config"))
    return _finish(name, source, model, tokenizer, sha256, warnings, device)


def _tokenizer(folder: Path | str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=isinstance(folder, Path))
    except (OSError, ValueError, KeyError):
        return None  # a folder may come without one; what needs it says so


def _from_hub(name: str, dtype: str, device: str) -> LoadedModel:
    """Loads from the hub's cache, else from the hub after one short look at the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt"]
    try:
        folder = snapshot_download(name, allow_patterns=patterns, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes") or not _reachable():
            raise InputError(
                f"model {name!r} is not a local folder and not in the hub's cache, and the hub "
                "cannot be reached: check the path, or download it where there is a network."
            ) from None
        try:
            folder = snapshot_download(
                name, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S, max_workers=2
            )
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise InputError(f"model {name!r} from the hub: {_first_line(error)}") from error
    path = Path(folder)
    sha256 = _hash_all(_weight_files(path, name))
    return _from_folder(path, name.split("/")[1], name, dtype, device, sha256, ())


def _reachable() -> bool:
    from huggingface_hub.constants import ENDPOINT

    host = ENDPOINT.split("://", 1)[-1].split("/", 1)[0]
    name, _, port = host.partition(":")
    try:
        with socket.create_connection((name, int(port or 443)), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def _finish(
    name: str,
    source: str,
    model: PreTrainedModel,
    tokenizer: Any,
    sha256: str,
    warnings: tuple[str, ...],
    device: str,
) -> LoadedModel:
    for tensor_name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise InputError(
                f"{source}: weight {tensor_name!r} holds {bad} NaN or inf values; expected finite "
                "ones. The checkpoint is broken: get it again."
            )
    model.train(False).requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]
    return LoadedModel(
        name=name,
        source=source,
        model=model,
        tokenizer=tokenizer,
        sha256=sha256,
        warnings=warnings,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
