"""Quantizers inside attention against an oracle of their own: eager attention in numpy.

The oracle takes the place of transformers' eager function and knows nothing of quantkit but the
recipe's fields: the cache gives back keys and values, then q and k are quantized, then the logits,
then the softmax outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.diffllama import modeling_diffllama
from transformers.models.llama import modeling_llama

from quantkit.errors import InputError, ProbeError
from quantkit.quantization import fake_quantized, quantizer_names, require_ranges
from quantkit.recipe import Recipe
from quantkit.results import Fired, Range
from tests.conftest import make_tiny

Array = NDArray[Any]
LENGTH, LAYERS, HEADS, KV, WIDTH = 21, 2, 4, 2, 8
MAP_AXES = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}
TOKEN_AXES = {"tensor": (1, 2, 3), "head": (2, 3), "token": (3,)}
RECIPES = (
    "qk4", "qk4:head", "qk4:tensor", "qk3:smooth", "qk3:head:smooth", "qk3:tensor:smooth",
    "probs4", "probs4:row", "probs4:head", "probs4:tensor", "probs4:static", "probs5:tensor:static",
    "kv3", "kv3:head", "kv3:tensor", "kv3:symmetric", "kv4:head:symmetric", "kv4:static",
    "kv4:tensor:static", "kv4:static:symmetric", "logits4+probs4:head", "qk8+logits4+probs8+kv8",
    "qk4:tensor:smooth+logits4:head:asymmetric+probs5:tensor+kv4:head",
    "qk6:head+logits5:row+probs6:static+kv5:static",
)  # fmt: skip
PADDING = {"none": (0, 0), "left": (6, 0), "right": (0, 6)}


def make(kind: str) -> Any:
    """A model whose queries, keys and values are of the size of 1 to 10."""
    classes: dict[str, Any] = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "diff": (DiffLlamaForCausalLM, DiffLlamaConfig),
    }
    model = make_tiny(*classes[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "embed")):
                parameter.mul_(15)
    return model


def batch(padding: str) -> dict[str, Tensor]:
    """Two sequences, of which the second is shorter."""
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 31 % 257
    mask = torch.ones_like(ids)
    left, right = PADDING[padding]
    mask[1, :left] = 0
    mask[1, LENGTH - right :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def static_ranges(kind: str) -> dict[str, Range]:
    """Ranges that cut, other ones for each head, map and part."""
    maps = (1,) if kind == "llama" else (1, 2)
    found: dict[str, Range] = {}

    def add(name: str, groups: int, lo: float, hi: float) -> None:
        steps = [1 + 0.3 * n + 0.1 * len(found) for n in range(groups)]
        found[name] = Range(
            lo=[lo * s for s in steps],
            hi=[hi * s for s in steps],
            method="minmax",
            granularity="head",
            count=1,
            point=name.split("/")[0],
        )

    for layer in range(LAYERS):
        for n in maps:
            add(f"attention_probability/{layer}/map {n}", HEADS // len(maps), 0.0, 0.4)
            add(f"attention_key/{layer}/map {n}", KV // len(maps), -2.0, 3.0)
        for name in [f"attention_value/{layer}", f"attention_value/{layer}/part 2"][: len(maps)]:
            add(name, KV, -1.0, 0.5)
    return found


def on_grid(x: Array, lo: Array, hi: Array, bits: int, kind: str) -> Array:
    """Returns x on the grid over lo, hi and 0; everything broadcasts."""
    low = {"symmetric": 1 - 2 ** (bits - 1), "full": -(2 ** (bits - 1)), "unsigned": 0}[kind]
    high = 2**bits - 1 if kind == "unsigned" else 2 ** (bits - 1) - 1
    lo = np.minimum(np.asarray(lo, np.float32), np.float32(0))
    hi = np.maximum(np.asarray(hi, np.float32), np.float32(0))
    reach, steps = (hi - lo, high - low) if kind == "full" else (np.maximum(-lo, hi), high)
    scale = np.where(reach == 0, 1, reach / np.float32(steps)).astype(np.float32)
    zero = np.zeros_like(scale)
    if kind == "full":
        zero = np.where(reach == 0, 0, np.rint(np.clip(low - lo / scale, low, high)))
    q = np.clip(np.rint(x / scale) + zero, low, high)
    return ((q - zero).astype(np.float32) * scale).astype(np.float32)


def dynamic(x: Array, seen: Array, axes: tuple[int, ...], bits: int, kind: str) -> Array:
    """Returns x on the grid of its own extremes where `seen`."""
    inside = np.where(seen, x, 0)
    return on_grid(x, inside.min(axes, keepdims=True), inside.max(axes, keepdims=True), bits, kind)


def static(x: Array, found: Range, granularity: str, bits: int, kind: str) -> Array:
    lo, hi = np.array(found.lo, np.float32), np.array(found.hi, np.float32)
    if granularity == "tensor":
        lo, hi = lo.min(keepdims=True), hi.max(keepdims=True)
    return on_grid(x, lo.reshape(1, -1, 1, 1), hi.reshape(1, -1, 1, 1), bits, kind)


class Oracle:
    """Eager attention, quantized in numpy."""

    def __init__(self, recipe: Recipe, maps: int, real: Tensor, ranges: dict[str, Range]) -> None:
        self.recipe, self.maps, self.ranges = recipe, maps, ranges
        self.real = real.numpy().astype(bool)
        self.calls = 0

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer, part = divmod(self.calls, self.maps)
        self.calls += 1
        seen = self.real[:, None, :, None]
        allowed = np.broadcast_to(attention_mask.numpy() == 0, (len(key), 1, LENGTH, LENGTH))
        allowed = allowed & seen
        name = f"attention_value/{layer}" + ("" if part == 0 else "/part 2")
        values = self.cache(value.numpy(), seen, name)
        outputs = []
        queries, keys = (np.split(x.numpy(), self.maps, axis=1) for x in (query, key))
        for n, (q, k) in enumerate(zip(queries, keys, strict=True), start=1):
            k = self.cache(k, seen, f"attention_key/{layer}/map {n}")
            weights = self.weights(q, k, seen, allowed, scaling, f"{layer}/map {n}")
            first = (n - 1) * weights.shape[1]
            of = [(first + h) // (HEADS // KV) for h in range(weights.shape[1])]
            outputs.append(weights @ values[:, of].astype(np.float64))
        out = np.concatenate(outputs, axis=1).transpose(0, 2, 1, 3).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(out)), None

    def cache(self, x: Array, seen: Array, name: str) -> Array:
        quant = self.recipe.cache
        if quant is None:
            return x
        kind = "symmetric" if quant.symmetric else "full"
        if quant.range == "static":
            return static(x, self.ranges[name], quant.granularity, quant.bits, kind)
        return dynamic(x, seen, TOKEN_AXES[quant.granularity], quant.bits, kind)

    def weights(
        self, q: Array, k: Array, seen: Array, allowed: Array, scaling: float, slot: str
    ) -> Array:
        qk, of_logits, probs = (
            self.recipe.queries_keys,
            self.recipe.logits,
            self.recipe.probabilities,
        )
        if qk is not None:
            if qk.smooth:
                total = np.where(seen, k, 0).astype(np.float64).sum(2, keepdims=True)
                k = (k - total / seen.sum(2, keepdims=True)).astype(np.float32)
            axes = TOKEN_AXES[qk.granularity]
            q, k = (dynamic(x, seen, axes, qk.bits, "symmetric") for x in (q, k))
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        logits = (q @ k.transpose(0, 1, 3, 2)) * np.float32(scaling)
        if of_logits is not None:
            kind = "symmetric" if of_logits.symmetric else "full"
            axes = MAP_AXES[of_logits.granularity]
            logits = dynamic(logits, allowed, axes, of_logits.bits, kind)
        logits = np.where(allowed, logits.astype(np.float64), -1e9)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        weights = np.where(allowed, weights, 0).astype(np.float32)
        if probs is None:
            return weights
        if probs.range == "unit":
            return on_grid(weights, np.zeros(1), np.ones(1), probs.bits, "unsigned")
        if probs.range == "static":
            found = self.ranges[f"attention_probability/{slot}"]
            return static(weights, found, probs.granularity, probs.bits, "unsigned")
        return dynamic(weights, allowed, MAP_AXES[probs.granularity], probs.bits, "unsigned")


def forward(model: Any, inputs: dict[str, Tensor]) -> Array:
    """The vocabulary logits of real tokens."""
    with torch.inference_mode():
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits[inputs["attention_mask"].bool()].numpy()


def expected(
    monkeypatch: pytest.MonkeyPatch, kind: str, recipe: str, inputs: dict[str, Tensor]
) -> Array:
    model, maps = make(kind), 1 if kind == "llama" else 2
    oracle = Oracle(Recipe.parse(recipe), maps, inputs["attention_mask"], static_ranges(kind))
    with monkeypatch.context() as patch:
        for source in (modeling_llama, modeling_diffllama):
            patch.setattr(source, "eager_attention_forward", oracle)
        model.set_attn_implementation("eager")
        found = forward(model, inputs)
    assert oracle.calls == LAYERS * maps
    return found


@pytest.mark.kind(1, "sweep")
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_equals_the_oracle(
    monkeypatch: pytest.MonkeyPatch, kind: str, recipe: str, padding: str
) -> None:
    inputs = batch(padding)
    wanted = expected(monkeypatch, kind, recipe, inputs)
    plain = expected(monkeypatch, kind, "none", inputs)
    model = make(kind)
    with fake_quantized(model, Recipe.parse(recipe), static_ranges(kind)) as quantizers:
        found = forward(model, inputs)
    assert list(quantizers.fired) == quantizers.names
    np.testing.assert_allclose(forward(model, inputs), plain, rtol=1e-3, atol=1e-5)
    size = np.abs(wanted - plain).max()
    assert size > 5e-3  # it is felt
    wrong = np.abs(found - wanted).max(-1) > 1e-3 * size
    # rounding in a product puts a value that stands at a tie on either side, for its row
    assert wrong.mean() < 0.1


@pytest.mark.kind(4, "sweep")
@pytest.mark.parametrize("recipe", [*RECIPES, "logits4", "logits4:row:asymmetric"])
@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_a_sequence_is_the_same_alone(kind: str, recipe: str) -> None:
    model = make(kind)
    for padding in ("left", "right"):
        together, alone = batch(padding), []
        with fake_quantized(model, Recipe.parse(recipe), static_ranges(kind)):
            found = forward(model, together)
            for ids, mask in zip(together["input_ids"], together["attention_mask"], strict=True):
                real = mask.nonzero().T  # RoPE turns q and k by their positions in the batch
                own = {"input_ids": ids[real[0]][None], "position_ids": real}
                alone.append(forward(model, own | {"attention_mask": torch.ones_like(real)}))
        np.testing.assert_allclose(found, np.concatenate(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_every_quantizer_is_counted(kind: str) -> None:
    recipe = Recipe.parse("w8a8:token+qk8+logits8+probs8+kv8")
    model, inputs = make(kind), batch("left")
    with fake_quantized(model, recipe) as quantizers:
        for _ in range(2):
            forward(model, inputs)
    maps, tokens = (1 if kind == "llama" else 2), 2 * LENGTH - 6
    entries = 2 * (HEADS // maps) * LENGTH * LENGTH
    for layer in range(LAYERS):
        for n in range(1, maps + 1):
            own: dict[str, int] = {
                "attention_logit": entries,
                "attention_probability": entries,
                "attention_query": tokens * HEADS // maps * WIDTH,
                "attention_key": tokens * KV // maps * WIDTH,
                "cache_key": tokens * KV // maps * WIDTH,
            }
            for point, elements in own.items():
                seen = quantizers.fired[f"{point}/{layer}/map {n}"]
                assert seen == Fired(hits=2, elements=2 * elements), point
        for part in ["", "/part 2"][:maps]:
            seen = quantizers.fired[f"cache_value/{layer}{part}"]
            assert seen == Fired(hits=2, elements=2 * tokens * KV * WIDTH)
        q_proj = f"model.layers.{layer}.self_attn.q_proj"
        assert quantizers.fired[f"weight/{q_proj}"] == Fired(hits=1, elements=32 * 32)
        assert quantizers.fired[f"linear_input/{q_proj}"] == Fired(hits=2, elements=2 * tokens * 32)
    assert list(quantizers.fired) == quantizer_names(model, recipe)
    assert quantizers.hits == sum(seen.hits for seen in quantizers.fired.values())


def changed(model: Any, recipe: str, **options: Any) -> Array:
    inputs = batch("none")
    plain = forward(model, inputs)
    with fake_quantized(model, Recipe.parse(recipe), **options):
        return forward(model, inputs) - plain


ALL = "qk3+logits3+probs3+kv3"


@pytest.mark.parametrize("name", quantizer_names(make("diff"), Recipe.parse(ALL)))
def test_each_can_run_alone_and_be_kept(name: str) -> None:
    model, recipe = make("diff"), Recipe.parse(ALL)
    rest = set(quantizer_names(model, recipe)) - {name}
    alone = changed(model, ALL, only=[name])
    assert np.abs(alone).max() > 1e-4
    np.testing.assert_array_equal(alone, changed(model, ALL, keep=rest))
    assert not np.array_equal(changed(model, ALL, keep=[name]), changed(model, ALL))
    with fake_quantized(model, recipe, only=[name]) as quantizers:
        forward(model, batch("none"))
    assert list(quantizers.fired) == quantizers.names == [name]


@pytest.mark.kind(7, "sweep")
@pytest.mark.parametrize(
    ("bad", "recipe", "message"),
    [
        ("q_proj", "qk8", "queries of model.layers.1.self_attn, map 1, are not finite"),
        ("k_proj", "qk8:head", "keys of model.layers.1.self_attn, map 1, are not finite"),
        ("k_proj", "kv8", "keys of the cache of model.layers.1.self_attn, map 1, are not finite"),
        ("v_proj", "kv8", "values of model.layers.1.self_attn, part 1, are not finite"),
        ("v_proj", "kv8:static", "values of model.layers.1.self_attn, part 1, are not finite"),
        ("k_proj", "probs8:row", "softmax outputs of model.layers.1.self_attn, map 1, are not"),
        ("k_proj", "probs8:head", "softmax outputs of model.layers.1.self_attn, map 1, are not"),
    ],
)
def test_nan_is_named_and_the_model_is_as_before(bad: str, recipe: str, message: str) -> None:
    model = make("llama")
    getattr(model.model.layers[1].self_attn, bad).weight.data[1, 2] = torch.nan
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with (
        pytest.raises(ProbeError, match=message.replace(".", r"\.")),
        fake_quantized(model, Recipe.parse(f"w8+{recipe}"), static_ranges("llama"), keep=[
            f"weight/model.layers.1.self_attn.{bad}"
        ]),
    ):  # fmt: skip
        forward(model, batch("none"))
    for name, tensor in model.state_dict().items():
        pointer, values = before[name]
        assert tensor.data_ptr() == pointer and torch.equal(
            tensor.nan_to_num(), values.nan_to_num()
        )
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.kind(2, "sweep")
def test_one_of_two_maps_does_not_vouch_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.quantization.attention import AttentionQuantizer

    original: Callable[..., Any] = AttentionQuantizer.edit
    monkeypatch.setattr(
        AttentionQuantizer,
        "edit",
        lambda self, call: None if (call.layer, call.map) == (1, 2) else original(self, call),
    )
    model = make("diff")
    with (
        pytest.raises(ProbeError, match=r"a quantizer never fired: attention_logit/1/map 2\."),
        fake_quantized(model, Recipe.parse("logits8")),
    ):
        forward(model, batch("none"))


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize(
    ("recipe", "missing"),
    [
        ("probs8:static", "attention_probability/1/map 2"),
        ("kv8:static", "attention_key/1/map 2"),
        ("kv8:static", "attention_value/1/part 2"),
    ],
)
def test_a_missing_range_is_named_before_the_work(recipe: str, missing: str) -> None:
    model, ranges = make("diff"), static_ranges("diff")
    require_ranges(model, Recipe.parse(recipe), ranges)
    del ranges[missing]
    with pytest.raises(InputError, match=f"no range for '{missing}'"):
        require_ranges(model, Recipe.parse(recipe), ranges)
    kept = missing if "probability" in missing else missing.replace("attention", "cache")
    require_ranges(model, Recipe.parse(recipe), ranges, keep=[kept])


@pytest.mark.parametrize("recipe", ["w8a8:token", "a8:dynamic", "qk8+kv8+probs8:row+logits4"])
def test_dynamic_recipes_need_no_range(recipe: str) -> None:
    require_ranges(make("llama"), Recipe.parse(recipe), {})


@pytest.mark.parametrize("recipe", ["kv8:static", "probs8:static"])
def test_ranges_of_another_model_are_refused(recipe: str) -> None:
    ranges = {
        name: Range(lo=[0.0] * 3, hi=[1.0] * 3, method="minmax", granularity="head", count=1,
                    point=found.point)
        for name, found in static_ranges("llama").items()
    }  # fmt: skip
    with (
        pytest.raises(InputError, match=r"has 3 groups, and the .* heads"),
        fake_quantized(model := make("llama"), Recipe.parse(recipe), ranges),
    ):
        forward(model, batch("none"))
