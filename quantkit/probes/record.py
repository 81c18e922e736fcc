"""`record_qk`: one line in an attention that nobody can intercept (a kernel of its own)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn

from quantkit.errors import ProbeError
from quantkit.probes.recording import Recording

_LISTENING: Final[list[Recording]] = []


def record_qk(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    map: int | None = None,
    mix: float | Tensor = 1.0,
) -> None:
    """Reports the attention logits `scale * q k^T` of a module; outside a recording does nothing.

    Call it before the attention itself: what is seen of that by other means is then not counted
    again.

    Args:
        module: The attention module (`self`); its name is its place in the recorded model.
        q: `[batch, heads, query, d]`, as it is multiplied: after RoPE and norms.
        k: `[batch, kv_heads, key, d]`.
        mask: What is attended to, bool, or what is added to the logits; broadcasts to
            `[batch, heads, query, key]`.
        map: 1 or 2 for differential attention that calls once a map; without it the module's
            `attention_layout` says how maps lie in q and k (one map where it has none).
        mix: With `map`: the factor of this map's softmax in the effective map, 1 or -lambda.

    Raises:
        ProbeError: shapes that do not fit; a callback that replaces logits (there is no attention
            here to put them into).
    """
    if not _LISTENING:
        return
    for recording in list(_LISTENING):
        if id(module) in recording.names and not recording.quiet:
            _report(recording, module, q, k, scale, mask, map, mix)


def _report(
    recording: Recording,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None,
    map: int | None,
    mix: float | Tensor,
) -> None:
    frame = recording.frame(module)
    assert frame is not None  # the recording knows the module
    fits = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % k.shape[1]:
        raise ProbeError(
            f"record_qk in {frame.name}: expected q [batch, heads, query, d] and k [batch, "
            f"kv_heads, key, d], got {list(q.shape)} and {list(k.shape)}."
        )
    bias = None
    if mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        try:
            mask.expand(full)
        except RuntimeError:
            raise ProbeError(
                f"record_qk in {frame.name}: a mask of {list(mask.shape)} does not broadcast to "
                f"[batch, heads, query, key] = {list(full)}."
            ) from None
        mask, bias = (
            None if part is None else part[(None,) * (4 - part.dim())]
            for part in recording.split(mask)
        )
    extra = {} if map is None else {"map": map, "mix": mix}
    with recording.hushed():
        pairs = recording.see(
            frame, "record_qk", q, k, scale=float(scale), mask=mask, bias=bias, **extra
        )
    if any(transform is not None for _, transform in pairs):
        raise ProbeError(
            f"the logits of {frame.name} come from record_qk: they can be looked at, not replaced."
        )


@contextmanager
def listening(recording: Recording) -> Iterator[None]:
    """Inside, `record_qk` reports to the recording."""
    _LISTENING.append(recording)
    try:
        yield
    finally:
        _LISTENING.remove(recording)
