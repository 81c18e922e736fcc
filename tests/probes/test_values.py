"""`attention_value` and `linear_output`, against plain hooks on the modules that make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.probes import Activation, AttentionValue, attach

BATCH, LENGTH = 2, 12


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 64, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def outputs_of(model: Any, ending: str) -> dict[str, Tensor]:
    """Returns what the modules with this ending return in one forward, taken by plain hooks."""
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: found.update({name: out}))
        for name, module in model.named_modules()
        if name.endswith(ending)
    ]
    model(**inputs())
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gqa"])
def test_values_are_what_the_projection_returns(
    family: str, implementation: str, make_family: Any
) -> None:
    model = make_family(family)
    model.set_attn_implementation(implementation)
    seen: list[AttentionValue] = []
    with torch.no_grad(), attach(model, {"attention_value": seen.append}) as attachment:
        model(**inputs())
    with torch.no_grad():
        expected = outputs_of(model, "self_attn.v_proj")
    assert [visit.layer for visit in seen] == list(range(len(expected)))
    for visit in seen:
        value = visit.tensor.transpose(1, 2).flatten(2)  # heads side by side, as projected
        assert torch.equal(value, expected[f"{visit.name}.v_proj"])
        assert visit.part == 1
        assert torch.equal(visit.real, inputs()["attention_mask"].bool())
        hits = attachment.hits["attention_value"][visit.name]
        assert (hits.calls, hits.elements) == (1, (BATCH * LENGTH - 3) * value.shape[-1])


def test_a_differential_layer_shows_both_halves_of_its_values(make_family: Any) -> None:
    model = make_family("diffllama")
    seen: list[AttentionValue] = []
    with torch.no_grad(), attach(model, {"attention_value": seen.append}):
        model(**inputs())
    with torch.no_grad():
        expected = outputs_of(model, "self_attn.v_proj")
    for name, projected in expected.items():
        mine = [visit for visit in seen if name == f"{visit.name}.v_proj"]
        parts = [visit.tensor for visit in mine]
        assert [visit.part for visit in mine] == [1, 2]
        both = torch.cat(parts).flatten().sort().values  # each half is handed to both maps
        assert torch.equal(both.unique(), projected.flatten().unique())


def test_linear_outputs_are_what_the_layers_return(make_family: Any) -> None:
    model = make_family("llama")
    seen: dict[str, Tensor] = {}

    def record(visit: Activation) -> None:
        seen[visit.name] = visit.tensor

    with torch.no_grad(), attach(model, {"linear_output": record}, select="*_proj"):
        model(**inputs())
    with torch.no_grad():
        expected = outputs_of(model, "_proj")
    assert seen.keys() == expected.keys()
    for name, output in expected.items():
        assert torch.equal(seen[name], output)
