"""`quantkit export` as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from quantkit.errors import InputError
from quantkit.jobs.checks import (
    check_choice,
    check_common,
    check_cpu,
    check_positive,
    check_unread,
)
from quantkit.jobs.choices import ATTENTION_BITS, DEFAULT_TEXT, LAYOUTS, OPSETS
from quantkit.jobs.formats import STORAGES, ExportFormat, Storage
from quantkit.jobs.tasks import parse_task
from quantkit.numerics.methods import parse_methods
from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A quantized ONNX graph of one model, and the proof that it does what the model does.

    `samples` blocks of `calib` fix the ranges, `eval_samples` blocks of `eval` measure accuracy.
    `attention_bits` below 16 adds logits to the recipe.

    Attributes:
        model: Any model, or an `.onnx` file, which is rewritten as it is.
        recipe: A recipe, a name of `EXPORT_NAMES`, `16` for half precision, or `auto`.
        storage: How weights by group are held; None: as the name says, else Q/DQ.
        layout: Whose names the graph and its files have: transformers' or optimum's.
        max_drop: Of `auto`: what the metric may lose, relative for perplexity, in points else.
        task: Of `auto`: what is measured, as in a sweep.
        search_samples: Of `auto`: blocks that the choice is made on; they come between those of
            calibration and those of `eval`.
        method: How ranges are chosen where they are calibrated here.
        tokenizer: Of an `.onnx` file that reads text: a folder with its tokenizer; None: the file's
            own folder.
        ranges: A run with `ranges.json`, to take ranges and smoothing from instead of calibrating.
        keep: Quantizers that stay in float: their names, or a run with `sensitivity.json` for those
            that it suggests.
        allow_overlap: Run although calibration has seen the evaluation text, or nobody can tell.
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
    storage: str | None = None
    layout: str = "transformers"
    max_drop: float | None = None
    task: str = "perplexity"
    search_samples: int = 16
    method: str = "minmax"
    tokenizer: str | None = None
    ranges: str | None = None
    keep: tuple[str, ...] = ()
    allow_overlap: bool = False
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("samples", self.samples)
        check_positive("eval-samples", self.eval_samples)
        check_choice("opset", self.opset, OPSETS)
        check_choice("attention-bits", self.attention_bits, ATTENTION_BITS)
        check_choice("layout", self.layout, LAYOUTS)
        check_positive("search-samples", self.search_samples)
        parse_methods(self.method, ("linear_input",))
        parse_task(self.task)
        if self.storage is not None:
            check_choice("storage", self.storage, STORAGES)
        if self.ranges is not None:
            check_unread(self, ("calib", "samples", "bos", "method"), "--ranges RUN")
        if self.is_graph:
            check_unread(self, ("layout",), "an .onnx file, whose names stay")
        else:
            check_unread(self, ("tokenizer",), "a model that is no .onnx file")
        if self.format.is_auto:
            self._check_auto()
        else:
            check_unread(self, ("max_drop", "task", "search_samples"), f"--quantize {self.recipe}")
        check_export(self.full_recipe, self.dtype, self.seq_len)

    def _check_auto(self) -> None:
        check_unread(self, ("ranges", "keep"), "--quantize auto, which finds both")
        if self.max_drop is None:
            raise InputError(
                "--quantize auto needs a budget: expected e.g. --max-drop 1%, relative for "
                "perplexity and in points for accuracies."
            )
        if not 0 < self.max_drop < 1:
            raise InputError(
                f"--max-drop takes a share between 0 and 1 such as 1% or 0.01, got {self.max_drop}."
            )
        if self.is_graph:
            raise InputError(
                "--quantize auto takes a model of transformers, not an .onnx file: a graph has no "
                "layers to smooth. Name a recipe, e.g. --quantize w8a8."
            )

    @property
    def is_graph(self) -> bool:
        """Whether the model is a graph already."""
        return self.model.lower().endswith(".onnx")

    @property
    def format(self) -> ExportFormat:
        """What the graph is to become, without `attention_bits`."""
        return ExportFormat.parse(self.recipe, cast(Storage | None, self.storage))

    @property
    def full_recipe(self) -> Recipe:
        """The recipe with `attention_bits` in it.

        Raises:
            InputError: both name a quantization of the logits.
        """
        return with_attention_bits(self.recipe, self.attention_bits)


def with_attention_bits(recipe: str, attention_bits: int) -> Recipe:
    """Returns the parsed recipe, with logits of that many bits where there are fewer than 16.

    In a graph, logits have static ranges per head: a dynamic absmax would cost two more passes.

    Raises:
        InputError: not a recipe, or the recipe already quantizes the logits.
    """
    found = ExportFormat.parse(recipe)
    parsed = found.recipe
    if attention_bits != UNQUANTIZED_BITS and found.is_half:
        raise InputError(
            "half precision quantizes nothing: leave --attention-bits out, or name a recipe."
        )
    if attention_bits == UNQUANTIZED_BITS:
        return parsed
    if parsed.logits is not None:
        raise InputError(
            f"recipe {recipe!r} already quantizes the logits: leave --attention-bits "
            f"{attention_bits} out, or the logits part of the recipe."
        )
    logits = LogitQuant(bits=attention_bits, granularity="head", range="static")
    return dataclasses.replace(parsed, logits=logits)


def check_export(recipe: Recipe, dtype: str, seq_len: int) -> None:
    """Raises InputError for what an export would refuse after minutes of other work."""
    recipe.require_exportable()
    if dtype != "float32":
        raise InputError(f"export takes float32 models, got --dtype {dtype}.")
    if seq_len < 4:
        raise InputError(f"export takes --seq-len 4 or more, got {seq_len}.")
