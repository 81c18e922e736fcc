"""Kind 7: a probe bears any state of the model: dtypes, grad modes, autocast, sharing, dropout."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from quantkit.calibration import RangePlan, observe, ranges_now
from quantkit.errors import ProbeError
from quantkit.numerics.methods import parse_methods
from quantkit.outliers import record
from quantkit.probes import AttentionLogits, attach
from quantkit.quantization import fake_quantized
from tests.calibration.oracle import loaded_model, text
from tests.conftest import make_tiny
from tests.reliability.probed_models import IDS, MODELS, USES, nothing, traces


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.kind(7, "probes", "stats")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_under_autocast_logits_are_float32s(implementation: str) -> None:
    model = MODELS["llama"]()
    model.set_attn_implementation(implementation)
    worst: list[float] = []

    def see(call: AttentionLogits) -> None:
        key = call.key.double().repeat_interleave(call.heads // call.key.shape[1], 1)
        true = call.query.double() @ key.transpose(2, 3) * call.scale
        for tile in call.tiles():
            assert tile.logits.dtype == torch.float32
            keys = tile.logits.shape[3]
            worst.append(float((tile.logits - true[..., :keys]).abs().max() / true.abs().max()))

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(IDS).logits
        with attach(model, {"attention_logit": see}):
            assert torch.equal(model(IDS).logits, plain)
        with fake_quantized(model, "logits15:row"):
            quantized = model(IDS).logits
        assert torch.is_autocast_enabled("cpu")
    assert max(worst) < 1e-6
    assert quantized.dtype == plain.dtype
    assert float((quantized - plain).abs().max()) < 0.05 * float(plain.abs().max())


@pytest.mark.kind(7, "probes", "stats", "calibrate")
@pytest.mark.parametrize("mode", ["gradients", "inference_mode"])
def test_any_grad_mode_gives_the_same_ranges(mode: str) -> None:
    model = MODELS["llama"]()
    plan = RangePlan(methods=parse_methods("minmax", ["linear_input", "attention_logit"]))
    found = []
    others = {"gradients": torch.enable_grad, "inference_mode": torch.inference_mode}
    for enter in (torch.no_grad, others[mode]):
        with enter():
            recording = observe(
                loaded_model(model),
                text((6, 9, 4)),
                points=("linear_input", "attention_logit"),
                choose=lambda seen: ranges_now(seen, plan),
                batch_size=2,
            )
        assert recording is not None
        found.append(ranges_now(recording.seen, plan))
    for name, ends in found[0].items():
        assert all(torch.equal(a, b) for a, b in zip(ends, found[1][name], strict=True)), name


@pytest.mark.kind(7, "probes", "stats")
def test_no_graph_is_kept_and_gradients_are_the_models_own() -> None:
    model = MODELS["llama"]()
    gradients, kept = [], []
    for probed in (False, True):
        model.zero_grad()
        if probed:
            with record(model) as recording:
                out = model(IDS).logits
                kept.append(weakref.ref(out))
                out.float().pow(2).mean().backward()
            assert recording.stats().summary.attention_logit.count > 0
        else:
            out = model(IDS).logits
            out.float().pow(2).mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    del out
    gc.collect()
    assert kept[0]() is None  # while the recording is alive
    assert len(gradients[0]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.kind(7, "probes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_model_may_be_converted_between_two_calls(dtype: torch.dtype) -> None:
    model = MODELS["llama"]()
    kinds: list[torch.dtype] = []

    def see(call: AttentionLogits) -> None:
        kinds.append(call.query.dtype)
        for tile in call.tiles():
            assert tile.logits.dtype == torch.float32 and bool(tile.logits.isfinite().all())

    with torch.no_grad(), attach(model, {"attention_logit": see, "hidden_state": nothing}) as found:
        model(IDS)
        model.to(dtype)
        converted = model(IDS).logits
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, converted)
    assert kinds == [torch.float32] * 2 + [dtype] * 2
    assert all(hits.calls == 2 for hits in found.hits["hidden_state"].values())


@pytest.mark.kind(7, "probes", "sweep")
def test_weights_that_are_converted_inside_are_the_old_ones_outside() -> None:
    """`.to` inside changes what is installed; what comes back is what was there, by identity."""
    model = MODELS["llama"]()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    with torch.no_grad(), fake_quantized(model, "w4"):
        model(IDS)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


@pytest.mark.kind(7, "probes", "stats")
def test_a_model_without_data_is_one_clear_error() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2,
            )
        ).eval()  # fmt: skip
    before = traces(model)
    with (
        pytest.raises((ProbeError, RuntimeError, NotImplementedError)) as caught,
        torch.no_grad(),
        record(model, points=()),
    ):
        model(IDS.to("meta"))
    assert "meta" in str(caught.value)
    assert traces(model) == before


class Twice(nn.Module):
    """One layer under two names, called three times a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.kind(7, "probes", "sweep")
def test_a_shared_module_is_one_place_with_all_its_calls() -> None:
    model, x = Twice(), torch.randn(2, 5, 8)
    seen: list[Tensor] = []
    with torch.no_grad(), attach(model, {"linear_input": lambda v: seen.append(v.tensor)}) as found:
        model(x)
    hits = found.hits["linear_input"]
    assert {name: (h.calls, h.elements) for name, h in hits.items()} == {"first": (3, 3 * 80)}
    with torch.no_grad():
        once = model.first(x)
        torch.testing.assert_close(torch.stack(seen), torch.stack([x, once, model.first(once)]))
        with fake_quantized(model, "w8a8:token") as quantizers:  # type: ignore[arg-type]
            model(x)
    assert quantizers.fired["weight/first"].hits == 1  # the weight lies on its grid once
    assert quantizers.fired["linear_input/first"].hits == 3


@pytest.mark.kind(7, "sweep", "stats")
@pytest.mark.parametrize("use", ["attach", "record"])
def test_dropout_is_drawn_as_without_a_probe(use: str) -> None:
    """In training mode a probe draws no random number: the same seed gives the same output."""
    model = make_tiny(LlamaForCausalLM, LlamaConfig, attention_dropout=0.5).train()
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            torch.manual_seed(3)
            plain = model(IDS).logits
            torch.manual_seed(3)
            with USES[use](model):
                assert torch.equal(model(IDS).logits, plain)
        assert all(m.training for m in model.modules())
        with (
            pytest.raises(ProbeError, match=r"under dropout: call model\.eval\(\)"),
            torch.no_grad(),
            fake_quantized(model, "logits8"),
        ):
            model(IDS)
        assert all(m.training for m in model.modules())
