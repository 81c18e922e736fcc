"""The surface |x| [token, channel] of the worst layer, against all that was stored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import quantkit
from quantkit.calib_sets import data_slice
from quantkit.models import LoadedModel
from quantkit.outliers import collect
from quantkit.outliers.activations import ActivationStatistics
from quantkit.outliers.features import surfaces_of
from quantkit.outliers.surface import CHANNEL_BINS, TOKEN_BINS, SurfaceRecord, starts
from quantkit.probes import Activation
from quantkit.results import MagnitudeSurface
from tests.outliers.oracle import LeftPadded, loaded, measure, rows_of, sliced
from tests.outliers.test_points import seen_by_hooks
from tests.probes.zoo import FAMILIES, PADDED

POINTS = ("hidden_state", "mlp_down_input")


def check(got: MagnitudeSurface, sequences: list[list[np.ndarray]], *, shift: int = 0) -> None:
    """Compares with all |x|, by sequence and layer; the surface starts at position `shift`."""
    peaks = [[np.abs(x).max() for x in layers] for layers in sequences]
    peak = max(itertools.chain(*peaks))
    layer = min(n for layers in peaks for n, top in enumerate(layers) if top == peak)
    assert got.layer == layer
    assert got.sequence == next(n for n, layers in enumerate(peaks) if layers[layer] == peak)
    size = np.abs(sequences[got.sequence][got.layer])
    assert got.channel_count == size.shape[1]
    assert (got.positions[0], got.last_position) == (shift, shift + len(size) - 1)
    rows = [position - shift for position in got.positions] + [len(size)]
    columns = [*got.channels, size.shape[1]]
    want = [
        [size[a:b, c:d].max() for c, d in itertools.pairwise(columns)]
        for a, b in itertools.pairwise(rows)
    ]
    np.testing.assert_allclose(got.abs_max, want, rtol=2e-5, atol=2e-5 * peak)
    for axis, firsts, limit in ((1, rows, TOKEN_BINS), (0, columns, CHANNEL_BINS)):
        tops = size.max(axis)
        widths = [b - a for a, b in itertools.pairwise(firsts)]
        assert len(widths) <= limit and all(width > 0 for width in widths)
        if len(tops) <= limit:
            assert set(widths) == {1}
        for largest in np.argsort(-tops, kind="stable")[:3]:
            assert int(largest) in firsts and int(largest) + 1 in firsts
    for start, end, place in zip(rows, rows[1:], got.largest_positions, strict=False):
        tops = size[start:end].max(1)
        assert tops[place - shift - start] == pytest.approx(tops.max(), rel=2e-5)


@pytest.mark.parametrize("batch_size", [1, 7], ids=["one by one", "padded"])
@pytest.mark.parametrize("lengths", [(9, 3, 20, 5), (150, 40, 200)], ids=["exact", "in bins"])
@pytest.mark.parametrize("family", ["llama", "diffllama"])
def test_the_worst_layers_largest_sequence_is_drawn(
    family: str, lengths: tuple[int, ...], batch_size: int, make_family: Any
) -> None:
    model, rows = make_family(family), rows_of(lengths)
    stats = measure(model, rows, batch_size=batch_size, points=["mlp_down_input", "mlp_input"])
    assert set(stats.surfaces) == set(POINTS)
    layers = model.model.layers
    check(stats.surfaces["hidden_state"], seen_by_hooks(model, list(layers), "out", rows))
    downs = [layer.mlp.down_proj for layer in layers]
    check(stats.surfaces["mlp_down_input"], seen_by_hooks(model, downs, "in", rows))
    for point in POINTS:  # and with the tables of the same file
        surface = stats.surfaces[point]
        groups = [g for g in stats.points[point] if g.layer == surface.layer]
        group = next(g for g in groups if g.token_class == "all")
        entry = group.top[0]
        assert (surface.name, surface.sequence) == (group.name, entry.sequence)
        row = surface.positions.index(entry.position)
        column = surface.channels.index(entry.channel)
        assert surface.abs_max[row][column] == pytest.approx(abs(entry.value), rel=1e-5)
        assert surface.largest_positions[row] == entry.position


@pytest.mark.kind(1, "stats")
def test_padding_on_the_left_is_left_out(planted: Any) -> None:
    rows = rows_of((9, 30))
    rows[0][4] = 3  # 4,000, in the sequence that is padded
    stats = measure(planted, rows, LeftPadded, batch_size=2)
    surface = stats.surfaces["hidden_state"]
    check(surface, seen_by_hooks(planted, list(planted.model.layers), "out", rows), shift=21)
    assert surface.positions == surface.largest_positions == list(range(21, 30))


def test_tokens_are_named_by_the_largest_of_their_bin(planted: Any) -> None:
    class Tokenizer:
        """Decodes a token to its number."""

        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    rows = rows_of((200,))
    rows[0][77] = 3
    surface = measure(loaded(planted, Tokenizer()), rows).surfaces["hidden_state"]
    assert surface.tokens == [f"<{rows[0][place]}>" for place in surface.largest_positions]
    assert surface.tokens[surface.positions.index(77)] == "<3>"
    assert surface.positions[surface.positions.index(77) + 1] == 78
    assert measure(planted, rows).surfaces["hidden_state"].tokens == [None] * len(surface.tokens)


# Which sequence


def visit(x: torch.Tensor, layer: int = 0, name: str = "a", **real: torch.Tensor) -> Activation:
    every = torch.ones(x.shape[:2], dtype=torch.bool)
    return Activation(
        point="hidden_state", layer=layer, name=name, tensor=x, real=real.get("real", every)
    )


def found(*visits: Activation, at: int = 0) -> ActivationStatistics:
    statistics = ActivationStatistics(with_surface=True)
    for one in visits:
        statistics.first_sequence = at
        statistics.see(one)
        at += len(one.tensor)
    return statistics


@pytest.mark.kind(4, "stats")
def test_of_equals_it_is_the_first_layer_and_sequence_in_any_order_of_merging() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, 5, 4, generator=generator)
    x[2, 1, 3] = x[4, 0, 0] = -2.0
    parts = [found(visit(x[n : n + 1]), at=n) for n in range(6)]
    for n, part in enumerate(parts):
        part.see(visit(x[n : n + 1], layer=1))
    for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (4, 0, 2, 5, 1, 3)):
        merged = ActivationStatistics(with_surface=True)
        for n in order:
            merged.absorb(parts[n])
        surface = surfaces_of({"p": merged}, lambda _name, _s, _p: None)["p"]
        assert (surface.layer, surface.sequence) == (0, 2)
        np.testing.assert_allclose(surface.abs_max, x[2].abs().numpy(), rtol=1e-5)


def test_it_is_made_again_only_for_a_higher_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real_of = SurfaceRecord.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, x: Any, real: Any, **known: Any) -> Any:
        made.append(known["sequence"])
        return real_of(cls, x, real, **known)

    monkeypatch.setattr(SurfaceRecord, "of", classmethod(of))
    x = torch.full((8, 3, 2), 0.5)
    for sequence, peak in ((1, 3.0), (3, 3.0), (4, -7.0), (5, 7.0), (7, 1.0)):
        x[sequence, 1, 1] = peak
    found(*(visit(x[n : n + 2]) for n in (0, 2, 4, 6)))
    assert made == [1, 4]


@pytest.mark.kind(7, "stats")
def test_of_a_module_that_is_called_twice_the_first_of_equals_is_kept() -> None:
    x, y = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)
    x[0, 0, 0], y[0, 1, 1] = 3.0, -3.0
    statistics = found(visit(x))
    statistics.first_sequence = 0
    statistics.see(visit(y))
    surface = statistics.records[0].surface
    assert surface is not None and surface.values.tolist() == [[3.0, 0.0], [0.0, 0.0]]


def test_points_that_nobody_draws_have_none() -> None:
    statistics = ActivationStatistics()
    statistics.see(visit(torch.ones(1, 2, 3)))
    assert statistics.records[0].surface is None
    assert surfaces_of({"p": statistics}, lambda _name, _s, _p: None) == {}


# What does not take part


def test_nan_and_inf_do_not_take_part() -> None:
    x = torch.rand(2, 4, 3) + 1
    x[0, 0, 0], x[1, 2, 1], x[1, 3, 2], x[1, 0, 0] = 5.0, torch.nan, -torch.inf, -9.0
    surface = surfaces_of({"p": found(visit(x))}, lambda _name, _s, _p: None)["p"]
    want = x[1].abs()
    want[2, 1] = want[3, 2] = 0.0
    assert surface.sequence == 1
    np.testing.assert_allclose(surface.abs_max, want.numpy(), rtol=1e-5)


@pytest.mark.kind(2, "stats")
def test_a_layer_without_a_finite_element_has_none() -> None:
    bad = found(visit(torch.full((2, 3, 4), torch.nan)))
    assert bad.records[0].surface is None
    good = torch.ones(1, 3, 4)
    for order in ((bad, found(visit(good))), (found(visit(good)), bad)):
        merged = ActivationStatistics(with_surface=True)
        for part in order:
            merged.absorb(part)
        surface = merged.records[0].surface
        assert surface is not None and surface.peak == 1.0


def test_holes_in_a_sequence_are_closed() -> None:
    x, real = torch.rand(1, 6, 2), torch.tensor([[False, True, False, True, True, False]])
    surface = found(visit(x, real=real)).records[0].surface
    assert surface is not None
    assert (surface.positions, surface.last) == ([1, 3, 4], 4)
    assert torch.equal(surface.values, x[0, [1, 3, 4]])


# Bins


@pytest.mark.parametrize(
    ("count", "largest", "limit", "want"),
    [
        pytest.param(3, [], 64, [0, 1, 2], id="few"),
        pytest.param(8, [7, 0, 1], 8, list(range(8)), id="just as many"),
        pytest.param(17, [0, 1, 2], 10, [0, 1, 2, *range(3, 17, 2)], id="at the start"),
        pytest.param(17, [16, 8, 4], 10, [0, 3, 4, 5, 8, 9, 12, 15, 16], id="runs of three widths"),
    ],
)
def test_where_bins_start(count: int, largest: list[int], limit: int, want: list[int]) -> None:
    tops = torch.zeros(count)
    for rank, place in enumerate(largest):
        tops[place] = 10 - rank
    assert starts(tops, limit) == want


@pytest.mark.parametrize("limit", [7, 64, 96])
def test_bins_are_few_and_the_largest_stand_alone(limit: int) -> None:
    generator = torch.Generator().manual_seed(limit)
    for count in (*range(1, 40), 97, 200, 1000, 5120):
        tops = torch.randint(0, 30, (count,), generator=generator).float()  # many are equal
        firsts = starts(tops, limit)
        edges = [*firsts, count]
        widths = [b - a for a, b in itertools.pairwise(edges)]
        assert firsts[0] == 0 and min(widths) >= 1 and len(firsts) <= limit
        alone = np.argsort(-tops.numpy(), kind="stable")[:3].tolist()
        assert all(place in firsts and place + 1 in edges for place in alone)
        if count > 20 * limit:  # runs end where they must, and waste little
            assert len(firsts) > 0.8 * limit


# Other models


@pytest.mark.parametrize("family", ["vit", "swin", "t5", "bart", "whisper", "mixtral"])
def test_vision_hierarchies_encoder_decoders_and_experts(family: str) -> None:
    model = FAMILIES[family].build()
    pad = "right" if family in ("t5", "bart", "mixtral") else "none"
    inputs = FAMILIES[family].inputs(pad)
    with torch.inference_mode(), quantkit.record(model, points=["mlp_down_input"]) as recording:
        model(**inputs)
    stats = recording.stats()
    places = dict.fromkeys(g.name for g in stats.points["hidden_state"] if g.name is not None)
    kept: list[np.ndarray] = []

    def keep(_module: Any, _args: Any, out: Any) -> None:
        x = out[0] if isinstance(out, tuple) else out
        kept.append(x.detach().flatten(1, -2).double().numpy())

    handles = [model.get_submodule(place).register_forward_hook(keep) for place in places]
    with torch.inference_mode():
        model(**inputs)
    for handle in handles:
        handle.remove()
    reals = [len(x[1]) - (PADDED if pad == "right" else 0) for x in kept]
    sequences = [[x[0] for x in kept], [x[1][:n] for x, n in zip(kept, reals, strict=True)]]
    check(stats.surfaces["hidden_state"], sequences)
    assert set(stats.surfaces) == set(POINTS)
    down = stats.surfaces["mlp_down_input"]
    peak = max(max(row) for row in down.abs_max)
    assert peak == pytest.approx(max(g.abs_max for g in stats.points["mlp_down_input"]), rel=1e-5)


def test_a_decoders_tokens_are_its_own(tokenizer: Any) -> None:
    model = FAMILIES["t5"].build()
    block = torch.tensor([ord(c) - 60 for c in "abcdefgh"])
    of = LoadedModel(name="t5", source="t", model=model, tokenizer=tokenizer, sha256="")
    data = type(sliced([block]))(
        source="t", source_sha256="", ids=(block,), seq_len=8, skip=0, bos="never", decoder_start=0
    )
    stats = collect(of, data, batch_size=1)
    assert stats is not None
    surface = stats.surfaces["hidden_state"]
    read = [tokenizer.decode([token]) for token in block.tolist()]
    if "decoder" in surface.name:
        read = [tokenizer.decode([0]), *read[:-1]]
    assert surface.tokens == read


def test_smollm2s_massive_activation_stands_alone(smollm2: LoadedModel) -> None:
    data = data_slice("pydoc", smollm2, seq_len=160, samples=2)
    stats = collect(smollm2, data, batch_size=2, points=["mlp_down_input"])
    assert stats is not None
    state, down = (stats.surfaces[point] for point in POINTS)
    (entry, *_) = stats.summary.massive_activations.entries
    assert (state.layer, state.positions[0], state.positions[1]) == (entry.layer, 0, 1)
    column = state.channels.index(507)
    assert entry.channel == 507 and state.channels[column + 1] == 508
    assert state.abs_max[0][column] == pytest.approx(abs(entry.value), rel=1e-5)
    assert state.abs_max[0][column] == max(map(max, state.abs_max)) > 1000
    assert (state.channel_count, down.channel_count) == (576, 1536)
    assert down.layer <= state.layer  # where it comes from
    assert len(state.abs_max) <= 64 and len(state.abs_max[0]) <= 96
    ids = data.ids[state.sequence]  # type: ignore[union-attr]
    assert state.tokens[0] == smollm2.tokenizer.decode([int(ids[0])])  # type: ignore[union-attr]
