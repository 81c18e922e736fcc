"""Other points of the model, against forward hooks of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import ProbeError
from quantkit.outliers import collect
from tests.outliers.oracle import check_states, loaded, measure, rows_of, sliced

LENGTHS = (30, 2, 13)
PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mlp_input": (lambda layer: layer.mlp, "in"),
    "mlp_down_input": (lambda layer: layer.mlp.down_proj, "in"),
    "attention_output": (lambda layer: layer.self_attn, "out"),
}


def seen_by_hooks(
    model: Any, modules: list[Any], side: str, rows: list[torch.Tensor]
) -> list[list[np.ndarray]]:
    """By sequence and module: float64 `[position, channel]`; each sequence runs alone."""
    found = []
    for row in rows:
        kept: dict[int, np.ndarray] = {}

        def keep(module: Any, args: Any, kwargs: Any, out: Any, kept: Any = kept) -> None:
            x = (args[0] if args else next(iter(kwargs.values()))) if side == "in" else out
            x = x[0] if isinstance(x, tuple) else x
            kept[id(module)] = x[0].detach().numpy().astype(np.float64)

        handles = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
        with torch.no_grad():
            model(row[None])
        for handle in handles:
            handle.remove()
        found.append([kept[id(module)] for module in modules])
    return found


def entries_of(sequences: list[list[np.ndarray]]) -> Callable[[int | None, str], np.ndarray]:
    kept = {"all": slice(None), "first": slice(1), "others": slice(1, None)}

    def entries(layer: int | None, token_class: str) -> np.ndarray:
        return np.concatenate(
            [
                x[kept[token_class]].ravel()
                for sequence in sequences
                for n, x in enumerate(sequence)
                if layer in (None, n)
            ]
        )

    return entries


@pytest.mark.parametrize("batch_size", [1, 3], ids=["unpadded", "padded"])
@pytest.mark.parametrize("family", ["gqa", "diffllama"])
def test_activation_points_agree_with_hooks(family: str, batch_size: int, make_family: Any) -> None:
    model, rows = make_family(family), rows_of(LENGTHS)
    stats = measure(model, rows, batch_size=batch_size, points=list(PLACES))
    for point, (find, side) in PLACES.items():
        modules = [find(layer) for layer in model.model.layers]
        sequences = seen_by_hooks(model, modules, side, rows)
        check_states(stats.points[point], entries_of(sequences), sequences)
        assert {group.name for group in stats.points[point] if group.layer is not None} <= {
            name for name, _ in model.named_modules()
        }


def test_linear_inputs_are_those_that_patterns_select(make_family: Any) -> None:
    model, rows = make_family("gqa"), rows_of(LENGTHS)
    patterns = ["*.1.self_attn.?_proj", "*.down_proj"]
    stats = measure(model, rows, batch_size=2, points=["linear_input"], select=patterns)
    wanted = []
    for n, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if n == 1:
            wanted += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        wanted.append(layer.mlp.down_proj)
    names = {id(module): name for name, module in model.named_modules()}
    groups = stats.points["linear_input"]
    in_order = [g.name for g in groups if g.token_class == "all" and g.layer is not None]
    assert in_order == [names[id(module)] for module in wanted]
    assert {hit.name for hit in stats.hits if hit.point == "linear_input"} == set(in_order)
    sequences = seen_by_hooks(model, wanted, "in", rows)
    check_states(groups, entries_of(sequences), sequences)


def test_hidden_states_are_those_of_the_layers_that_patterns_name(make_family: Any) -> None:
    model, rows = make_family("llama"), rows_of(LENGTHS)
    stats = measure(model, rows, batch_size=2, layers="model.layers.?.mlp")
    modules = [layer.mlp for layer in model.model.layers]
    sequences = seen_by_hooks(model, modules, "out", rows)
    check_states(stats.points["hidden_state"], entries_of(sequences), sequences)


def test_without_a_choice_every_point_but_linear_inputs_is_measured(make_family: Any) -> None:
    stats = collect(loaded(make_family("llama")), sliced(rows_of((5,))))
    assert stats is not None
    assert set(stats.points) == {"attention_logit", "hidden_state", *PLACES}


def test_a_pattern_that_matches_nothing_is_refused(make_family: Any) -> None:
    with pytest.raises(ProbeError, match=r"no linear layer matches '\*\.q_prj'"):
        measure(make_family("llama"), rows_of((4,)), points=["linear_input"], select=["*.q_prj"])
