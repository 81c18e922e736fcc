"""`.npz` and `.npy` files: arrays by the names of the model's forward arguments.

A `.npz` holds one array an argument (`pixel_values`, `input_features`, `input_ids` ...), first axis
the samples; a `.npy` holds the main input. They are taken as they are: what the model's processor
does to a file has been done.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from quantkit.calib_sets.arrays import ArraySlice, slice_of
from quantkit.calib_sets.check import require_as_read, verified
from quantkit.calib_sets.find import find_set
from quantkit.calib_sets.numpy_files import common_length, read_arrays
from quantkit.errors import InputError, suggest
from quantkit.models import LoadedModel

AS_GIVEN: Final = "none: arrays as given"


def array_slice(source: str, loaded: LoadedModel, *, samples: int, skip: int = 0) -> ArraySlice:
    """Returns up to `samples` samples of a `.npz`, `.npy` or set of arrays, after the first `skip`.

    An encoder-decoder that is given no `decoder_input_ids` gets one start token a sample.

    Raises:
        InputError: a broken file, a name that forward does not take, no main input, first axes
            that differ, a type or shape that the model cannot read, NaN, no sample after `skip`.
    """
    found, named = find_set(source), None
    if found is None:
        arrays = read_arrays(Path(source).expanduser(), source, loaded.input_name)
    else:
        content, named = verified(found)
        path = next(iter(content.paths.values()))
        arrays = read_arrays(path, source, loaded.input_name)
        require_as_read(found, content)
    names = forward_names(loaded.model)
    for name in arrays:
        if name not in names:
            raise InputError(
                f"{source}: {name!r} is no input of {type(loaded.model).__name__}."
                f"{suggest(name, names)}"
            )
    main = loaded.input_name
    if main not in arrays:
        raise InputError(
            f"{source} holds {', '.join(sorted(arrays)) or 'nothing'}; expected the main input of "
            f"{loaded.name}, {main!r}, as well."
        )
    count = common_length(arrays, source)
    if count <= skip:
        raise InputError(
            f"{source} holds {count} samples: expected at least one after {skip} that are used "
            "elsewhere."
        )
    tensors = {
        name: _tensor(name, array[skip : skip + samples], source) for name, array in arrays.items()
    }
    _check_main(main, tensors, source, loaded)
    _check_tokens(tensors, source)
    preprocessing = AS_GIVEN
    start = decoder_start(loaded)
    if start is not None and "decoder_input_ids" not in tensors:
        tensors["decoder_input_ids"] = torch.full((len(tensors[main]), 1), start)
        preprocessing += f"; the decoder reads one start token, {start}"
    rows = _TensorRows(tensors=tensors)
    return slice_of(
        rows, loaded, source=source, skip=skip, preprocessing=preprocessing, named=named
    )


def _check_tokens(tensors: dict[str, torch.Tensor], source: str) -> None:
    """Raises InputError for token ids that are no table, or a mask of another shape."""
    ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
    if ids is not None and ids.dim() != 2:
        raise InputError(
            f"{source}: input_ids has shape {list(ids.shape)}; expected [samples, tokens]."
        )
    if ids is not None and mask is not None and mask.shape != ids.shape:
        raise InputError(
            f"{source}: attention_mask has shape {list(mask.shape)}; expected that of input_ids, "
            f"{list(ids.shape)}."
        )


def decoder_start(loaded: LoadedModel) -> int | None:
    """Returns the token that a decoder's inputs begin with; None where there is no encoder-decoder.

    As `generate` chooses it: the decoder's start token, else BOS.

    Raises:
        InputError: an encoder-decoder that says neither.
    """
    config: Any = getattr(loaded.model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return None
    places = (config, getattr(loaded.model, "generation_config", None))
    for name in ("decoder_start_token_id", "bos_token_id"):
        for place in places:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    raise InputError(
        f"{loaded.name}: config.json has no decoder_start_token_id: expected one, which the "
        "decoder of an encoder-decoder begins with."
    )


def forward_names(model: Any) -> list[str]:
    """Returns the arguments that the model's backbone takes by name."""
    body = getattr(model, "base_model", model)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(body.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in kinds]


@dataclass(frozen=True, kw_only=True, eq=False)
class _TensorRows:
    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


def _tensor(name: str, array: np.ndarray[Any, Any], source: str) -> Tensor:
    if array.dtype == np.bool_:
        return torch.from_numpy(array.copy())
    if np.issubdtype(array.dtype, np.integer):
        return torch.from_numpy(array.astype(np.int64))
    if np.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):  # what overflows is inf, which is refused by name
            return torch.from_numpy(array.astype(np.float32))
    raise InputError(f"{source}: {name} holds {array.dtype}; expected numbers.")


def _check_main(main: str, tensors: dict[str, Tensor], source: str, loaded: LoadedModel) -> None:
    """Raises InputError for what the model would misread, or fail on without saying why."""
    tensor, config = tensors[main], getattr(loaded.model, "config", None)
    if loaded.modality == "text":
        text: Any = config.get_text_config() if config is not None else None
        vocabulary = getattr(text, "vocab_size", None)
        if tensor.is_floating_point():
            raise InputError(f"{source}: {main} holds fractions; expected whole token numbers.")
        if (
            tensor.numel()
            and vocabulary
            and not 0 <= int(tensor.min()) <= int(tensor.max()) < int(vocabulary)
        ):
            raise InputError(
                f"{source}: {main} holds tokens from {int(tensor.min())} to {int(tensor.max())}; "
                f"expected 0 to {vocabulary - 1}."
            )
        return
    if not tensor.is_floating_point() and loaded.modality != "other":
        raise InputError(
            f"{source}: {main} holds whole numbers; expected floats, scaled and normalised as "
            f"{loaded.name} was trained (a folder of images is normalised for you)."
        )
    channels = getattr(config, "num_channels", None)
    is_image = loaded.modality == "image" and tensor.ndim == 4 and isinstance(channels, int)
    if is_image and tensor.shape[1] != channels:
        last = " (they stand last here)" if tensor.shape[3] == channels else ""
        raise InputError(
            f"{source}: {main} has shape {list(tensor.shape)}; expected [samples, {channels}, "
            f"height, width], channels second{last}."
        )
    mask = tensors.get("attention_mask")
    if loaded.modality == "audio" and mask is not None and not bool(mask.all()):
        raise InputError(
            f"{source}: attention_mask marks padding, which cannot be told apart once the model "
            "has shortened the audio: expected samples of one length."
        )
