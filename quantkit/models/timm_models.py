"""`timm:NAME` and `timm:NAME@weights.safetensors`: vision models of the timm package."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from quantkit.errors import InputError
from quantkit.models.shipped import sha256_of

TIMM: Final = "timm:"
_HELP: Final = "Get it with: pip install timm, with the torchvision that fits your torch"


def timm_model(given: str, dtype: torch.dtype) -> tuple[str, nn.Module, str, tuple[str, ...]]:
    """Returns (short name, model, hash of its weights, warnings) for `timm:NAME[@FILE]`.

    Without a file, timm's own pretrained weights, from its cache or the hub. With one, the weights
    in it; its classifier may have another number of classes, or be absent.

    Raises:
        InputError: no timm, no such model, no weights, or a file that does not fill the model.
    """
    name, _, file = given.removeprefix(TIMM).partition("@")
    if importlib.util.find_spec("timm") is None:
        raise InputError(f"model {given!r} needs the package timm, which is missing. {_HELP}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            timm: Any = importlib.import_module("timm")
        except Exception as error:  # a torchvision of another torch raises RuntimeError
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{given}: timm cannot be imported ({first}). {_HELP}.") from error
        if not timm.is_model(name.split(".", 1)[0]):
            near = difflib.get_close_matches(name, timm.list_models(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " See timm.list_models()."
            raise InputError(f"timm has no model {name!r}.{hint}")
        if file:
            path = Path(file).expanduser()
            model, notes = _from_file(timm, name, path, given)
            return path.stem, model.to(dtype), sha256_of(path), notes
        try:
            model = timm.create_model(name, pretrained=True)
        except Exception as error:  # timm passes on what the hub, the network or a file raises
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"{given}: timm has no pretrained weights at hand ({first}). Give a local file: "
                f"{TIMM}{name}@weights.safetensors. Random weights are not measured."
            ) from error
    return name, model.to(dtype), _hash_of_state(model), ()


def _from_file(timm: Any, name: str, path: Path, given: str) -> tuple[nn.Module, tuple[str, ...]]:
    if path.suffix != ".safetensors" or not path.is_file():
        raise InputError(f"{given}: expected an existing .safetensors file after '@'.")
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{given}: broken weights file: {error}") from error
    model = timm.create_model(name, pretrained=False)
    heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    first = heads[0] if isinstance(heads, (list, tuple)) else heads
    classes = state.get(f"{first}.weight")
    # a head that the file has not would be random, so the model is made without
    model = timm.create_model(
        name, pretrained=False, num_classes=0 if classes is None else len(classes)
    )
    try:
        report = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        detail = str(error).strip().splitlines()[-1].strip()
        raise InputError(f"{given}: the weights do not fit: {detail}") from error
    if report.missing_keys:
        raise InputError(
            f"{given}: the file lacks {len(report.missing_keys)} weights of {name}, which would be "
            f"random; the first is {report.missing_keys[0]!r}."
        )
    unused = report.unexpected_keys
    if unused:
        note = f"the file holds {len(unused)} weights that {name} does not use, e.g. {unused[0]!r}"
        return model, (note,)
    return model, ()


def _hash_of_state(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
