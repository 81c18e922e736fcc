"""Where a model's weights lie: on one device, or spread over devices, memory and disk.

accelerate spreads: it puts whole layers on devices in turn, the rest stays in the checkpoint's
files and is read for each forward pass, one module at a time. Weights that lie elsewhere are "meta"
tensors: their shapes and types are known, their values are not there.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantkit.errors import InputError, suggest

DEVICE_MAPS: Final = ("auto",)
_FREE_FRAC: Final = 0.9
"""Of the free memory: as transformers, which leaves the rest for activations."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model is to go.

    Attributes:
        device: The one device; with a map, `cpu` keeps the model off other devices than those
            that `max_memory` names.
        device_map: None, or `auto`: spread over devices, memory and disk.
        max_memory: Bytes with a unit by device (`cpu`, or the number of a GPU), e.g.
            `{"cpu": "300MB", 0: "20GB"}`. Devices that are not named get nothing, the disk gets
            the rest. None: what is free now.

    Raises:
        InputError: an unknown device or map, a limit without a map.
    """

    device: str = "cpu"
    device_map: str | None = None
    max_memory: Mapping[int | str, str] | None = None

    def __post_init__(self) -> None:
        _check_device(self.device)
        if self.device_map is None:
            if self.max_memory is not None:
                raise InputError("max_memory is for a spread model: give device_map='auto' too.")
            return
        if self.device_map not in DEVICE_MAPS:
            raise InputError(
                f"unknown device_map {self.device_map!r}.{suggest(self.device_map, DEVICE_MAPS)}"
            )
        for device in self.max_memory or {}:
            count = torch.cuda.device_count()
            if device != "cpu" and not (isinstance(device, int) and device in range(count)):
                raise InputError(
                    f"max_memory names the device {device!r}: expected 'cpu'"
                    + (f", or a GPU's number below {count}." if count else "; there is no GPU.")
                )

    @property
    def is_spread(self) -> bool:
        """Whether the weights may lie in several places."""
        return self.device_map is not None

    def require_folder(self, given: str, what: str) -> None:
        """Raises InputError where a model that is no checkpoint folder is to be spread."""
        if self.is_spread:
            raise InputError(
                f"{given} is {what}, which is loaded whole: device_map and max_memory are for "
                "transformers folders with *.safetensors."
            )

    def load(self, model_class: Any, folder: Path, **options: Any) -> tuple[Any, Any]:
        """Returns (model, transformers' loading info): `from_pretrained`, spread where asked for.

        What transformers has to write again for reading it later (the experts of an MoE, whose
        weights it joins) lies in a temporary folder that lives as long as the model, at most until
        the interpreter exits. Only a kill that runs no exit code (SIGKILL, SIGTERM) leaves it.

        Raises:
            InputError: a size that cannot be read; accelerate is missing.
        """
        if not self.is_spread:
            loaded: Any = model_class.from_pretrained(folder, output_loading_info=True, **options)
            return loaded[0].to(self.device), loaded[1]
        offload = Path(tempfile.mkdtemp(prefix="quantkit-offload-"))
        try:
            with _quiet_accelerate():
                model, report = model_class.from_pretrained(
                    folder,
                    output_loading_info=True,
                    device_map=self.device_map,
                    max_memory=self._limits(),
                    offload_folder=str(offload),
                    **options,
                )
        except BaseException:
            shutil.rmtree(offload, ignore_errors=True)
            raise
        if any(offload.iterdir()):
            weakref.finalize(model, shutil.rmtree, offload, ignore_errors=True)
        else:  # all of it is read from the checkpoint
            offload.rmdir()
        return model, report

    def _limits(self) -> dict[int | str, int] | None:
        accelerate: Any = importlib.import_module("accelerate.utils")
        if self.max_memory is None:
            if self.device != "cpu" or not torch.accelerator.is_available():
                return None  # all that there is
            return {"cpu": int(accelerate.get_max_memory().get("cpu", 0) * _FREE_FRAC)}
        try:
            size_of = accelerate.convert_file_size_to_int
            return {name: size_of(size) for name, size in self.max_memory.items()}
        except ValueError:
            sizes = ", ".join(self.max_memory.values())
            raise InputError(f"max_memory takes sizes such as 300MB, got {sizes}.") from None


def input_device(model: nn.Module) -> torch.device:
    """Returns where a model's inputs go: never "meta", which is where offloaded weights are."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def parameter_count(model: nn.Module) -> int:
    """Returns the number of weights, tied ones once.

    Reading an offloaded weight makes a new tensor of it, so that what was tied no longer is one.
    """
    copies: Mapping[str, str] = {}
    if hasattr(model, "_hf_hook"):
        copies = getattr(model, "all_tied_weights_keys", None) or {}
    return sum(p.numel() for name, p in model.named_parameters() if name not in copies)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight by name; what lies on disk is read one tensor at a time."""
    for name, tensor in model.state_dict().items():
        yield name, stored(model, name) if tensor.is_meta else tensor


def stored(model: nn.Module, name: str) -> Tensor:
    """Returns the values of a weight that accelerate keeps elsewhere.

    Raises:
        InputError: it is nowhere.
    """
    owner, _, last = name.rpartition(".")
    elsewhere = getattr(getattr(model.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    if elsewhere is None or last not in elsewhere:
        raise InputError(f"weight {name!r} is on no device and in no file: load the model again.")
    tensor: Tensor = elsewhere[last]
    return tensor


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"unknown device {device!r}; expected cpu, cuda or cuda:N.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r}: torch sees no CUDA device here; use --device cpu.")


@contextlib.contextmanager
def _quiet_accelerate() -> Iterator[None]:
    """Keeps accelerate's note off the terminal that some weights are offloaded: it was asked to."""
    logger = logging.getLogger("accelerate.big_modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
