"""What each command is asked to do, as data: one frozen job a command, and its output folder.

A job checks its own words and numbers when it is made, so that a wrong one costs no model load.
The lists of choices stand here, once; help pages and errors read them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from quantkit.errors import InputError, suggest
from quantkit.recipe import LOGIT_GRANULARITIES, UNQUANTIZED_BITS, LogitQuant, Recipe

DEFAULT_TEXT: Final = "pydoc"
DTYPES: Final = ("float32", "bfloat16", "float16")
BOS: Final = ("auto", "always", "never")
METHODS: Final = ("minmax",)
STATS_POINTS: Final = (
    "attention_logit",
    "hidden_state",
    "attention_output",
    "mlp_input",
    "mlp_down_input",
    "linear_input",
)
"""The points that `stats` can measure; the probes' own, in the order of a report."""
DEVICE_MAPS: Final = ("auto",)
ATTENTION_BITS: Final = (16, 8, 6, 4)
OPSETS: Final = (21, 22, 23)
SHIPPED_PAIR: Final[tuple[str, ...]] = ()
"""The matched models that `compare` takes when none is named; none ships in this version."""

_LIMIT: Final = re.compile(r"(cpu|[0-9]{1,3})=([0-9]+(?:\.[0-9]+)?[KMG]i?B)")

NOT_CONFIG: Final = frozenset({"out", "force"})
"""Fields that say where the result goes, not what it is: they do not enter the hash."""


class Job(Protocol):
    """Any of the jobs below."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def out(self) -> str | None: ...

    @property
    def force(self) -> bool: ...


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
        _check_models(self.models)
        _check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        _check_cpu(self.device)
        _check_positive("samples", self.samples)
        if self.rows is not None:
            _check_positive("rows", self.rows, least=0)
        for quantile in self.quantiles:
            if not 0.0 < quantile <= 1.0:
                raise InputError(f"--quantiles takes fractions above 0 up to 1, got {quantile:g}.")
        for point in self.points or ():
            _check_choice("points", point, STATS_POINTS)
        if self.device_map is not None:
            _check_choice("device-map", self.device_map, DEVICE_MAPS)
        if self.max_memory and self.device_map is None:
            raise InputError("--max-memory is for a model that is spread: give --device-map auto.")
        memory_limits(self.max_memory)


@dataclass(frozen=True, kw_only=True)
class CalibrateJob:
    """Ranges of one model from the first `samples` blocks of `calib`."""

    model: str
    calib: str = DEFAULT_TEXT
    seq_len: int = 512
    samples: int = 128
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    method: str = "minmax"
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        _check_cpu(self.device)
        _check_positive("samples", self.samples)
        _check_choice("method", self.method, METHODS)


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """Accuracy of models x bits x granularity.

    Where `calib` names the same source as `eval`, evaluation skips the first `calib_samples`
    blocks: those that calibration takes.
    """

    models: tuple[str, ...]
    eval: str = DEFAULT_TEXT
    calib: str | None = DEFAULT_TEXT
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: tuple[str, ...] = ("tensor", "head", "row")
    seq_len: int = 512
    samples: int = 64
    calib_samples: int = 128
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _check_models(self.models)
        _check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        _check_cpu(self.device)
        _check_positive("samples", self.samples)
        _check_positive("calib-samples", self.calib_samples, least=0)
        _check_grid(self.bits, self.granularity)


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A quantized ONNX graph of one model, and the proof that it does what the model does.

    `samples` blocks of `calib` fix the ranges, `eval_samples` blocks of `eval` measure accuracy.
    `attention_bits` below 16 adds logits to the recipe.
    """

    model: str
    recipe: str = "w8a8"
    calib: str = DEFAULT_TEXT
    eval: str = DEFAULT_TEXT
    seq_len: int = 512
    samples: int = 128
    eval_samples: int = 64
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    opset: int = 21
    attention_bits: int = UNQUANTIZED_BITS
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        _check_cpu(self.device)
        _check_positive("samples", self.samples)
        _check_positive("eval-samples", self.eval_samples)
        _check_choice("opset", self.opset, OPSETS)
        _check_choice("attention-bits", self.attention_bits, ATTENTION_BITS)
        _check_export(self.full_recipe, self.dtype, self.seq_len)

    @property
    def full_recipe(self) -> Recipe:
        """The recipe with `attention_bits` in it.

        Raises:
            InputError: both name a quantization of the logits.
        """
        return with_attention_bits(self.recipe, self.attention_bits)


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Every stage for every model, on one text: first calibration's blocks, then evaluation's."""

    models: tuple[str, ...]
    text: str = DEFAULT_TEXT
    seq_len: int = 512
    calib_samples: int = 128
    eval_samples: int = 64
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: tuple[str, ...] = ("tensor", "head", "row")
    recipe: str = "w8a8"
    attention_bits: int = UNQUANTIZED_BITS
    opset: int = 21
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _check_models(self.models)
        _check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        _check_cpu(self.device)
        _check_positive("calib-samples", self.calib_samples)
        _check_positive("eval-samples", self.eval_samples)
        _check_grid(self.bits, self.granularity)
        _check_choice("opset", self.opset, OPSETS)
        _check_choice("attention-bits", self.attention_bits, ATTENTION_BITS)
        _check_export(self.full_recipe, self.dtype, self.seq_len)

    @property
    def full_recipe(self) -> Recipe:
        """The export's recipe with `attention_bits` in it."""
        return with_attention_bits(self.recipe, self.attention_bits)


