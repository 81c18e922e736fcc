"""`data_slice(SOURCE, MODEL)`: text for what reads text, images for what sees, arrays for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torch import nn

from quantkit.calib_sets.array_files import array_slice, decoder_start
from quantkit.calib_sets.arrays import ArraySlice
from quantkit.calib_sets.dataset_yaml import is_dataset_yaml
from quantkit.calib_sets.find import find_set, set_names
from quantkit.calib_sets.image_files import IMAGE_SUFFIXES, image_files
from quantkit.calib_sets.images import SHAPES, image_slice
from quantkit.calib_sets.numpy_files import ARRAY_SUFFIXES
from quantkit.calib_sets.text import PYDOC, TokenSlice, text_slice
from quantkit.errors import InputError, suggest
from quantkit.models import LoadedModel
from quantkit.models.architectures import is_decoder_only

_EXPECTED: Final = {
    "text": "pydoc or another set of text, a text file, a folder of .txt, a .jsonl, or .npz",
    "image": "shapes or another set of images, an image, a folder of them, data.yaml, .npz or .npy",
    "audio": "the model's input as .npz or .npy",
    "other": "the model's input as .npz or .npy",
}
_PLURAL: Final = {"text": "text", "image": "images", "audio": "audio", "other": "other inputs"}
_POSITIONS: Final = ("position_embeddings", "position_embedding", "embed_positions", "wpe")


def data_slice(
    source: str | None,
    loaded: LoadedModel,
    *,
    seq_len: int = 512,
    samples: int = 128,
    skip: int = 0,
    bos: str = "auto",
) -> TokenSlice | ArraySlice:
    """Returns up to `samples` samples of what the model reads, after the first `skip`.

    Args:
        source: A named set, a file or a folder; None takes `pydoc` for text and `shapes` for
            images. A `.npz`, a `.npy` or a set of arrays suits every model; `seq_len` and `bos` are
            for text alone.

    Raises:
        InputError: the wrong kind of data for the model, no such source, longer blocks than the
            model has positions, and all that `text_slice`, `image_slice` and `array_slice` refuse.
    """
    modality = loaded.modality
    source = default_source(loaded) if source is None else source
    path = Path(source).expanduser()
    found = find_set(source)
    is_file = path.suffix.lower() in ARRAY_SUFFIXES and not path.is_dir()
    if is_file if found is None else found.manifest.kind == "arrays":
        return array_slice(source, loaded, samples=samples, skip=skip)
    if found is None:
        kind = _kind(path, source, modality)
    else:
        kind = "image" if found.manifest.kind == "images" else "text"
    if kind != modality:
        raise InputError(
            f"{source!r} holds {_PLURAL[kind]}, and {loaded.name} ({type(loaded.model).__name__}) "
            f"reads {_PLURAL[modality]}: expected {_EXPECTED[modality]}."
        )
    if modality == "image":
        return image_slice(source, loaded, samples=samples, skip=skip)
    config: Any = getattr(loaded.model, "config", None)
    _check_positions(loaded, seq_len)
    return text_slice(
        source,
        loaded.tokenizer,
        seq_len=seq_len,
        samples=samples,
        skip=skip,
        bos=bos,
        encoder=not is_decoder_only(config),
        decoder_start=decoder_start(loaded),
        vocab_size=_vocabulary(config),
    )


def default_source(loaded: LoadedModel) -> str:
    """Returns the named source that a model of this kind is measured on when none is given.

    Raises:
        InputError: there is none for audio and other inputs.
    """
    named = {"text": PYDOC, "image": SHAPES}.get(loaded.modality)
    if named is None:
        raise InputError(
            f"{loaded.name} reads {_PLURAL[loaded.modality]}, for which no data ships: give "
            f"{_EXPECTED[loaded.modality]}."
        )
    return named


def _kind(path: Path, source: str, modality: str) -> str:
    """Returns `text` or `image`: what a source holds. A folder with both is what the model reads.

    Raises:
        InputError: no such file or folder, in the words of the model's own kind.
    """
    if modality == "image" and is_dataset_yaml(source):
        return "image"
    if not path.exists():
        names = set_names("images") if modality == "image" else set_names("text", "tokens")
        raise InputError(f"data {source!r}: no such file or folder.{suggest(source, names)}")
    if path.is_file():
        return "image" if path.suffix.lower() in IMAGE_SUFFIXES else "text"
    has_text, has_images = any(path.glob("*.txt")), bool(image_files(path))
    if has_text == has_images:
        return modality if modality in ("text", "image") else "text"
    return "image" if has_images else "text"


def _vocabulary(config: Any) -> int | None:
    text = config.get_text_config() if config is not None else None
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def _check_positions(loaded: LoadedModel, seq_len: int) -> None:
    """Raises InputError for blocks longer than a table of learned positions."""
    for name, module in loaded.model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in _POSITIONS:
            # RoBERTa's begin behind the padding's row, OPT's and BART's at an offset
            before = getattr(module, "offset", None)
            if before is None:
                before = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = module.num_embeddings - int(before)
            if seq_len > limit:
                raise InputError(
                    f"{loaded.name} has {limit} positions, blocks have {seq_len} tokens: lower "
                    f"--seq-len to {limit} or less."
                )
