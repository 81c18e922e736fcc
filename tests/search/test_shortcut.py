"""A forward that starts at a later layer is the whole forward, bit for bit, and leaves no trace."""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quantkit.calib_sets import TokenBatch
from quantkit.errors import ProbeError
from quantkit.models import LoadedModel, layer_modules
from quantkit.probes.shortcut import Recorded, recorded, skipped
from quantkit.quantization import fake_quantized, quantizer_names
from quantkit.recipe import Recipe
from quantkit.results import Ranges
from quantkit.search.bench import Bench
from quantkit.search.units import units_of

FAMILIES = ("llama", "gqa", "diffllama_gqa", "mistral_window", "gpt2")


def model_of(family: str, make_family: Any) -> Any:
    if family != "gpt2":
        return make_family(family)
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    return GPT2LMHeadModel(config).eval()


def padded_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    ids = torch.randint(0, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**batch, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_start_gives_the_whole_forward(family: str, make_family: Any) -> None:
    model, batch = model_of(family, make_family), padded_batch()
    with recorded(model) as before:
        whole = logits_of(model, batch)
    ran: list[int] = []
    layers = layer_modules(model)
    attention = [m for n, m in model.named_modules() if n.endswith(("self_attn", ".attn"))]
    handles = [m.register_forward_hook(lambda *_: ran.append(1)) for m in attention]
    assert len(layers) == len(attention) == 3
    for start in range(4):
        ran.clear()
        with skipped(model, before, start):
            assert torch.equal(logits_of(model, batch), whole)
        assert len(ran) == 3 - start
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_layer_is_seen_as_in_the_whole_forward(family: str, make_family: Any) -> None:
    model, batch = model_of(family, make_family), padded_batch()
    with recorded(model) as before:
        plain = logits_of(model, batch)
    with torch.no_grad():
        for parameter in layer_modules(model)[1][1].parameters():
            parameter.mul_(1.25)
    whole = logits_of(model, batch)
    assert not torch.equal(whole, plain)
    with skipped(model, before, 1):
        assert torch.equal(logits_of(model, batch), whole)
    with skipped(model, before, 2):  # what is skipped does not count
        assert torch.equal(logits_of(model, batch), plain)


def test_forwards_are_put_back_also_after_an_exception(make_family: Any) -> None:
    model, batch = make_family("llama"), padded_batch()
    with recorded(model) as before:
        whole = logits_of(model, batch)
    own = model.model.layers[1]
    original = type(own).forward
    own.forward = MethodType(lambda self, *a, **k: original(self, *a, **k), own)  # as accelerate
    kept = own.__dict__["forward"]
    with pytest.raises(ZeroDivisionError), skipped(model, before, 2):
        raise ZeroDivisionError
    assert own.__dict__["forward"] is kept
    assert not any("forward" in vars(m) for m in model.modules() if m is not own)
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(logits_of(model, batch), whole)


def double(_module: Any, args: tuple[Any, ...]) -> None:
    args[0].mul_(2)


def test_a_layer_that_works_in_place_does_not_spoil_what_was_recorded(make_family: Any) -> None:
    model, batch = make_family("llama"), padded_batch()
    with recorded(model) as before:
        logits_of(model, batch)
    # returns None: the layer goes on with its input, which is twice as large now
    handle = model.model.layers[1].register_forward_pre_hook(double)
    with skipped(model, before, 1):
        first, second = logits_of(model, batch), logits_of(model, batch)
    handle.remove()
    assert torch.equal(first, second)


def test_layers_that_ran_otherwise_than_once_in_order_are_refused(make_family: Any) -> None:
    model, batch = make_family("llama"), padded_batch()
    with recorded(model) as twice:
        logits_of(model, batch)
        logits_of(model, batch)
    for before in (twice, Recorded()):
        assert not before.in_order
        with (
            pytest.raises(ProbeError, match="expected each of the 3 once"),
            skipped(model, before, 1),
        ):
            pass
    model.model.layers[2] = model.model.layers[0]  # shared, as ALBERT's
    with recorded(model) as shared:
        logits_of(model, batch)
    assert not shared.in_order


class Leaves(LlamaDecoderLayer):
    """A layer that leaves something for the last one, past its output."""

    board: ClassVar[dict[str, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.board["left"] = x.mean(-1, keepdim=True)
        return super().forward(x, *args, **kwargs)


class Takes(LlamaDecoderLayer):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x + self.taken(), *args, **kwargs)

    def taken(self) -> Any:
        return Leaves.board.pop("left")  # fails where nothing was left


class TakesOrGoesOn(Takes):
    def taken(self) -> Any:
        return Leaves.board.pop("left", 0.0)


def bench_of(model: Any, names: list[str]) -> Bench:
    loaded = LoadedModel(name="m", source="m", model=model, tokenizer=None, sha256="0")
    recipe = Recipe.parse("w4")
    ranges: Any = Ranges.__new__(Ranges)
    object.__setattr__(ranges, "smoothing", {})
    object.__setattr__(ranges, "tensors", {})
    units = units_of(model, names, recipe, group="tensor", weights=True)
    return Bench.of(loaded, recipe, ranges, units)


@pytest.mark.parametrize("last", [LlamaDecoderLayer, Takes, TakesOrGoesOn])
def test_a_model_that_cannot_start_later_runs_whole(make_family: Any, last: Any) -> None:
    model, given = make_family("llama"), padded_batch()
    model.model.layers[1].__class__, model.model.layers[2].__class__ = Leaves, last
    batch = TokenBatch(**given, first_sequence=0)
    names = quantizer_names(model, Recipe.parse("w4"))
    bench = bench_of(model, names)
    whole, before = bench.base(batch, ())
    for layer in range(3):
        bench.learn_start(batch, before, layer, whole)
    # layer 2 reads what layer 1 left: a forward that starts at 2 cannot be had
    assert bench.starts[0] and bench.starts[1]
    assert bench.starts[2] is (last is LlamaDecoderLayer)
    those = [name for name in names if ".layers.2." in name]
    found = bench.resumed(batch, before, 2, those)
    with fake_quantized(model, Recipe.parse("w4"), only=those):
        assert torch.equal(found, logits_of(model, given))
    assert not torch.equal(found, whole)