def with_attention_bits(recipe: str, attention_bits: int) -> Recipe:
    """Returns the parsed recipe, with logits of that many bits where there are fewer than 16.

    In a graph, logits have static ranges per head: a dynamic absmax would cost two more passes.

    Raises:
        InputError: not a recipe, or the recipe already quantizes the logits.
    """
    parsed = Recipe.parse(recipe)
    if attention_bits == UNQUANTIZED_BITS:
        return parsed
    if parsed.logits is not None:
        raise InputError(
            f"recipe {recipe!r} already quantizes the logits: leave --attention-bits "
            f"{attention_bits} out, or the logits part of the recipe."
        )
    logits = LogitQuant(bits=attention_bits, granularity="head", range="static")
    return dataclasses.replace(parsed, logits=logits)


def config_hash(job: Job) -> str:
    """Returns ten hex digits of the job's configuration: every field but where it is written."""
    names = sorted(name for name in job.__dataclass_fields__ if name not in NOT_CONFIG)
    config = {name: getattr(job, name) for name in names}
    text = json.dumps([type(job).__name__, config], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def default_out(command: str, job: Job) -> Path:
    """Returns `--out` where it was given, else `reports/<command>-<models>-<hash>`."""
    if job.out is not None:
        return Path(job.out)
    models = getattr(job, "models", None) or (getattr(job, "model", "model"),)
    label = "-".join(_slug(model) for model in models)[:60].strip("-.")
    return Path("reports") / f"{command}-{label}-{config_hash(job)}"


def _slug(model: str) -> str:
    """Returns the last part of a path or hub id, in characters every file system has."""
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.") or "model"


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


def _check_common(seq_len: int, batch_size: int, dtype: str, bos: str) -> None:
    _check_positive("seq-len", seq_len, least=2)
    _check_positive("batch-size", batch_size)
    _check_choice("dtype", dtype, DTYPES)
    _check_choice("bos", bos, BOS)


def _check_export(recipe: Recipe, dtype: str, seq_len: int) -> None:
    """Raises InputError for what an export would refuse after minutes of other work."""
    recipe.require_static_logits()
    if dtype != "float32":
        raise InputError(f"export takes float32 models, got --dtype {dtype}.")
    if seq_len < 4:
        raise InputError(f"export takes --seq-len 4 or more, got {seq_len}.")


def _check_cpu(device: str) -> None:
    """Raises InputError for a device on which this version has not been verified."""
    if device != "cpu":
        raise InputError(f"--device takes 'cpu' in this version, got {device!r}.")


def _check_positive(name: str, value: int, least: int = 1) -> None:
    if value < least:
        raise InputError(f"--{name} takes a whole number of at least {least}, got {value}.")


def _check_models(models: tuple[str, ...]) -> None:
    if not models:
        raise InputError("no model was named; expected at least one, e.g. smollm2.")
    twice = sorted({model for model in models if models.count(model) > 1})
    if twice:
        raise InputError(f"model {twice[0]!r} is named twice.")


def _check_grid(bits: tuple[int, ...], granularity: tuple[str, ...]) -> None:
    if not bits:
        raise InputError("--bits is empty; expected e.g. 16,8,6,4.")
    for width in bits:
        if not 2 <= width <= UNQUANTIZED_BITS:
            raise InputError(f"--bits takes 2 to 15, or 16 for not quantized; got {width}.")
    if not granularity:
        raise InputError("--granularity is empty; expected e.g. tensor,head,row.")
    for word in granularity:
        _check_choice("granularity", word, LOGIT_GRANULARITIES)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        hint = suggest(str(value), map(str, choices))
        raise InputError(f"--{name} does not take {value!r}.{hint}")
