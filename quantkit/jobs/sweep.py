"""`quantkit sweep` as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quantkit.errors import InputError
from quantkit.jobs.checks import (
    check_choice,
    check_common,
    check_cpu,
    check_grid,
    check_models,
    check_positive,
    check_unread,
)
from quantkit.jobs.choices import DEFAULT_TEXT
from quantkit.jobs.tasks import (
    ImageClassificationSpec,
    PerplexitySpec,
    TaskSpec,
    parse_task,
    reads_text,
)
from quantkit.recipe import LOGIT_GRIDS, RANGE_KINDS, UNQUANTIZED_BITS, Recipe

_LABELLED: Final = re.compile(r"(?P<label>[A-Za-z0-9][\w.+-]*)=(?P<source>.+)")


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model argument, `[LABEL=]MODEL`.

    Attributes:
        label: What it is called; the same for several seeds of one model. Empty: its own name.
    """

    label: str
    source: str

    @classmethod
    def of(cls, text: str) -> NamedModel:
        """Returns the parts; a path that exists is one, whatever it holds."""
        match = None if Path(text).exists() else _LABELLED.fullmatch(text)
        return cls(label="", source=text) if match is None else cls(**match.groupdict())


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """Accuracy of models x recipes x tasks: bits of the logits, and other recipes.

    Where `calib` names the same source as `eval`, evaluation skips the first `calib_samples`
    blocks: those that calibration takes. With `ranges` it skips those that they were made from.

    Attributes:
        models: Each `[LABEL=]MODEL`; models with one label are seeds of one.
        tasks: Names in the grammar of `quantkit.jobs.tasks`.
        recipes: Measured beside the bits of the logits, e.g. `w8a8` or `kv4`.
        ranges: Runs with `ranges.json`, one a model, for static ranges; their smoothing and their
            ranges of weights are applied to every quantized row.
        keep: Quantizers that stay in float in every row: their names, or a run with
            `sensitivity.json` for those that it suggests.
        allow_overlap: Run although calibration has seen the text, or nobody can tell.
        range, grid: Of the logits' bits: `dynamic`, `static`; `symmetric`, `asymmetric`.
        seq_len, samples: Blocks of the perplexity; `seq_len` is also the longest prompt of
            `needles` and `icl`.
        items: Of every other task, at most.
        seed: Of generated and drawn items, and of the bootstrap.
    """

    models: tuple[str, ...]
    tasks: tuple[str, ...] = ("perplexity",)
    eval: str = DEFAULT_TEXT
    calib: str | None = DEFAULT_TEXT
    recipes: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    allow_overlap: bool = False
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: tuple[str, ...] = ("tensor", "head", "row")
    range: tuple[str, ...] = ("dynamic",)
    grid: tuple[str, ...] = ("symmetric",)
    seq_len: int = 512
    samples: int = 64
    items: int = 200
    calib_samples: int = 128
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_models(self.models)
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("samples", self.samples)
        check_positive("items", self.items)
        check_positive("calib-samples", self.calib_samples, least=0)
        check_positive("seed", self.seed, least=0)
        check_grid(self.bits, self.granularity)
        for word in self.range:
            check_choice("range", word, RANGE_KINDS)
        for word in self.grid:
            check_choice("grid", word, LOGIT_GRIDS)
        self._check_ranges()
        self._check_tasks()

    @property
    def specs(self) -> tuple[TaskSpec, ...]:
        """The tasks as data."""
        return tuple(map(parse_task, self.tasks))

    @property
    def named(self) -> tuple[NamedModel, ...]:
        """The models with their labels."""
        return tuple(map(NamedModel.of, self.models))

    @property
    def reads_images(self) -> bool:
        """Whether the models are classifiers of images."""
        return any(isinstance(spec, ImageClassificationSpec) for spec in self.specs)

    @property
    def reads_text(self) -> bool:
        """Whether a task is made from the evaluation text."""
        return any(map(reads_text, self.specs))

    @property
    def reads_blocks(self) -> bool:
        """Whether blocks of the evaluation text are scored."""
        return any(isinstance(spec, PerplexitySpec) for spec in self.specs)

    def _check_ranges(self) -> None:
        is_swept = any(width != UNQUANTIZED_BITS for width in self.bits)
        if not is_swept:
            check_unread(self, ("range", "grid"), "--bits 16, which quantizes no logits")
        has_static = is_swept and "static" in self.range
        if has_static and set(self.granularity) == {"row"}:
            raise InputError(
                "--range static has no rows per row of the logits: their rows are not those of the "
                "calibration text. Add --granularity tensor or head."
            )
        if has_static and not self.ranges:
            raise InputError(
                "--range static reads calibrated ranges: give --ranges RUN, the folder of a "
                "`quantkit calibrate`."
            )
        for recipe in map(Recipe.parse, self.recipes):
            if recipe.needs_ranges and not self.ranges:
                raise InputError(
                    f"recipe {recipe} reads calibrated ranges: give --ranges RUN, the folder of a "
                    "`quantkit calibrate`."
                )
        is_read = has_static or not all(Recipe.parse(name).is_float for name in self.recipes)
        if self.ranges and not is_read:
            raise InputError(
                "--ranges are read by --range static and by the recipes of --quantize, and neither "
                "is given: add e.g. --quantize w8a8 or --range static."
            )
        if self.ranges:
            check_unread(self, ("calib", "calib_samples", "bos"), "--ranges RUN")

    def _check_tasks(self) -> None:
        if not self.tasks:
            raise InputError("--task is empty; expected e.g. perplexity,multiple-choice.")
        names = [str(spec) for spec in self.specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"task {twice[0]!r} is named twice.")
        images = [isinstance(spec, ImageClassificationSpec) for spec in self.specs]
        if any(images) and not all(images):
            raise InputError(
                "image-classification and tasks of text have no model in common: sweep them one by "
                "one."
            )
        given = f"--task {','.join(names)}"
        if not self.reads_text:
            check_unread(self, ("eval", "calib", "calib_samples"), given)
        if not self.reads_blocks:
            check_unread(self, ("samples",), given)
        if names == [PerplexitySpec.word]:
            check_unread(self, ("items",), given)
        if all(images):
            check_unread(self, ("seq_len", "bos"), given)
