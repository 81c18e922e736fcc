"""`quantkit stats` as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from quantkit.errors import InputError
from quantkit.jobs.checks import check_choice, check_common, check_cpu, check_models, check_positive
from quantkit.jobs.choices import DEVICE_MAPS, STATS_POINTS

_LIMIT: Final = re.compile(r"(cpu|[0-9]{1,3})=([0-9]+(?:\.[0-9]+)?[KMG]i?B)")


@dataclass(frozen=True, kw_only=True)
class StatsJob:
    """Outlier statistics of one or more models on the same data.

    Attributes:
        data: None: `pydoc` for text models, `shapes` for image models.
        count_masked: Read "all of QK^T", as the DIFF paper does; `both_readings`: that one too.
        points: Beside attention logits and hidden states; None: all that the model has, but the
            inputs of every linear layer.
        quantiles: Of |x|, as fractions, beside the median.
        rows: Query rows a sequence that enter moments and histogram of attention; None: all.
        layers, linear, allow_unseen: Glob patterns on module names.
        device_map: `auto` spreads a large model over devices, memory and disk.
        max_memory: `device=size` words for it, e.g. `cpu=300MB` or `0=20GB` (GPU 0); what fits in
            none of the devices that are named stays on disk. Empty: what is free now.
    """

    models: tuple[str, ...]
    data: str | None = None
    seq_len: int = 512
    samples: int = 64
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    device_map: str | None = None
    max_memory: tuple[str, ...] = ()
    bos: str = "auto"
    count_masked: bool = False
    both_readings: bool = False
    points: tuple[str, ...] | None = None
    quantiles: tuple[float, ...] = (0.99, 0.999)
    rows: int | None = None
    seed: int = 0
    layers: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    allow_unseen: tuple[str, ...] = ()
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_models(self.models)
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("samples", self.samples)
        if self.rows is not None:
            check_positive("rows", self.rows, least=0)
        for quantile in self.quantiles:
            if not 0.0 < quantile <= 1.0:
                raise InputError(f"--quantiles takes fractions above 0 up to 1, got {quantile:g}.")
        for point in self.points or ():
            check_choice("points", point, STATS_POINTS)
        if self.device_map is not None:
            check_choice("device-map", self.device_map, DEVICE_MAPS)
        if self.max_memory and self.device_map is None:
            raise InputError("--max-memory is for a model that is spread: give --device-map auto.")
        memory_limits(self.max_memory)


def memory_limits(words: tuple[str, ...]) -> dict[int | str, str]:
    """Returns `{"cpu": "300MB", 0: "20GB"}` for `("cpu=300MB", "0=20GB")`; numbers are GPUs.

    Raises:
        InputError: another word, or a device that is named twice.
    """
    limits: dict[int | str, str] = {}
    for word in words:
        found = _LIMIT.fullmatch(word.strip())
        if found is None:
            raise InputError(
                f"--max-memory takes device=size words such as cpu=300MB,0=20GB (devices: cpu, or "
                f"a GPU's number; units: KB, MB, GB, KiB, MiB, GiB); got {word!r}."
            )
        device = found[1] if found[1] == "cpu" else int(found[1])
        if device in limits:
            raise InputError(f"--max-memory names {found[1]} twice.")
        limits[device] = found[2]
    return limits
