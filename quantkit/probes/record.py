"""`record_qk`: one line in an attention that cannot be intercepted (a kernel of its own)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from quantkit.errors import ProbeError
from quantkit.models.families import layout_of
from quantkit.probes.attention_probe import AttentionProbe, Frame

_LISTENING: Final[list[AttentionProbe]] = []


def record_qk(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    map: int | None = None,
    maps: int | None = None,
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
        maps: With `map`: how many there are, the same in each of their calls, which come in order.
            Default: as many as the module's `attention_layout` says, else 1.
        mix: With `map`: the factor of this map's softmax in the effective map, 1 or -lambda.

    Raises:
        ProbeError: shapes or maps that do not fit; a callback that replaces logits (there is no
            attention here to put them into).
    """
    if not _LISTENING:
        return
    for probe in list(_LISTENING):
        if id(module) in probe.names and not probe.quiet:
            _report(probe, module, q, k, scale, mask, map, maps, mix)


def _report(
    probe: AttentionProbe,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None,
    map: int | None,
    maps: int | None,
    mix: float | Tensor,
) -> None:
    frame = probe.frame(module)
    assert frame is not None  # the probe knows the module
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
            None if part is None else part[(None,) * (4 - part.dim())] for part in probe.split(mask)
        )
    extra: dict[str, Any] = {}
    if map is not None or maps is not None:
        extra = {"map": map, "maps": _checked_maps(frame, map, maps), "mix": mix}
    with probe.hushed():
        pairs = probe.see(
            frame, "record_qk", q, k, scale=float(scale), mask=mask, bias=bias, **extra
        )
    if any(edit is not None for _, edit in pairs):
        raise ProbeError(
            f"the logits of {frame.name} come from record_qk: they can be looked at, not replaced."
        )


def _checked_maps(frame: Frame, map: int | None, maps: int | None) -> int:
    """Returns how many maps there are."""
    where = f"record_qk in {frame.name}"
    if map is None:
        raise ProbeError(
            f"{where}: maps={maps} without map; expected map=1 to map={maps}, a call for each, or "
            "neither and an attention_layout on the module."
        )
    count = layout_of(frame.module).maps if maps is None else maps
    if not 1 <= map <= count:
        known = f"maps={maps}" if maps is not None else f"{count} by the module's attention_layout"
        raise ProbeError(
            f"{where}: map={map} of {known}; expected 1 <= map <= maps. For a differential "
            "attention pass maps=2 in both calls."
        )
    if map > 1 and frame.seen:
        before = frame.seen[-1][2][-1][0]
        if (before.map, before.maps) != (map - 1, count):
            raise ProbeError(
                f"{where}: map {map} of {count} comes after map {before.map} of {before.maps}; "
                f"expected map {map - 1} of {count} before it: pass the same maps in each call."
            )
    return count


@contextmanager
def listening(probe: AttentionProbe) -> Iterator[None]:
    """Inside, `record_qk` reports to the probe."""
    _LISTENING.append(probe)
    try:
        yield
    finally:
        _LISTENING.remove(probe)
