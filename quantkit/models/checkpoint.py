"""What a checkpoint's folder says about itself, held against what lies in it, before it is loaded.

Weights are read from the files that are hashed, and from no other place: an index may name files of
its own folder only, and pickles are never opened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from quantkit.errors import InputError

_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_AGAIN: Final = "Get the checkpoint again."
_LAYERS: Final = 1000
"""More layers than that, and than tensors, is no model but a number that went wrong."""
_REAL: Final = ("F", "BF")
"""How safetensors' names of types of real numbers begin."""


def read_object(path: Path, given: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a checkpoint.

    Raises:
        InputError: it is none, or no JSON at all.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(
            f"{given}: {path.name} is not JSON ({error.msg}, {where}). {_AGAIN}"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{given}: {path.name} is not UTF-8 text. {_AGAIN}") from error
    except RecursionError as error:
        raise InputError(f"{given}: {path.name} is nested too deeply. {_AGAIN}") from error
    except OSError as error:
        raise InputError(f"{given}: {path.name} cannot be read: {error.strerror}.") from error
    if not isinstance(plain, dict):
        raise InputError(
            f"{given}: {path.name} holds a {type(plain).__name__}, expected a JSON object. {_AGAIN}"
        )
    return plain


def weight_files(folder: Path, given: str) -> list[Path]:
    """Returns the folder's *.safetensors, sorted.

    Raises:
        InputError: no config.json or a broken one, no weights, or an index that names a file
            which is not among them.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"{given} has no config.json: expected a transformers model folder.")
    _check_config(read_object(folder / "config.json", given), given)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
        hint = (
            f" {pickled[0].name} is a pickle, which quantkit does not open: convert it with "
            "save_pretrained(..., safe_serialization=True)."
            if pickled
            else " Save the model with save_pretrained()."
        )
        raise InputError(f"{given} holds no weights (*.safetensors).{hint}")
    for path in found:
        if not path.is_file():
            raise InputError(
                f"{given}: {path.name} is a folder or a link to nothing, expected a file. {_AGAIN}"
            )
    if not (folder / _WEIGHTS).is_file() and (folder / _INDEX).is_file():
        _check_index(read_object(folder / _INDEX, given), {path.name for path in found}, given)
    return found


def _check_config(plain: dict[str, Any], given: str) -> None:
    names, kind = plain.get("architectures"), plain.get("model_type")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise InputError(
            f"{given}: 'architectures' in config.json is {names!r:.80}, expected a list of class "
            f"names. {_AGAIN}"
        )
    if kind is not None and not isinstance(kind, str):
        raise InputError(
            f"{given}: 'model_type' in config.json is {kind!r:.80}, expected a name. {_AGAIN}"
        )


def _check_index(index: dict[str, Any], files: set[str], given: str) -> None:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{given}: {_INDEX} has no 'weight_map' from weights to files. {_AGAIN}")
    for name, place in places.items():
        if place not in files:
            raise InputError(
                f"{given}: {_INDEX} puts {name!r:.80} into {place!r:.80}, which is no file of this "
                f"folder: expected one of {', '.join(sorted(files))}. {_AGAIN}"
            )


def check_tensors(config: Any, files: list[Path], given: str) -> None:
    """Returns where a checkpoint's tensors can be those of the model that its config describes.

    Raises:
        InputError: integers where real numbers belong, or more layers than there are tensors.
        SafetensorError: a broken file.
    """
    count = 0
    packed = getattr(config, "quantization_config", None) is not None  # integers are its weights
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                count += 1
                dtype = file.get_slice(name).get_dtype()
                if not packed and name.endswith(".weight") and not dtype.startswith(_REAL):
                    raise InputError(
                        f"{given}: weight {name!r:.120} is {dtype} in {path.name}, expected real "
                        f"numbers. {_AGAIN}"
                    )
    layers = getattr(getattr(config, "text_config", None) or config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > max(_LAYERS, count):
        raise InputError(
            f"{given}: config.json asks for {layers} layers, and the checkpoint holds {count} "
            f"tensors. {_AGAIN}"
        )


def misfit(model_class: Any, config: Any, files: list[Path]) -> str:
    """Returns the first tensor whose shape is not that of the model, in words; empty: none is."""
    with torch.device("meta"):
        is_auto = not issubclass(model_class, PreTrainedModel)
        model: nn.Module = model_class.from_config(config) if is_auto else model_class(config)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                shape = list(file.get_slice(name).get_shape())
                if shapes.get(name, shape) != shape:
                    return f"{name!r} is {shape} in {path.name}, and {shapes[name]} by config.json"
    return ""
