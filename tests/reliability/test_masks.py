"""Kind 1: whatever stands for "masked", in any layout of a batch, no figure and no grid sees it.

The oracle runs each sequence alone, without padding: it has no mask but the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantkit.calibration.watch import Watch
from quantkit.errors import ProbeError
from quantkit.outliers import record
from quantkit.probes import Activation, AttentionLogits, attach
from quantkit.probes.masks import split_additive
from quantkit.quantization import fake_quantized
from quantkit.tasks.perplexity import Perplexity
from tests.calibration.oracle import brute_force
from tests.outliers.oracle import Stored, check, rows_of, sliced, store

KEYS = 10
LENGTHS = (6, 7, 10)  # padded on the left, padded on the right, not padded
VALUES = {
    "inf": -torch.inf,
    "float32 min": torch.finfo(torch.float32).min,
    "bfloat16 min": torch.finfo(torch.bfloat16).min,
    "float16 min": torch.finfo(torch.float16).min,
    "1e9": -1e9,
    "1e4": -1e4,
    "100": -100.0,
}
FORMS = ("two dimensions", "bool", *VALUES)
FAMILIES = ("llama", "diffllama", "mistral_window")


@pytest.fixture(autouse=True)
def one_thread_without_gradients() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def families(make_family: Any) -> dict[str, tuple[Any, list[Tensor], Stored]]:
    rows = rows_of(LENGTHS)
    models = {family: make_family(family) for family in FAMILIES}
    return {family: (model, rows, store(model, rows)) for family, model in models.items()}


def batch_of(rows: list[Tensor], *, masked_row: bool = False) -> tuple[Tensor, Tensor]:
    """(ids, which are real): the first row padded on the left, the others on the right."""
    count = len(rows) + masked_row
    ids, real = torch.full((count, KEYS), 5), torch.zeros(count, KEYS, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(KEYS - len(row), KEYS) if index == 0 else slice(0, len(row))
        ids[index, place], real[index, place] = row, 1
    return ids, real


def inputs_of(
    rows: list[Tensor], form: str, *, window: int | None = None, masked_row: bool = False
) -> dict[str, Tensor]:
    """What the model is called with, its mask in one of `FORMS`."""
    ids, real = batch_of(rows, masked_row=masked_row)
    places = (real.cumsum(1) - 1).clamp_min(0)
    mask: Tensor = real
    if form != "two dimensions":
        distance = torch.arange(KEYS)[:, None] - torch.arange(KEYS)
        seen = (distance >= 0) & (distance < (window or KEYS)) & real.bool()[:, None, None]
        mask = seen
        if form != "bool":
            mask = torch.zeros(seen.shape).masked_fill(~seen, VALUES[form])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places}


def window_of(model: Any) -> int | None:
    return getattr(model.config, "sliding_window", None)


def valid_logits(call: AttentionLogits, sequence: int) -> list[np.ndarray[Any, Any]]:
    """The logits that count, in the order of query and key, of each head of one sequence."""
    parts: list[list[Tensor]] = [[] for _ in range(call.heads)]
    for tile in call.tiles():
        valid = tile.valid.expand_as(tile.logits)[sequence]
        for head, logits in enumerate(tile.logits[sequence]):
            parts[head].append(logits[valid[head]])
    return [torch.cat(part).numpy() for part in parts]


@pytest.mark.kind(1, "probes", "stats")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_a_batch_are_those_of_its_rows_alone(
    family: str, implementation: str, form: str, families: Any
) -> None:
    """Over -inf a row without a key is NaN in eager, and from there on in all: layer 0 is left."""
    model, rows, stored = families[family]
    model.set_attn_implementation(implementation)
    if (implementation, form) == ("eager", "bool"):  # the model adds it: nothing is masked
        with (
            pytest.raises(ProbeError, match="adds 0 and 1 where it should mask"),
            attach(model, {"attention_logit": lambda call: None}),
        ):
            model(**inputs_of(rows, form))
        return
    seen: list[AttentionLogits] = []
    states: list[Activation] = []
    with attach(model, {"attention_logit": seen.append, "hidden_state": states.append}):
        model(**inputs_of(rows, form, window=window_of(model), masked_row=True))
    for call in seen[:1] if form == "inf" else seen:
        assert call.bias is None
        for sequence, row in enumerate(rows):
            valid = stored.mask(len(row))
            for head, found in enumerate(valid_logits(call, sequence)):
                wanted = stored.logits[sequence][call.layer][call.map, head][valid]
                np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)
        assert all(len(found) == 0 for found in valid_logits(call, len(rows)))
    wanted_real = batch_of(rows, masked_row=True)[1].bool()
    assert all(torch.equal(visit.real, wanted_real) for visit in states)


@pytest.mark.kind(1, "stats")
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "100"), ("diffllama", "two dimensions"), ("mistral_window", "bool")],
)
def test_every_statistic_of_a_mixed_batch(family: str, form: str, families: Any) -> None:
    """Maxima, kurtosis, entropy, sinks, lambda, outlier rules: `check` compares them all."""
    model, rows, stored = families[family]
    model.set_attn_implementation("sdpa")
    with record(model, points=()) as recording:
        model(**inputs_of(rows, form, window=window_of(model)))
    check(recording.stats(), stored, rel=1e-4)


@pytest.mark.kind(1, "stats")
def test_a_row_without_a_token_is_in_no_statistic(families: Any) -> None:
    model, rows, _ = families["llama"]
    found = []
    for masked_row in (False, True):
        with record(model, points=()) as recording:
            model(**inputs_of(rows, "two dimensions", masked_row=masked_row))
        found.append(recording.stats().summary)
    for name in ("attention_logit", "hidden_state"):
        one, two = (getattr(summary, name) for summary in found)
        assert (one.count, one.max, one.abs_top) == (two.count, two.max, two.abs_top)
        assert one.inf_norm_mean == two.inf_norm_mean
    assert found[0].sink_rate == found[1].sink_rate
    assert found[0].attention_entropy == pytest.approx(found[1].attention_entropy, rel=1e-12)


@pytest.mark.kind(1, "calibrate")
@pytest.mark.parametrize("form", ["bool", "float32 min", "100"])
@pytest.mark.parametrize("family", ["llama", "diffllama"])
def test_ranges_and_histograms_are_of_what_is_attended_to(
    family: str, form: str, families: Any
) -> None:
    model, rows, _ = families[family]
    expected = brute_force(model, sliced(rows))
    watch = Watch(points=("attention_logit", "attention_probability", "linear_input"))
    with attach(model, watch.callbacks()):
        watch.begin(0)
        model(**inputs_of(rows, form, masked_row=True))
        watch.end()
    assert len(watch.seen) > 10
    for name, observation in watch.seen.items():
        bundle = observation.seen()
        for group in range(bundle.minmax.groups):
            x = expected[name].values(group)
            assert int(bundle.minmax.count[group]) == len(x), name
            assert int(bundle.histogram.count[group]) == len(x), name
            low, high = float(bundle.minmax.min[group]), float(bundle.minmax.max[group])
            assert (low, high) == pytest.approx((x.min(), x.max()), rel=2e-4, abs=2e-5), name


@pytest.mark.kind(1, "sensitivity", "sweep")
@pytest.mark.parametrize("form", ["two dimensions", "bool", "100"])
@pytest.mark.parametrize(
    "recipe",
    ["logits4:tensor", "logits4:head:asymmetric", "logits6:row", "logits4+probs8:row+a8:token"],
)
@pytest.mark.parametrize("family", ["llama", "diffllama"])
def test_a_grid_does_not_know_what_is_masked(
    family: str, recipe: str, form: str, families: Any
) -> None:
    model, rows, _ = families[family]
    alone = []
    for row in rows:
        with fake_quantized(model, recipe):
            alone.append(model(row[None]).logits[0])
    inputs = inputs_of(rows, form, masked_row=True)
    with fake_quantized(model, recipe):
        together = model(**inputs).logits
    _, real = batch_of(rows)
    plain = model(rows[2][None]).logits[0]
    assert (alone[2] - plain).abs().max() > 1e-3  # the grid is felt
    for index, wanted in enumerate(alone):
        torch.testing.assert_close(
            together[index][real[index].bool()], wanted, rtol=1e-3, atol=1e-3
        )


@pytest.mark.kind(1, "probes", "stats", "sweep")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_do_not_see_each_other(
    family: str, implementation: str, families: Any
) -> None:
    """Three sequences in one row: positions start again, and the mask is block-diagonal."""
    model, rows, stored = families[family]
    model.set_attn_implementation(implementation)
    ids = torch.cat(rows)[None]
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    seen: list[AttentionLogits] = []
    with attach(model, {"attention_logit": seen.append}):
        packed = model(ids, position_ids=places, use_cache=False).logits[0]
    starts = np.cumsum([0, *LENGTHS])
    assert len(seen) == 3 * (2 if family == "diffllama" else 1)
    for call in seen:
        found = valid_logits(call, 0)
        wanted: list[np.ndarray[Any, Any]] = []
        for head in range(call.heads):
            parts = [
                stored.logits[s][call.layer][call.map, head][stored.mask(len(row))]
                for s, row in enumerate(rows)
            ]
            wanted.append(np.concatenate(parts))
        for its, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(its, expected, rtol=2e-4, atol=2e-4)
    with fake_quantized(model, "logits4:row"):
        grid = model(ids, position_ids=places, use_cache=False).logits[0]
        for index, row in enumerate(rows):
            alone = model(row[None]).logits[0]
            part = grid[starts[index] : starts[index + 1]]
            torch.testing.assert_close(part, alone, rtol=1e-3, atol=1e-3)
    assert (grid - packed).abs().max() > 1e-3


class Masking(nn.Module):
    """Attends by hand, and masks in a way of its own; `TinyAttention` is what probes look for."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.attention = TinyAttention(fill)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x)
        return out


