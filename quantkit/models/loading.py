"""`load(NAME_OR_PATH)`: a shipped name, a transformers folder, a `.gguf`, a hub id, `timm:NAME`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from quantkit.errors import InputError, QuantkitError, suggest
from quantkit.jobs import SHIPPED_PAIR
from quantkit.models.architectures import is_decoder_only, model_class, require_real_weights
from quantkit.models.checkpoint import check_tensors, misfit, read_object, weight_files
from quantkit.models.families import attention_modules, backbone, layer_modules, layout_of
from quantkit.models.hub import hub_folder
from quantkit.models.placement import Placement, input_device, parameter_count, weights
from quantkit.models.shipped import (
    SHIPPED,
    dequantized,
    dinov2_folder,
    pair_model,
    quiet_transformers,
    sha256_of,
    shipped_file,
    smollm2_gguf,
)
from quantkit.models.sizes import input_name, modality_of, place_of, sizes_of
from quantkit.models.timm_models import TIMM, timm_model
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
_TOKENIZER_FILES: Final = ("tokenizer.*", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to be measured.

    Attributes:
        name: Short name for reports; `source`: what the user gave.
        model: An nn.Module in eval mode, without gradients; of transformers where it can be.
        tokenizer: None where the folder has none.
        sha256: Hash of the weights, hex.
        folder: Where its files lie (a preprocessor_config.json is read from it); None for timm.
    """

    name: str
    source: str
    model: Any
    tokenizer: Any
    sha256: str
    warnings: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def modality(self) -> str:
        """What the model reads: `text`, `image`, `audio` or `other`."""
        return modality_of(self.model)

    @property
    def input_name(self) -> str:
        """The forward argument that carries the data, e.g. `input_ids` or `pixel_values`."""
        return input_name(self.model)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return input_device(self.model)

    def info(self) -> ModelInfo:
        """Returns what a result file says about the model."""
        model = self.model
        config: Any = getattr(model, "config", None)
        sizes = sizes_of(model)
        dtype, _ = place_of(model)
        layouts = [layout_of(module) for _, module in attention_modules(model)]
        return ModelInfo(
            name=self.name,
            source=self.source,
            sha256=self.sha256,
            architecture=type(model).__name__,
            parameters=parameter_count(model),
            dtype=dtype,
            device=str(self.device),
            layers=len(layer_modules(model)) or sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            maps=max((layout.maps for layout in layouts), default=1),
            hidden_size=sizes.hidden_size,
            warnings=list(self.warnings),
            modality=self.modality,
            is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        )


def run_batch(
    loaded: LoadedModel, inputs: Mapping[str, Tensor], source: str, *, whole: bool | None = None
) -> None:
    """Runs one batch through the model, without a KV cache; what it returns is of no interest.

    Args:
        inputs: Arguments of its forward; `source`: where they are from, for the message.
        whole: With what lies behind the backbone; None: unless that is a decoder's vocabulary head.

    Raises:
        InputError: the model cannot run on it.
    """
    model = loaded.model
    config = getattr(model, "config", None)
    if whole is None:
        whole = config is None or not is_decoder_only(config)
    moved: dict[str, Any] = {name: tensor.to(loaded.device) for name, tensor in inputs.items()}
    if getattr(config, "use_cache", None):
        moved["use_cache"] = False
    try:
        (model if whole else backbone(model))(**moved)
    except QuantkitError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # torch's and the model's
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{loaded.name} cannot run on {source} (given {shapes}): {first[:200]}"
        ) from error


