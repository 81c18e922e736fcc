"""Logits are float32 also where the model's own products are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

_DEVICES: Final = ("cpu", "cuda")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, a product of float32 tensors is one in float32: autocast would round both."""
    enabled = [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]
    if not enabled:
        yield
        return
    with ExitStack() as stack:
        for kind in enabled:
            stack.enter_context(torch.autocast(device_type=kind, enabled=False))
        yield
