"""`quantkit compare` as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from quantkit.errors import InputError
from quantkit.jobs.checks import (
    check_choice,
    check_common,
    check_cpu,
    check_grid,
    check_models,
    check_positive,
)
from quantkit.jobs.choices import ATTENTION_BITS, DEFAULT_TEXT, OPSETS, SHIPPED_PAIR
from quantkit.jobs.export import check_export, with_attention_bits
from quantkit.jobs.formats import ExportFormat
from quantkit.jobs.sweep import NamedModel, SweepJob
from quantkit.jobs.tasks import PerplexitySpec, parse_task, reads_text
from quantkit.recipe import UNQUANTIZED_BITS, Recipe

PAIR_DEFAULTS: Final[dict[str, Any]] = {
    "text": "docstrings",
    "calib_samples": 32,
    "eval_samples": 16,
    "tasks": (
        "perplexity",
        "multiple-choice",
        "needles:needles=1:queries=1:tokens=192",
        "needles:needles=2:queries=2:tokens=192",
        "needles:needles=4:queries=2:tokens=192",
        "needles:needles=6:queries=2:tokens=192",
        "icl:shots=16:orders=2",
    ),
    "items": 10,
    "bits": (16, 8, 6, 5, 4, 3),
    "range": ("dynamic", "static"),
    "both_readings": True,
}
"""What `compare` does for the shipped pair where it does something else for models that are named.

Held-out text of a kind that the pair was trained on, the paper's bits (Figure 8) and its numbers of
needles and questions (section 3.4). Short prompts and few items, so that it takes minutes on two
cores: they say what moves far, and `--items` and `--eval-samples` say more.
"""


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Every stage for every model, on one text: first calibration's blocks, then evaluation's.

    Attributes:
        models: Each `[LABEL=]MODEL`, as of a sweep.
        both_readings: Statistics of the logits over all of QK^T too, as the DIFF paper counts.
        tasks, items, bits, granularity, range: As of a sweep; static ranges are those that the
            comparison calibrates.
        recipe, attention_bits, opset: Of the export.
    """

    models: tuple[str, ...]
    text: str = DEFAULT_TEXT
    seq_len: int = 512
    calib_samples: int = 128
    eval_samples: int = 64
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    both_readings: bool = False
    tasks: tuple[str, ...] = ("perplexity",)
    items: int = 200
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: tuple[str, ...] = ("tensor", "head", "row")
    range: tuple[str, ...] = ("dynamic",)
    recipe: str = "w8a8"
    attention_bits: int = UNQUANTIZED_BITS
    opset: int = 21
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_models(self.models)
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("calib-samples", self.calib_samples)
        check_positive("eval-samples", self.eval_samples)
        check_grid(self.bits, self.granularity)
        check_choice("opset", self.opset, OPSETS)
        check_choice("attention-bits", self.attention_bits, ATTENTION_BITS)
        form = ExportFormat.parse(self.recipe)
        if form.is_auto or form.is_half:
            raise InputError(
                f"compare exports a recipe, got {self.recipe!r}: use quantkit export for it."
            )
        check_export(self.full_recipe, self.dtype, self.seq_len)
        if self.sweep(self.models if self.has_static else ()).reads_images:
            raise InputError(
                "compare takes language models: for --task image-classification use quantkit stats "
                "and quantkit sweep."
            )

    @classmethod
    def of_pair(cls, **given: Any) -> Self:
        """Returns the comparison of the shipped pair: `PAIR_DEFAULTS`, but for what is given.

        A default that the given fields leave unread is not among them.

        Raises:
            InputError: a path of the working folder has the name of one of the two, and would be
                loaded in its place.
        """
        for name in SHIPPED_PAIR:
            if Path(name).exists():
                raise InputError(
                    f"./{name} hides the shipped model {name!r}: expected no path of that name "
                    "here. Run elsewhere, or name models to compare those."
                )
        values = {"models": SHIPPED_PAIR} | PAIR_DEFAULTS | given
        unread = {"items"} if tuple(values["tasks"]) == (PerplexitySpec.word,) else set()
        if {*values["bits"]} == {UNQUANTIZED_BITS} or {*values.get("granularity", ())} == {"row"}:
            unread.add("range")
        return cls(**{k: value for k, value in values.items() if k in given or k not in unread})

    @property
    def full_recipe(self) -> Recipe:
        """The export's recipe with `attention_bits` in it."""
        return with_attention_bits(self.recipe, self.attention_bits)

    @property
    def named(self) -> tuple[NamedModel, ...]:
        """The models with their labels."""
        return tuple(map(NamedModel.of, self.models))

    @property
    def has_static(self) -> bool:
        """Whether a row of the sweep reads calibrated ranges."""
        return "static" in self.range

    def sweep(self, ranges: tuple[str, ...] = ()) -> SweepJob:
        """Returns its sweep, with those fields that this sweep reads.

        Args:
            ranges: The runs with the models' ranges, where a row is static.
        """
        specs = tuple(map(parse_task, self.tasks))
        read: dict[str, Any] = {}
        if any(map(reads_text, specs)):
            read["eval"] = self.text
            if not ranges:
                read |= {"calib": self.text, "calib_samples": self.calib_samples}
        if any(isinstance(spec, PerplexitySpec) for spec in specs):
            read["samples"] = self.eval_samples
        if not ranges:  # else that of the ranges
            read["bos"] = self.bos
        return SweepJob(
            models=self.models,
            tasks=self.tasks,
            items=self.items,
            bits=self.bits,
            granularity=self.granularity,
            range=self.range,
            ranges=ranges,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            **read,
        )