def load(
    name_or_path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    device_map: str | None = None,
    max_memory: Mapping[int | str, str] | None = None,
) -> LoadedModel:
    """Returns the model with this name or at this path, checked for NaN and inf.

    Its class is the one that config.json's `architectures` names; code beside the weights is
    never run, and weights that would be random are refused.

    Args:
        device_map: `auto` spreads a model that is too large for one device over devices, memory
            and disk; of a transformers folder, a hub id or a shipped model.
        max_memory: How much a device may hold then, e.g. `{"cpu": "300MB", 0: "20GB"}`; what has
            no room stays on disk.

    Raises:
        InputError: nothing there, no weights, NaN weights (by name), weights that the checkpoint
            lacks, an architecture that transformers does not have, a missing package, no network
            for a hub id, an unknown dtype or device, a device map for what is loaded whole.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}.{suggest(dtype, DTYPES)}")
    placement = Placement(device=device, device_map=device_map, max_memory=max_memory)
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        placement.require_folder(name_or_path, "a GGUF file")
    if name_or_path.startswith(TIMM) and not path.exists():
        placement.require_folder(name_or_path, "a timm model")
        name, timm, sha256, warnings = timm_model(name_or_path, DTYPES[dtype])
        timm.to(device)
        return _finish(name, name_or_path, timm, None, sha256, warnings, None)
    source = _located(name_or_path)
    files = weight_files(source.folder, name_or_path)
    return _from_folder(source, name_or_path, dtype, placement, files)


def prepare(name_or_path: str) -> None:
    """Returns when what `load` has to convert or download lies in its cache.

    Raises:
        InputError: as `load`, for what is not there.
    """
    if not name_or_path.startswith(TIMM):
        _located(name_or_path)


@dataclass(frozen=True, kw_only=True)
class _Located:
    """A transformers folder; `sha256` of its weights where it is known, else empty."""

    folder: Path
    name: str
    sha256: str = ""
    warnings: tuple[str, ...] = ()


def _located(name_or_path: str) -> _Located:
    """Returns the folder of a model, converted or downloaded where it has to be."""
    path = Path(name_or_path).expanduser()
    if name_or_path in (*SHIPPED_PAIR, *SHIPPED) and not path.exists():
        return _shipped(name_or_path)
    if path.is_file():
        if path.suffix != ".gguf":
            is_graph = path.suffix.lower() == ".onnx"
            taken = " An .onnx file is taken by `export` and `diagnose`." if is_graph else ""
            raise InputError(
                f"{name_or_path} is a file; expected a .gguf file or a transformers folder.{taken}"
            )
        folder, sha256 = dequantized(path)
        notes = (DEQUANTIZED.format(what="GGUF"),)
        return _Located(folder=folder, name=path.stem, sha256=sha256, warnings=notes)
    if path.is_dir():
        return _Located(folder=path, name=path.resolve().name)
    if _HUB_ID.fullmatch(name_or_path):
        return _Located(folder=hub_folder(name_or_path), name=name_or_path.split("/")[1])
    raise InputError(
        f"model {name_or_path!r}: no such folder or file, and not the name of a shipped model."
        + suggest(name_or_path, (*SHIPPED_PAIR, *SHIPPED))
    )


def _shipped(name: str) -> _Located:
    warnings: tuple[str, ...] = ()
    if name in SHIPPED_PAIR:
        return _Located(folder=pair_model(name), name=name)
    if name == "minilm":
        weights = shipped_file(name)
        folder, sha256 = weights.parent, sha256_of(weights)
    elif name == "dinov2-small":
        folder, sha256 = dinov2_folder()
    else:
        folder, sha256 = dequantized(smollm2_gguf())
        warnings = (DEQUANTIZED.format(what="GGUF, 4 bits"),)
    return _Located(folder=folder, name=name, sha256=sha256, warnings=warnings)


def _hash_all(files: list[Path]) -> str:
    if len(files) == 1:
        return sha256_of(files[0])
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


def _from_folder(
    located: _Located, source: str, dtype: str, placement: Placement, files: list[Path]
) -> LoadedModel:
    folder = located.folder
    sha256 = located.sha256 or _hash_all(files)
    kind = config = None
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            check_tensors(config, files, source)
            kind = model_class(config, source)
            model, report = placement.load(
                kind, folder, config=config, dtype=DTYPES[dtype], local_files_only=True
            )
            tokenizer, notes = _tokenizer(folder, source)
    except QuantkitError:
        raise
    except SafetensorError as error:
        raise InputError(
            f"{source}: broken weights file: {_said(error)}. Get the checkpoint again."
        ) from error
    except Exception as error:  # a config may hold anything, and classes meet it as they do
        wrong = misfit(kind, config, files) if "ignore_mismatched_sizes" in str(error) else ""
        raise InputError(
            f"{source} cannot be loaded: {wrong or _said(error)}. Its config.json, or its weights, "
            f"are not what transformers {transformers.__version__} expects."
        ) from error
    warnings = (*located.warnings, *require_real_weights(model, report, source), *notes)
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        warnings = (*warnings, DEQUANTIZED.format(what="quantization_config"))
    return _finish(located.name, source, model, tokenizer, sha256, warnings, folder)


def _tokenizer(folder: Path, source: str) -> tuple[Any, tuple[str, ...]]:
    """Returns the tokenizer, None where there is none that can be read, and warnings.

    Raises:
        InputError: there is one, and its file is broken.
    """
    # without files transformers may make an empty one of the config's kind: all text unknown
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return None, ()
    try:
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers package raises Exception itself
        plain = {
            name: read_object(folder / name, source)
            for name in ("tokenizer.json", "tokenizer_config.json")
            if (folder / name).is_file()
        }
        whole = plain.get("tokenizer.json", {"model": {}})
        if type(error) is Exception or not isinstance(whole.get("model"), dict):
            raise InputError(
                f"{source}: tokenizer.json holds no tokenizer ({_said(error)}). Get the checkpoint "
                "again."
            ) from error
        return None, (f"its tokenizer cannot be loaded: {_said(error)}",)  # what needs it says so
    return found, ()


def _finish(
    name: str,
    source: str,
    model: nn.Module,
    tokenizer: Any,
    sha256: str,
    warnings: tuple[str, ...],
    folder: Path | None,
) -> LoadedModel:
    for tensor_name, tensor in weights(model):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise InputError(
                f"{source}: weight {tensor_name!r} holds {bad} NaN or inf values; expected finite "
                + (
                    "ones. It may be too large for float16: use --dtype bfloat16 or float32."
                    if tensor.dtype == torch.float16
                    else "ones. The checkpoint is broken: get it again."
                )
            )
    model.train(False).requires_grad_(False)
    return LoadedModel(
        name=name,
        source=source,
        model=model,
        tokenizer=tokenizer,
        sha256=sha256,
        warnings=warnings,
        folder=folder,
    )


def _said(error: Exception) -> str:
    """Returns what an error says, in one line without a full stop; its class if it is mute."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, LookupError | TypeError | AttributeError | ArithmeticError):
        return ": ".join([type(error).__name__, *lines[:1]])
    # a heading says nothing without what it is of
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
