"""What a sweep measures, by name: `parse_task` and `str` are inverses.

The grammar:

    task    = NAME [ "=" SOURCE ] { ":" KEY "=" VALUE }

    perplexity                              of the blocks of --eval
    multiple-choice [=FILE.jsonl]           endings of a context, in HellaSwag's fields (ctx,
                                            endings, label); without a file, made from --eval
    needles [:needles=4] [:queries=2] [:tokens=1024] [:depths=0/0.25/0.5/0.75/1]
                                            facts hidden in a context of so many tokens (or
                                            --seq-len, where it is not given)
    icl [:labels=4] [:shots=32] [:orders=5] many-shot classification, in several orders
    lm-eval=TASK                            a task of EleutherAI's harness; several: one by one
    image-classification=FOLDER             top-1; one folder of images a class
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from quantkit.errors import InputError, suggest


@dataclass(frozen=True, kw_only=True)
class PerplexitySpec:
    """Blocks of the evaluation text."""

    word: ClassVar[str] = "perplexity"
    takes_source: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSpec:
    """Which of some endings follows a context; `source` is a `.jsonl`, None: made from --eval."""

    source: str | None = None

    word: ClassVar[str] = "multiple-choice"
    takes_source: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.word if self.source is None else f"{self.word}={self.source}"


@dataclass(frozen=True, kw_only=True)
class NeedlesSpec:
    """Multi-needle retrieval (Ye et al. 2024, "Differential Transformer", section 3.4).

    Attributes:
        needles: Facts in a context; `queries`: how many of them are asked for.
        tokens: Length of the whole prompt, about; None: --seq-len.
        depths: Where the asked ones stand, 0 (first) to 1 (last); samples take turns.
    """

    needles: int = 4
    queries: int = 2
    tokens: int | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    word: ClassVar[str] = "needles"
    takes_source: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _whole(self, "needles", self.needles, 1, 75)
        _whole(self, "queries", self.queries, 1, self.needles)
        if self.tokens is not None:
            _whole(self, "tokens", self.tokens, 64, 1 << 20)
        fine = [0 <= depth <= 1 and depth == round(depth, 4) for depth in self.depths]
        if not fine or not all(fine):
            raise InputError(
                f"task {self.word}: depths go from 0 to 1 with at most four decimals, e.g. "
                "depths=0/0.5/1."
            )

    def __str__(self) -> str:
        return _named(self, needles=self.needles, queries=self.queries, tokens=self.tokens,
                      depths=self.depths)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class IclSpec:
    """Many-shot in-context classification of a synthetic labelled task (ibid., section 3.5).

    Attributes:
        labels: Classes; `shots`: examples before each question, the same number of each class as
            far as they go round; `orders`: permutations of the examples.
    """

    labels: int = 4
    shots: int = 32
    orders: int = 5

    word: ClassVar[str] = "icl"
    takes_source: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _whole(self, "labels", self.labels, 2, 16)
        _whole(self, "shots", self.shots, self.labels, 4096)
        _whole(self, "orders", self.orders, 1, 100)

    def __str__(self) -> str:
        return _named(self, labels=self.labels, shots=self.shots, orders=self.orders)


@dataclass(frozen=True, kw_only=True)
class LmEvalSpec:
    """A task of EleutherAI's lm-evaluation-harness: its name, or the path of its YAML file."""

    source: str

    word: ClassVar[str] = "lm-eval"
    takes_source: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.word}={self.source}"


@dataclass(frozen=True, kw_only=True)
class ImageClassificationSpec:
    """A folder with one folder of images a class."""

    source: str

    word: ClassVar[str] = "image-classification"
    takes_source: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.word}={self.source}"


TaskSpec = (
    PerplexitySpec
    | MultipleChoiceSpec
    | NeedlesSpec
    | IclSpec
    | LmEvalSpec
    | ImageClassificationSpec
)
_SPECS: Final[tuple[type[Any], ...]] = (
    PerplexitySpec, MultipleChoiceSpec, NeedlesSpec, IclSpec, LmEvalSpec, ImageClassificationSpec,
)  # fmt: skip
TASKS: Final = tuple(spec.word for spec in _SPECS)
_OPTION: Final = re.compile(r"([a-z_]+)=([0-9./]+)")


def reads_text(spec: TaskSpec) -> bool:
    """Returns whether the task is made from the evaluation text."""
    made = isinstance(spec, MultipleChoiceSpec) and spec.source is None
    return isinstance(spec, PerplexitySpec) or made


def parse_task(text: str) -> TaskSpec:
    """Returns the task with this name, e.g. `needles:needles=6:queries=2`.

    Raises:
        InputError: not in the grammar; the message shows what is not.
    """
    head, *options = re.split(r":(?=[a-z_]+=[0-9./]+(?::|$))", text.strip())
    word, has_source, source = head.partition("=")
    spec = next((known for known in _SPECS if known.word == word), None)
    if spec is None:
        hint = suggest(word, TASKS)
        raise InputError(f"unknown task {text!r}.{hint}")
    if has_source and not (spec.takes_source and source):
        said = "takes no source" if not spec.takes_source else "has an empty source"
        raise InputError(f"task {text!r}: {spec.word} {said}.")
    values: dict[str, Any] = {"source": source} if has_source else {}
    own = [field.name for field in fields(spec)]
    known = [name for name in own if name != "source"]
    for option in options:
        match = _OPTION.fullmatch(option)
        name = match[1] if match else option
        if match is None or name not in known:
            hint = suggest(name, known) if known else " It takes none."
            raise InputError(f"task {text!r}: unknown option {option!r} of {spec.word}.{hint}")
        if name in values:
            raise InputError(f"task {text!r}: option {name!r} is given twice.")
        values[name] = _value(name, match[2], text)
    if "source" in own and spec is not MultipleChoiceSpec and not has_source:
        raise InputError(f"task {text!r} needs what to measure on: {spec.word}=SOURCE.")
    found: TaskSpec = spec(**values)
    return found


def _value(name: str, digits: str, text: str) -> int | tuple[float, ...]:
    try:
        if name == "depths":
            return tuple(float(part) for part in digits.split("/"))
        return int(digits)
    except ValueError:
        raise InputError(f"task {text!r}: {name} takes numbers, got {digits!r}.") from None


def _whole(spec: Any, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"task {spec.word}: {name} takes {least} to {most}, got {value}.")


def _named(spec: Any, **values: Any) -> str:
    """Returns the name with the options that are not the default's."""
    words: list[str] = [spec.word]
    usual = {field.name: field.default for field in fields(spec)}
    for name, value in values.items():
        if value != usual[name]:
            text = (
                "/".join(repr(float(v)).removesuffix(".0") for v in value)
                if isinstance(value, Sequence)
                else str(value)
            )
            words.append(f"{name}={text}")
    return ":".join(words)
