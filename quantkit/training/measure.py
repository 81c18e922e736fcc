"""What a model has become, on held-out rows: its loss in float and quantized, and its outliers.

The same rows and items at every step and for every arm. Time: a forward pass over them in float32
for each of the recipes and one more; memory as one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import InputError, ProbeError
from quantkit.jobs import IclSpec, NeedlesSpec, PairSpec
from quantkit.models import LoadedModel, attention_modules, differential_lambda
from quantkit.monitoring.step import StepObserver
from quantkit.quantization import fake_quantized
from quantkit.results import Measurement
from quantkit.tasks import Icl, Needles
from quantkit.tasks.forward import text_forward
from quantkit.tasks.task import Task

GRANULARITIES: Final = ("tensor", "head", "row")
SEED: Final = 0
"""Of the generated items; those of training rows are others, by their indices."""
_AT_ONCE: Final = 4


def recipes_of(bits: Sequence[int]) -> list[str]:
    """Returns the recipes of the logits that are measured: each width at each granularity."""
    return [f"logits{width}:{word}" for width in bits for word in GRANULARITIES]


class Gauge:
    """Measures the models of a pair at any step."""

    def __init__(self, spec: PairSpec, held_out: np.ndarray[Any, Any], tokenizer: Any) -> None:
        """Takes held-out rows, uint16 `[rows, context]`, of which the first ones are read.

        Raises:
            InputError: there are fewer than are to be measured on.
        """
        count = spec.records.measure_rows
        if len(held_out) < count:
            raise InputError(
                f"[records] measure_rows: the held-out text gives {len(held_out)} rows of "
                f"{spec.sizes.context} tokens, expected at least {count}: measure fewer, or give "
                "more text or a larger [data] held_out."
            )
        self._rows = torch.from_numpy(np.array(held_out[:count], dtype=np.int64))
        self._tokenizer = tokenizer
        self._recipes = recipes_of(spec.records.measure_bits)
        self._tasks = _tasks(spec, tokenizer)

    def measured(self, model: Any, *, step: int, tokens: int) -> Measurement:
        """Returns the figures; the model is left as it was."""
        was_training = model.training
        model.eval()
        try:
            observer = StepObserver()
            with observer.attached(model):
                loss = self._loss(model)
            seen = observer.finish(step)
            quantized: dict[str, float] = {}
            accuracies = {name: _accuracy(task, model) for name, task in self._tasks.items()}
            quantized_accuracies: dict[str, float] = {}
            for recipe in self._recipes:
                with fake_quantized(model, recipe):
                    quantized[recipe] = self._loss(model)
                    for name, task in self._tasks.items():
                        quantized_accuracies[f"{name} {recipe}"] = _accuracy(task, model)
        finally:
            model.train(was_training)
        return Measurement(
            step=step,
            tokens=tokens,
            loss=loss,
            quantized_loss=quantized,
            max_logit=max(curve.max for curve in seen.logits),
            abs_max_logit=max(curve.abs_max for curve in seen.logits),
            abs_max_hidden=max(curve.abs_max for curve in seen.hidden),
            kurtosis=max(curve.kurtosis for curve in seen.hidden),
            inf_norm_mean=max(curve.inf_norm_mean for curve in seen.hidden),
            accuracies=accuracies,
            quantized_accuracies=quantized_accuracies,
            lambdas=_lambdas(model),
        )

    def _loss(self, model: Any) -> float:
        """Returns the mean negative log-likelihood of a token after the first, nats."""
        device = next(model.parameters()).device
        total, count = 0.0, 0
        with torch.no_grad():
            for rows in self._rows.split(_AT_ONCE):  # type: ignore[no-untyped-call]
                rows = rows.to(device)
                logits: Tensor = model(input_ids=rows, use_cache=False).logits
                likely = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"
                )
                total += float(likely)
                count += rows[:, 1:].numel()
        return total / count


def _tasks(spec: PairSpec, tokenizer: Any) -> dict[str, Task[Any]]:
    """Returns the generated tasks that the pair is trained for."""
    items, context = spec.records.measure_items, spec.sizes.context
    found: dict[str, Task[Any]] = {}
    if items and spec.data.needles:
        found["needles"] = Needles.of(
            NeedlesSpec(), tokenizer, samples=items, seed=SEED, seq_len=context, batch_size=_AT_ONCE
        )
    if items and spec.data.icl:
        icl = IclSpec(labels=4, shots=16, orders=1)
        found["icl"] = Icl.of(
            icl, tokenizer, samples=items, seed=SEED, seq_len=context, batch_size=_AT_ONCE
        )
    return found


def _accuracy(task: Task[Any], model: Any) -> float:
    """Returns the value of the task's first metric."""
    loaded = LoadedModel(name="", source="", model=model, tokenizer=None, sha256="")
    forward = text_forward(loaded)
    parts = [task.run(forward, batch) for batch in task.batches]
    rows = np.empty((len(task.item_hashes), parts[0].shape[1]))
    for batch, part in zip(task.batches, parts, strict=True):
        rows[list(batch)] = part
    return task.scores(rows).metrics[0].value


def _lambdas(model: Any) -> list[float]:
    """Returns lambda of each layer; empty where there is none, or one for each token."""
    found = []
    for _, module in attention_modules(model):
        try:
            found.append(differential_lambda(module))
        except ProbeError:
            return []
    return found
