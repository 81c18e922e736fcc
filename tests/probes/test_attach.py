"""`attach`: looking changes nothing, replacing changes what it should, leaving restores all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.errors import ProbeError
from quantkit.probes import POINTS, AttentionLogits, LogitTile, attach

FAMILIES = ("llama", "gqa", "diffllama", "diffllama_gqa", "mistral_window")
LENGTH = 132  # more than one tile of 128 rows


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def batch(length: int = LENGTH, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 97, (rows, length), generator=generator)


def masks(length: int = LENGTH) -> dict[str, Tensor | None]:
    right = torch.ones(2, length, dtype=torch.int64)
    right[1, length // 2 :] = 0
    return {"none": None, "right": right, "left": right.flip(1)}


def look(visit: Any) -> None:
    if isinstance(visit, AttentionLogits):
        for tile in visit.tiles():
            assert tile.logits.isfinite().all()


def same(tile: LogitTile) -> Tensor:
    return tile.logits


def doubled(tile: LogitTile) -> Tensor:
    return 2 * tile.logits


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """All that `attach` touches."""
    hooks = {
        name: (list(module._forward_hooks), list(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }
    config: Any = model.config
    registries = (
        sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
    )
    return config._attn_implementation, hooks, registries


@pytest.mark.kind(7, "probes")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_looking_is_bitwise_free(
    family: str, padding: str, implementation: str, make_family: Any
) -> None:
    model = make_family(family)
    model.set_attn_implementation(implementation)
    ids, mask = batch(), masks()[padding]
    before = state_of(model)
    plain = model(ids, attention_mask=mask).logits
    with attach(model, dict.fromkeys(POINTS, look)):
        assert str(model.config._attn_implementation).startswith("quantkit")
        probed = model(ids, attention_mask=mask).logits
    assert torch.equal(plain, probed)
    assert state_of(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_count_every_element_once(family: str, make_family: Any) -> None:
    model = make_family(family)
    maps = 2 if family.startswith("diffllama") else 1
    seen: list[tuple[int, int, int]] = []

    def record(call: AttentionLogits) -> None:
        seen.append((call.layer, call.map, call.heads))

    points = {"attention_logit": record, "hidden_state": look, "linear_input": look}
    with attach(model, points) as attachment:
        model(batch())
        model(batch(9))
    per_pass = [(layer, map_ + 1, 4 // maps) for layer in range(3) for map_ in range(maps)]
    assert seen == 2 * per_pass
    positions = 2 * (LENGTH**2 + 9**2)
    logits = attachment.hits["attention_logit"]
    assert list(logits) == [f"model.layers.{n}.self_attn" for n in range(3)]
    assert [(hits.calls, hits.elements) for hits in logits.values()] == [(2, 4 * positions)] * 3
    assert sum(hits.elements for hits in logits.values()) == 3 * (4 // maps) * maps * positions
    tokens = 2 * (LENGTH + 9)
    states = attachment.hits["hidden_state"]
    assert [(hits.calls, hits.elements) for hits in states.values()] == [(2, 64 * tokens)] * 3
    linears = attachment.hits["linear_input"]
    assert len(linears) == 3 * 7 and "lm_head" not in linears
    assert linears["model.layers.0.mlp.down_proj"].elements == 80 * tokens


@pytest.mark.kind(1, "probes")
@pytest.mark.parametrize("call", ["whole", "backbone"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding_is_told_apart(padding: str, call: str, make_family: Any) -> None:
    model = make_family("llama")
    mask = masks(10)[padding]
    assert mask is not None
    valid, real = [], []

    def record(visit: Any) -> None:
        if isinstance(visit, AttentionLogits):
            valid.append(sum(int(tile.valid.sum()) for tile in visit.tiles()))
        else:
            real.append(visit.real)

    with attach(model, {"attention_logit": record, "hidden_state": record}) as attachment:
        (model if call == "whole" else model.model)(batch(10), attention_mask=mask)
    assert valid == [10 * 11 // 2 + 5 * 6 // 2] * 3
    assert all(torch.equal(part, mask.bool()) for part in real) and len(real) == 3
    assert attachment.hits["hidden_state"]["model.layers.0"].elements == 15 * 64


@pytest.mark.kind(1, "probes")
def test_a_mask_does_not_outlive_its_forward(make_family: Any) -> None:
    model = make_family("llama")
    real = []
    with attach(model, {"hidden_state": lambda visit: real.append(bool(visit.real.all()))}):
        model(batch(10), attention_mask=masks(10)["right"])
        model(batch(10))
        model.model(batch(10), attention_mask=masks(10)["left"])
        model.model(batch(10))
    assert real == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replacing_logits_by_themselves(family: str, padding: str, make_family: Any) -> None:
    model = make_family(family)
    ids, mask = batch(), masks()[padding]
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    plain = model(ids, attention_mask=mask).logits
    with attach(model, {"attention_logit": lambda call: same}):
        replaced = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(replaced[real], plain[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_doubling_logits_is_doubling_the_scale(family: str, make_family: Any) -> None:
    model = make_family(family)
    ids = batch()
    plain = model(ids).logits
    with attach(model, {"attention_logit": lambda call: doubled}):
        replaced = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    expected = model(ids).logits
    torch.testing.assert_close(replaced, expected, rtol=1e-5, atol=1e-5)
    assert (expected - plain).abs().max() > 1e-3


def test_one_map_of_one_layer_can_be_replaced(make_family: Any) -> None:
    model = make_family("diffllama")
    ids = batch(20)
    plain = model(ids, output_hidden_states=True).hidden_states

    def one(call: AttentionLogits) -> Any:
        return doubled if (call.layer, call.map) == (1, 2) else None

    with attach(model, {"attention_logit": one}):
        replaced = model(ids, output_hidden_states=True).hidden_states
    heads = model.model.layers[1].self_attn.q_proj.weight.view(4, 16, 64)
    heads[2:] *= 2  # map 2 is the second half of the heads
    expected = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(replaced[1], plain[1])
    torch.testing.assert_close(replaced[2], expected[2], rtol=1e-5, atol=1e-5)
    assert (expected[2] - plain[2]).abs().max() > 1e-4


@pytest.mark.kind(1, "probes")
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")  # renamed in 5.40
def test_a_filled_cache_shifts_the_mask(make_family: Any) -> None:
    for family in ("llama", "mistral_window"):
        model = make_family(family)
        ids = batch(20)
        valid = []

        def record(call: AttentionLogits, valid: list[Tensor] = valid) -> None:
            if call.layer == 0:
                valid.extend(tile.valid.sum(-1)[0, 0] for tile in call.tiles())

        with attach(model, {"attention_logit": record}):
            cache = model(ids[:, :15], use_cache=True).past_key_values
            valid.clear()
            model(ids[:, 15:], past_key_values=cache)
        window = 7 if family == "mistral_window" else 20
        assert valid[0].tolist() == [min(row + 1, window) for row in range(15, 20)]


def test_replaced_activations_go_on(make_family: Any) -> None:
    model = make_family("llama")

    def zero(visit: Any) -> Tensor | None:
        return torch.zeros_like(visit.tensor) if visit.layer == 2 else None

    with attach(model, {"hidden_state": zero}):
        assert model(batch(8)).logits.abs().max() == 0


@pytest.mark.kind(2, "probes")
def test_a_probe_that_never_fired_is_named(make_family: Any) -> None:
    model = make_family("llama")
    before = state_of(model)
    for point, name in (
        ("attention_logit", "model.layers.0.self_attn"),
        ("hidden_state", "model.layers.0"),
        ("linear_input", "model.layers.0.self_attn.q_proj"),
    ):
        with (
            pytest.raises(ProbeError, match=rf"never fired: {point} {name}\b"),
            attach(model, {point: look}),
        ):
            pass
    assert state_of(model) == before


def test_attention_past_the_registry_is_noticed(make_family: Any) -> None:
    model = make_family("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with (
        pytest.raises(
            ProbeError, match=r"fired: attention_logit model\.layers\.1\.self_attn \(Llama.* ran"
        ),
        attach(model, {"attention_logit": look}),
    ):
        model(batch(8))


@pytest.mark.kind(7, "probes")
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_the_body_restores_the_model(point: str, make_family: Any) -> None:
    model = make_family("diffllama")
    before = state_of(model)
    plain = model(batch(8)).logits
    with pytest.raises(KeyError, match="mine"), attach(model, {point: look}):
        assert state_of(model) != before
        raise KeyError("mine")

    def fail(visit: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), attach(model, {point: fail}):
        model(batch(8))
    assert state_of(model) == before
    assert torch.equal(model(batch(8)).logits, plain)


@pytest.mark.kind(7, "probes")
def test_attachments_nest(make_family: Any) -> None:
    model = make_family("llama")
    before = state_of(model)
    plain = model(batch(8)).logits
    with (
        attach(model, {"attention_logit": look}) as outer,
        attach(model, {"attention_logit": look}) as inner,
    ):
        assert torch.equal(model(batch(8)).logits, plain)
    assert outer.hits == inner.hits
    assert state_of(model) == before


def test_an_unknown_point_is_refused(make_family: Any) -> None:
    with (
        pytest.raises(ProbeError, match="attention_logit"),
        attach(make_family("llama"), {"attention_logits": look}),
    ):
        pass


@pytest.mark.kind(7, "probes")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch._dynamo's import
def test_compiled_and_parallel_models_are_refused(make_family: Any) -> None:
    model = make_family("llama")
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        with pytest.raises(ProbeError), attach(wrapped, {"hidden_state": look}):
            pass
    model.compile()
    with pytest.raises(ProbeError, match="compiled"), attach(model, {"hidden_state": look}):
        pass


@pytest.mark.kind(7, "probes")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_part_is_refused(make_family: Any) -> None:
    model = make_family("llama")
    model.model.layers[1].compile()
    with pytest.raises(ProbeError, match="compiled"), attach(model, {"hidden_state": look}):
        pass
