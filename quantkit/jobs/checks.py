"""What makes a job's words and numbers wrong; each raises InputError in the option's own words."""

from __future__ import annotations

import dataclasses
from typing import Any

from quantkit.errors import InputError, suggest
from quantkit.jobs.choices import BOS, DTYPES
from quantkit.recipe import LOGIT_GRANULARITIES, UNQUANTIZED_BITS


def check_common(seq_len: int, batch_size: int, dtype: str, bos: str) -> None:
    check_positive("seq-len", seq_len, least=2)
    check_positive("batch-size", batch_size)
    check_choice("dtype", dtype, DTYPES)
    check_choice("bos", bos, BOS)


def check_cpu(device: str) -> None:
    """Raises InputError for a device on which this version has not been verified."""
    if device != "cpu":
        raise InputError(f"--device takes 'cpu' in this version, got {device!r}.")


def check_positive(name: str, value: int, least: int = 1) -> None:
    if value < least:
        raise InputError(f"--{name} takes a whole number of at least {least}, got {value}.")


def check_models(models: tuple[str, ...]) -> None:
    if not models:
        raise InputError("no model was named; expected at least one, e.g. smollm2.")
    twice = sorted({model for model in models if models.count(model) > 1})
    if twice:
        raise InputError(f"model {twice[0]!r} is named twice.")


def check_grid(bits: tuple[int, ...], granularity: tuple[str, ...]) -> None:
    if not bits:
        raise InputError("--bits is empty; expected e.g. 16,8,6,4.")
    for width in bits:
        if not 2 <= width <= UNQUANTIZED_BITS:
            raise InputError(f"--bits takes 2 to 15, or 16 for not quantized; got {width}.")
    if not granularity:
        raise InputError("--granularity is empty; expected e.g. tensor,head,row.")
    for word in granularity:
        check_choice("granularity", word, LOGIT_GRANULARITIES)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        hint = suggest(str(value), map(str, choices))
        raise InputError(f"--{name} does not take {value!r}.{hint}")


def check_unread(job: Any, names: tuple[str, ...], given: str) -> None:
    """Raises InputError for options that say nothing beside another one that is given."""
    for field in dataclasses.fields(job):
        if field.name in names and getattr(job, field.name) != field.default:
            option = field.name.replace("_", "-")
            raise InputError(f"--{option} is not read with {given}: leave --{option} out.")