class TinyAttention(nn.Module):
    """One head; `fill`: added, filled in, or a bias that reaches as far as a mask without one."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        logits = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        how, value = self.fill.split(" ")
        if how == "filled":
            logits = logits.masked_fill(hidden, float(value))
        elif how == "added":
            logits = logits + torch.zeros(hidden.shape).masked_fill(hidden, float(value))
        elif how == "beside-bias":  # as Swin's windows
            small = torch.linspace(-3.0, 4.0, hidden.numel()).view(hidden.shape)
            logits = logits + (small + hidden * float(value))
        else:  # ALiBi without a mask
            logits = logits - float(value) * torch.arange(x.shape[1]).flip(0)
        return torch.softmax(logits, -1) @ x


@pytest.mark.kind(1, "probes", "stats")
@pytest.mark.parametrize(
    ("fill", "masks"),
    [
        ("added -1e4", True),
        ("added -100", True),
        ("added -inf", True),
        ("filled -1e4", True),
        ("filled -1e9", True),
        ("filled -100", True),
        ("beside-bias -100", True),
        ("beside-bias -1e4", True),
        ("alibi 0.5", False),
        ("alibi 5", False),
        ("alibi 20", False),
    ],
)
def test_what_a_model_masks_by_hand(fill: str, masks: bool) -> None:
    torch.manual_seed(0)
    model, x = Masking(fill).eval(), torch.randn(2, 12, 8)
    seen: list[AttentionLogits] = []
    with attach(model, {"attention_logit": seen.append}):
        model(x)
    (call,) = seen
    lower = torch.ones(12, 12, dtype=torch.bool).tril()
    for tile in call.tiles():
        valid = tile.valid.expand_as(tile.logits)
        wanted = lower if masks else torch.ones_like(lower)
        assert torch.equal(valid, wanted.expand_as(valid))
        modified = call.modified(tile, tile.logits)[valid]
        if masks:
            assert float(modified.abs().max()) < 20.0
    assert (call.bias is not None) == ("bias" in fill or "alibi" in fill)


@pytest.mark.kind(1, "probes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [-1e4, -100.0, -6e4, -torch.inf])
def test_an_additive_mask_in_any_width(value: float, dtype: torch.dtype) -> None:
    hidden = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    hidden[..., 2, :] = True  # a row without a key
    mask = torch.zeros(hidden.shape).masked_fill(hidden, value).to(dtype)
    attended, bias = split_additive(mask)
    assert attended is not None and torch.equal(attended, ~hidden) and bias is None


@pytest.mark.kind(1, "probes")
def test_a_bias_that_reaches_far_is_no_mask() -> None:
    slopes = torch.tensor([2.0 ** -(n + 1) for n in range(8)])
    alibi = -slopes[:, None, None] * torch.arange(400).flip(0)
    attended, bias = split_additive(alibi[None])
    assert attended is None and bias is not None and torch.equal(bias[0], alibi)


@pytest.mark.kind(1, "sweep", "compare")
@pytest.mark.parametrize("side", ["left", "right"])
def test_neither_padding_nor_the_next_sequence_is_scored(side: str, tiny_llama: Any) -> None:
    """What stands in the padding is drawn anew: no score may move, and none be NaN."""
    rows = [row % 94 for row in rows_of((9, 4, 12))]
    task = Perplexity.of(sliced(rows), None, batch_size=3)
    found = []
    for filler in (0, 77):

        def forward(batch: Any, positions: Any = None, filler: int = filler) -> Tensor:
            ids = torch.where(batch.attention_mask.bool(), batch.input_ids, filler)
            logits: Tensor = tiny_llama(ids, attention_mask=batch.attention_mask).logits
            beyond = ~batch.attention_mask.bool()
            if side == "right":  # and what the model says there is of no interest
                logits = logits.masked_fill(beyond[..., None], float("nan"))
            return logits

        found.append(np.concatenate([task.run(forward, items) for items in task.batches]))
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0][:, 1].sum() == sum(LENGTH - 1 for LENGTH in (9, 4, 12))
