"""Any task of EleutherAI's lm-evaluation-harness, through its own API (extra `data`).

The harness makes the prompts, filters what a model answers and scores each sample. A model's
answers are kept as numbers - log-likelihoods, or the tokens that it wrote -, so that a sweep can
deal samples out, keep them and resample them: intervals are a sweep's own, not the harness's.

What is the harness's own: no chat template, as many shots as the task says, drawn with its usual
seed; of choices that are equally likely it takes the first, where quantkit's own tasks count a tie
as wrong. What is not: of a task with more samples than asked for they are drawn, not the first.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quantkit.errors import InputError
from quantkit.jobs.tasks import LmEvalSpec
from quantkit.results import DataInfo
from quantkit.tasks.continuations import planned
from quantkit.tasks.harness_tasks import first_line, loaded_task, quiet, requests_of
from quantkit.tasks.items import fed_info, item_hash
from quantkit.tasks.task import Metric, Rows, Scores, TextForward

if TYPE_CHECKING:  # it imports the harness, which is optional
    from quantkit.tasks.harness_model import Encoder

_NO_TOKEN: Final = -1.0
_CHOICE_METRICS: Final = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")
_MEANS: Final = ("mean", "nanmean")


@dataclass(frozen=True, kw_only=True, eq=False)
class LmEval:
    """A task of the harness with its samples.

    A row has the same number of columns for each of a sample's requests: log-likelihood and whether
    it is what greedy decoding writes; or the tokens that were written, -1 after the last, NaN where
    the model says no numbers to choose one by.

    Attributes:
        name: As the specification.
        task: The harness's; `requests`: its instances, by sample.
        encoder: Tokenizes them.
        width: Columns of a request.
    """

    name: str
    task: Any
    requests: tuple[tuple[Any, ...], ...]
    encoder: Encoder
    batch_size: int
    width: int
    item_hashes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        spec: LmEvalSpec,
        tokenizer: Any,
        *,
        items: int = 100,
        seed: int = 0,
        batch_size: int = 4,
        max_length: int | None = None,
        bos: str = "auto",
    ) -> LmEval:
        """Returns the task for one tokenizer.

        Args:
            items: How many samples; of a task that has more they are drawn by `seed`.
            max_length: Positions that the model takes.

        Raises:
            InputError: the harness is not installed, it has no such task, the task's data cannot be
                had, or it is one that no text model can be scored on here.
        """
        if tokenizer is None:
            raise InputError("the model folder has no tokenizer: expected one, to read text with.")
        with quiet():
            task = loaded_task(spec.source)
            requests = requests_of(task, spec.source, items, seed)
            # it imports the harness
            model = importlib.import_module("quantkit.tasks.harness_model")
        encoder = model.Encoder(tokenizer, max_length=max_length, bos=bos)
        width = 2
        for request in (request for own in requests for request in own):
            if request.request_type == "generate_until":
                width = max(width, encoder.prompt(*request.args).limit)
        hashes = (
            item_hash([str(request.args) for request in own], str(task.doc_to_target(own[0].doc)))
            for own in requests
        )
        return cls(
            name=str(spec),
            task=task,
            requests=requests,
            encoder=encoder,
            batch_size=batch_size,
            width=width,
            item_hashes=tuple(hashes),
        )

    @property
    def unit(self) -> str:
        """What is resampled."""
        return "samples"

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Samples whose requests fill a forward pass."""
        most = max(len(own) for own in self.requests)
        longest = [max(map(self._positions, own)) for own in self.requests]
        return planned(longest, max(1, self.batch_size // most))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Positions that each batch computes, at most: generated text may end early."""
        own = [sum(map(self._positions, requests)) for requests in self.requests]
        return tuple(sum(own[index] for index in batch) for batch in self.batches)

    @property
    def data(self) -> DataInfo:
        """What a result says about the samples."""
        fed, cut = [], 0
        for request in (request for own in self.requests for request in own):
            if request.request_type == "generate_until":
                prompt = self.encoder.prompt(*request.args)
                fed.append(prompt.ids)
                cut += prompt.cut > 0
            else:
                pairs = self._pairs(request)
                fed += [pair.fed for pair in pairs]
                cut += any(pair.cut for pair in pairs)
        return fed_info(
            fed,
            self.item_hashes,
            cut=cut,
            source=self.name.partition("=")[2],
            batch_size=self.batch_size,
            bos=self.encoder.bos,
        )

    def run(self, forward: TextForward, items: Sequence[int]) -> Rows:
        """Returns the answers to the samples' requests, `[items, columns]`."""
        harness = importlib.import_module("quantkit.tasks.harness_model")
        model = harness.HarnessModel(forward, self.encoder, batch_size=self.batch_size)
        rows = np.full((len(items), max(len(own) for own in self.requests), self.width), _NO_TOKEN)
        places: dict[str, list[tuple[int, int]]] = {}
        for row, index in enumerate(items):
            for column, request in enumerate(self.requests[index]):
                places.setdefault(request.request_type, []).append((row, column))
        for kind, where in places.items():
            asked = [self.requests[items[row]][column] for row, column in where]
            if kind == "generate_until":
                written = model.written([self.encoder.prompt(*request.args) for request in asked])
                answers = [[math.nan] * self.width if ids is None else ids for ids in written]
            elif kind == "loglikelihood_rolling":
                answers = [(value, 0.0) for value in model.loglikelihood_rolling(asked)]
            else:
                answers = model.loglikelihood(asked)
            for (row, column), answer in zip(where, answers, strict=True):
                rows[row, column, : len(answer)] = answer
        return rows.reshape(len(items), -1)

    def scores(self, rows: Rows) -> Scores:
        """Returns every metric that is a mean over samples; those of all at once are details.

        Raises:
            InputError: the task has no metric of the first kind.
        """
        answers = rows.reshape(len(self.requests), -1, self.width)
        for own, given in zip(self.requests, answers, strict=True):
            for request, answer in zip(own, given, strict=False):
                request.resps = [self._response(request, answer)] * (request.repeats or 1)
                request.filtered_resps = {}
        metrics: list[Metric] = []
        details: dict[str, float] = {}
        with quiet():
            for (name, key), values in self._by_metric().items():
                shown = name if key == "none" else f"{name},{key}"
                metric = self._metric(name, shown, values)
                if metric is not None:
                    metrics.append(metric)
                else:
                    details |= self._whole(name, shown, values)
        if not metrics:
            raise InputError(f"{self.name}: none of its metrics is a mean over samples.")
        return Scores(metrics=tuple(metrics), details=details)

    def _whole(self, name: str, shown: str, values: Sequence[Any]) -> dict[str, float]:
        """Returns a figure of all samples at once; nothing where it is no number."""
        try:
            found = self.task.aggregation()[name]([v for v in values if v is not None])
        except Exception as error:  # of every task's own code
            raise InputError(f"{self.name}: metric {shown}: {first_line(error)}") from error
        return {shown: float(found)} if isinstance(found, int | float | np.number) else {}

    def _pairs(self, request: Any) -> Sequence[Any]:
        if request.request_type == "loglikelihood_rolling":
            windows: Sequence[Any] = self.encoder.windows(*request.args)
            return windows
        return (self.encoder.pair(*request.args),)

    def _positions(self, request: Any) -> int:
        if request.request_type == "generate_until":
            prompt = self.encoder.prompt(*request.args)
            # each token is a forward pass over all before it
            lengths = range(len(prompt.ids), len(prompt.ids) + prompt.limit)
            return sum(lengths)
        return sum(len(pair.fed) for pair in self._pairs(request))

    def _response(self, request: Any, answer: Any) -> Any:
        if request.request_type == "generate_until":
            ids = [int(token) for token in answer if token != _NO_TOKEN]
            return self.encoder.text(self.encoder.prompt(*request.args), ids)
        if request.request_type == "loglikelihood_rolling":
            return float(answer[0])
        return float(answer[0]), bool(answer[1])

    def _by_metric(self) -> dict[tuple[str, str], list[Any]]:
        """Returns what the harness finds, by metric and filter: one value a sample, or None."""
        self.task.apply_filters()
        found: dict[tuple[str, str], list[Any]] = {}
        for index, own in enumerate(self.requests):
            for key in own[0].filtered_resps:
                answers = [request.filtered_resps[key] for request in own]
                try:
                    values = self.task.process_results(own[0].doc, answers)
                except Exception as error:  # the task's own code, or what it reads of its data
                    raise InputError(
                        f"task {self.name}: the harness cannot score sample {index} "
                        f"({type(error).__name__}: {str(error)[:200]}): mend the task's file."
                    ) from error
                for name, value in values.items():
                    seen = found.setdefault((name, key), [None] * len(self.requests))
                    seen[index] = value
        return found

    def _metric(self, name: str, shown: str, values: Sequence[Any]) -> Metric | None:
        """Returns the metric where the harness averages it, also as a logarithm; else None."""
        aggregation = self.task.aggregation().get(name)
        # the harness averages what names none; of one without a name nothing is known
        how = "mean" if aggregation is None else getattr(aggregation, "__name__", "")
        pairs = [_parts(how, value) for value in values]
        if any(pair is None for pair in pairs):
            return None
        total, weight = np.array(pairs, dtype=np.float64).T
        is_binary = how in _MEANS and bool(np.isin(total[weight > 0], (0, 1)).all())
        chance = None
        if self.task.OUTPUT_TYPE == "multiple_choice" and name in _CHOICE_METRICS:
            chance = self._chance()
        return Metric(
            name=shown,
            total=total,
            weight=weight,
            link="exp" if how in ("perplexity", "weighted_perplexity") else "identity",
            higher_is_better=bool(self.task.higher_is_better().get(name, True)),
            chance=chance,
            # a sample that has no value is no trial
            trials=chance is not None and is_binary and bool((weight > 0).all()),
            is_share=is_binary,
        )

    def _chance(self) -> float:
        """Returns the mean share of right choices: of several right ones each will do."""
        shares = []
        for own in self.requests:
            doc = own[0].doc
            # not its requests, which are more where choices are also asked for without a context
            count = len(self.task.doc_to_choice(doc))
            right = self.task.doc_to_target(doc) if self.task.multiple_target else None
            shares.append((len(set(right)) if isinstance(right, list) else 1) / count)
        return float(np.mean(shares))


def _parts(how: str, value: Any) -> tuple[float, float] | None:
    """Returns a sample's part of sum(total) / sum(weight); None where it is no such figure."""
    if value is None:
        return 0.0, 0.0
    if how in ("weighted_perplexity", "bits_per_byte"):
        total, weight = value
        return -total / (math.log(2) if how == "bits_per_byte" else 1.0), weight
    if not isinstance(value, bool | int | float | np.number):
        return None
    if how == "perplexity":
        return -float(value), 1.0
    if how == "nanmean" and math.isnan(value):
        return 0.0, 0.0
    return (float(value), 1.0) if how in _MEANS else None
