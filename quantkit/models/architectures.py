"""Which transformers class a config stands for, and whether a checkpoint fills all of it.

Nothing is run that transformers does not hold itself: code that lies beside the weights stays off.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from typing import Any, Final

import transformers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
)

from quantkit.errors import InputError

_CLOSE: Final = 0.75
_NAMED: Final = 3
"""How many weights a message names; checkpoints lack them by the hundred."""


def model_class(config: Any, given: str) -> Any:
    """Returns the class to load a checkpoint with: the one that `architectures` names.

    A config without `architectures` gets `AutoModelForCausalLM` where it is a decoder's, else
    `AutoModel`: a head that the checkpoint may not have is not made up.

    Raises:
        InputError: transformers has no such class, or the class belongs to another model type.
    """
    names = getattr(config, "architectures", None) or []
    if not names:
        return AutoModelForCausalLM if is_decoder_only(config) else AutoModel
    name = str(names[0])
    found = _class_named(name, config)
    if found is None:
        near = difflib.get_close_matches(name, _known_classes(), n=1, cutoff=_CLOSE)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"{given}: config.json names the architecture {name!r}, which transformers "
            f"{transformers.__version__} does not have; code beside the weights is never run.{hint}"
        )
    expected = getattr(found, "config_class", None)
    if isinstance(expected, type) and not isinstance(config, expected):
        raise InputError(
            f"{given}: config.json names the architecture {name!r}, which takes a "
            f"{expected.__name__}, but its model_type is {config.model_type!r}. One of them is "
            "wrong: get the checkpoint again."
        )
    return found


def is_decoder_only(config: Any) -> bool:
    """Returns whether the model reads a running text left to right, and has no encoder.

    Said by transformers' tables: it is a causal language model and not also a masked one (which
    BERT's family is), or its config says `is_decoder`.
    """
    if getattr(config, "is_encoder_decoder", False):
        return False
    parts = [config, getattr(config, "text_config", None)]
    causal = [part for part in parts if part is not None and _maps(part, causal=True)]
    return any(getattr(part, "is_decoder", False) or not _maps(part) for part in causal)


def _maps(config: Any, *, causal: bool = False) -> bool:
    table: Any = MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_FOR_MASKED_LM_MAPPING
    return type(config) in table


def _class_named(name: str, config: Any) -> Any:
    """Returns the model class of this name from transformers or registered with it, or None."""
    places: list[Any] = [transformers]
    module = type(config).__module__
    if module.startswith("transformers.models."):  # not every class stands in the top namespace
        with contextlib.suppress(ImportError):
            places.append(importlib.import_module(module.replace(".configuration_", ".modeling_")))
    for place in places:
        found = getattr(place, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    registered: list[Any] = [
        table.get(type(config), None) for table in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    ]
    return next((kind for kind in registered if getattr(kind, "__name__", "") == name), None)


def _known_classes() -> list[str]:
    ends = ("Model", "Generation", "LM", "Classification", "PreTraining", "Answering", "Detection")
    return [name for name in dir(transformers) if name.endswith(ends)]


def require_real_weights(model: PreTrainedModel, report: Any, given: str) -> tuple[str, ...]:
    """Returns warnings about a checkpoint that does not fit its model; refuses a random body.

    `report` is transformers' loading info. What the checkpoint lacks is random in the model. That
    is an error in the backbone, and in a head that gives vocabulary logits (perplexity would be
    measured through it); a pooler and another head are only named.

    Raises:
        InputError: such a weight is missing.
    """
    tensors = model.state_dict()
    missing = [
        name
        for name in sorted(report["missing_keys"])
        # an integer buffer (position ids, a counter) is made, not learned
        if name not in tensors or tensors[name].is_floating_point()
    ]
    kind = type(model).__name__
    measured = [name for name in missing if not _is_spare(model, name)]
    if measured:
        unexpected = sorted(report["unexpected_keys"])
        has = f" It has {len(unexpected)} others, e.g. {unexpected[0]!r}." if unexpected else ""
        raise InputError(
            f"{given}: the checkpoint lacks {len(measured)} weights of {kind}, which would be "
            f"random: {_some(measured)}.{has} Get the checkpoint again, or correct "
            "'architectures' in its config.json."
        )
    warnings = []
    if missing:
        warnings.append(
            f"the checkpoint lacks {len(missing)} weights of {kind} outside the measured body, "
            f"which are random: {_some(missing)}"
        )
    if report["unexpected_keys"]:
        unused = sorted(report["unexpected_keys"])
        warnings.append(
            f"the checkpoint holds {len(unused)} weights that {kind} does not use: {_some(unused)}"
        )
    return tuple(warnings)


def _is_spare(model: PreTrainedModel, name: str) -> bool:
    """Returns whether a weight lies behind everything that is measured: a pooler or a head."""
    if "pooler" in name.split("."):
        return True
    vocabulary_head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if model.base_model is model or vocabulary_head is not None:
        return False
    return not name.startswith(f"{model.base_model_prefix}.")


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return shown + (" ..." if len(names) > _NAMED else "")
