"""`attach` on torch.nn's own modules, on modules written by hand, and `record_qk`."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantkit
from quantkit.errors import ProbeError
from quantkit.models.families import AttentionLayout
from quantkit.probes import AttentionLogits, attach

WIDTH, HEADS, TOKENS = 16, 4, 7

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*enable_nested_tensor is True:UserWarning"),
]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(2)
    with torch.no_grad():
        yield


def look(_: Any) -> None:
    pass


def heads_of(x: Tensor) -> Tensor:
    """Returns `[batch, token, width]` as `[batch, heads, token, d]`."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def dense(call: AttentionLogits) -> tuple[Tensor, Tensor]:
    """Returns (logits with bias, valid), `[batch, heads, query, key]`, -inf where not valid."""
    full = (*call.query.shape[:3], call.key.shape[2])
    logits = torch.full(full, float("-inf"))
    for tile in call.tiles():
        part, rows = tile.logits, slice(tile.start, tile.start + tile.logits.shape[2])
        if call.bias is not None:
            part = part + call.bias.expand(full)[:, :, rows, : part.shape[3]]
        logits[:, :, rows, : part.shape[3]] = torch.where(tile.valid, part, float("-inf"))
    return logits, logits.isfinite()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "masked"])
def test_multihead_attention(kind: str, batch_first: bool, need_weights: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).eval()
    x = torch.randn(2, TOKENS, WIDTH)
    y = torch.randn(2, 9, WIDTH) if kind == "cross" else x
    padding = torch.zeros(2, y.shape[1], dtype=torch.bool)
    padding[1, 5:] = kind == "masked"
    rows = torch.randn(TOKENS, y.shape[1]).masked_fill(
        torch.ones(TOKENS, y.shape[1]).triu(1) > 0, -torch.inf
    )
    more: dict[str, Any] = {}
    if kind == "masked":
        more = {
            "key_padding_mask": torch.zeros(2, 7).masked_fill(padding, -torch.inf),
            "attn_mask": rows,
        }
    given = (x, y, y) if batch_first else tuple(t.transpose(0, 1) for t in (x, y, y))
    if kind != "cross":
        given = (given[0],) * 3
    expected = module(*given, need_weights=True, average_attn_weights=False, **more)[1]
    plain = module(*given, need_weights=need_weights, **more)[0]
    calls: list[AttentionLogits] = []
    with attach(module, {"attention_logit": calls.append}):
        out = module(*given, need_weights=need_weights, **more)[0]
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    [call] = calls
    assert (call.name, call.is_cross, call.heads) == ("MultiheadAttention", kind == "cross", HEADS)
    weights, valid = dense(call)
    seen = valid.any(-1)
    torch.testing.assert_close(weights.softmax(-1)[seen], expected[seen], rtol=1e-5, atol=1e-6)
    # by hand, from its weights: the logits themselves, without what is added
    q, k = (
        F.linear(t, w, b)
        for t, w, b in zip(
            (x, y), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=False
        )
    )
    q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
    by_hand = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
    bare = torch.cat([tile.logits for tile in call.tiles()], 2)
    torch.testing.assert_close(bare, by_hand[..., : bare.shape[3]], rtol=1e-5, atol=1e-5)
    assert (call.bias is not None) == (kind == "masked")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder(padded: bool, batch_first: bool, train: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2).train(train)
    x = torch.randn(2, TOKENS, WIDTH)
    given = x if batch_first else x.transpose(0, 1)
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[1, 5:] = padded
    mask = padding if padded else None
    plain = model(given, src_key_padding_mask=mask)
    calls: list[AttentionLogits] = []
    states: list[Tensor] = []

    def see_state(visit: Any) -> None:
        assert torch.equal(visit.real, ~padding)
        states.append(visit.tensor)

    points = {
        "attention_logit": calls.append,
        "hidden_state": see_state,
        **dict.fromkeys(("linear_input", "attention_output", "mlp_input", "mlp_down_input"), look),
    }
    with attach(model, points) as attachment:
        out = model(given, src_key_padding_mask=mask)
    assert torch.backends.mha.get_fastpath_enabled()
    if not batch_first:
        plain, out = plain.transpose(0, 1), out.transpose(0, 1)
    torch.testing.assert_close(out[~padding], plain[~padding], rtol=1e-5, atol=1e-5)
    assert torch.equal(out, plain) or (batch_first and not train)  # else no fast path
    assert [call.layer for call in calls] == [0, 1]
    assert list(attachment.hits["mlp_down_input"]) == ["layers.0.linear2", "layers.1.linear2"]
    assert torch.equal(states[1][~padding], out[~padding])
    logits, valid = dense(calls[0])
    assert torch.equal(
        valid, (~padding[:, None, :, None] & ~padding[:, None, None]).expand_as(valid)
    )
    del logits


def test_transformer_decoder_has_cross_attention() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).eval()
    x, memory = torch.randn(2, TOKENS, WIDTH), torch.randn(2, 9, WIDTH)
    calls: list[AttentionLogits] = []
    with attach(model, {"attention_logit": calls.append}):
        model(x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(TOKENS))
    assert [call.is_cross for call in calls] == [False, True] * 2
    assert [int(dense(call)[1].sum()) for call in calls[:2]] == [2 * HEADS * 28, 2 * HEADS * 63]


class Written(nn.Module):
    """Attention as people write it; `form` says how."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.num_heads = form, HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax = nn.Softmax(dim=-1)
        self.q: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        form = self.form
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(3 * x).chunk(3, -1)
        )
        scale = (WIDTH // HEADS) ** -0.5
        causal = torch.ones(x.shape[1], x.shape[1]).tril()
        if form == "einsum":
            s = torch.einsum("bhid,bhjd->bhij", q * scale, k)
            s = torch.where(causal.bool(), s, torch.finfo(s.dtype).min)
            p = torch.softmax(s, -1)
        elif form == "multiplied mask":
            s = torch.matmul(q, k.mT) * scale
            p = F.softmax(s * causal - 1e4 * (1 - causal), dim=-1)
        elif form == "in place":
            s = (q @ k.transpose(-1, -2)).mul_(scale)
            s += torch.zeros_like(causal).masked_fill(causal == 0, float("-inf"))
            p = s.softmax(-1)
        elif form == "baddbmm":
            mask = torch.zeros_like(causal).masked_fill(causal == 0, float("-inf"))
            flat = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
            p = self.softmax(flat).view(q.shape[0], HEADS, *causal.shape)
        elif form == "setitem":
            s = q @ k.mT / scale**-1
            s[..., causal == 0] = -torch.inf
            p = torch.softmax(s, dim=3, dtype=torch.float32)
        elif form == "softcap":
            s = 2.0 * torch.tanh(q @ k.mT * scale / 2.0)
            p = s.masked_fill(causal == 0, -1e9).softmax(-1)
        elif form == "shifted":
            s = (q @ k.mT * scale).masked_fill(causal == 0, -torch.inf)
            p = torch.softmax(s - s.max(dim=-1, keepdim=True).values, -1)
        elif form == "half":
            s = (q.bfloat16() @ k.bfloat16().mT * scale).float()
            p = (s + (1 - causal) * -10000.0).softmax(-1)
        else:
            assert form == "sdpa"
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        return (p @ v).transpose(1, 2).flatten(2)


FORMS = (
    "einsum",
    "multiplied mask",
    "in place",
    "baddbmm",
    "setitem",
    "softcap",
    "shifted",
    "half",
    "sdpa",
)


@pytest.mark.parametrize("form", FORMS)
def test_attention_as_people_write_it(form: str) -> None:
    module = Written(form)
    model = nn.Sequential(module)
    x = torch.randn(2, TOKENS, WIDTH)
    plain = model(x)
    calls: list[AttentionLogits] = []
    with attach(model, {"attention_logit": calls.append}):
        assert torch.equal(model(x), plain)
        model(x[:, :3])
    assert [(call.layer, call.name, call.heads) for call in calls] == [(0, "0", HEADS)] * 2
    q, k, _ = map(heads_of, module.qkv(3 * x).chunk(3, -1))
    if form == "half":
        q, k = q.bfloat16(), k.bfloat16()
    expected = (q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5).float()
    causal = torch.ones(TOKENS, TOKENS).tril().bool()
    call = calls[0]
    [tile] = call.tiles()
    torch.testing.assert_close(tile.logits, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(tile.valid, causal.expand_as(tile.valid))
    assert call.softcap == (2.0 if form == "softcap" else None)
    assert call.bias is None
    # blocks and spans give the same
    for block in call.blocks():
        for row in range(block.logits.shape[1]):
            lo, hi = int(block.lo[row]), int(block.hi[row])
            place = expected[block.sequence, block.head, block.row + row]
            torch.testing.assert_close(
                block.logits[0, row, lo:hi],
                place[block.column + lo : block.column + hi],
                rtol=1e-5,
                atol=1e-5,
            )
    with attach(
        model, {"attention_logit": lambda call: lambda tile: 0 * tile.logits}
    ) as attachment:
        if form == "shifted":
            with pytest.raises(ProbeError, match="cannot be replaced"):
                model(x)
        else:
            flat = model(x)
            values = module.qkv(3 * x).chunk(3, -1)[2]
            mean = torch.stack([values[:, : n + 1].mean(1) for n in range(TOKENS)], 1)
            torch.testing.assert_close(flat, mean, rtol=1e-2 if form == "half" else 1e-5, atol=1e-5)
    assert attachment.hits["attention_logit"]["0"].calls == 1


def test_nothing_is_kept_and_other_softmaxes_are_left_alone() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.T).softmax(-1)

    model = nn.Sequential(Written("sdpa"), Router())
    with attach(model, {"attention_logit": look}) as attachment:
        model(torch.randn(2, TOKENS, WIDTH))
    assert list(attachment.hits["attention_logit"]) == ["0"]


def test_attention_that_cannot_be_seen_is_said() -> None:
    class LinearAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.elu(self.proj(x)) @ x.mT @ x

    x = torch.randn(2, TOKENS, WIDTH)
    model = nn.Sequential(LinearAttention())
    with (
        pytest.raises(
            ProbeError, match=r"attention_logit 0 \(LinearAttention: it ran, but no softmax"
        ),
        attach(model, {"attention_logit": look}),
    ):
        model(x)
    with attach(model, {"attention_logit": look}, allow_unseen="0") as attachment:
        model(x)
    assert attachment.waived == ["attention_logit 0"]
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with (
        pytest.raises(ProbeError, match=r"no attention was seen in Sequential.*Looked at: Linear"),
        attach(plain, {"attention_logit": look}),
    ):
        plain(x)


@pytest.mark.parametrize("point", ["hidden_state", "mlp_input", "attention_output"])
def test_no_layers_is_an_error(point: str) -> None:
    with pytest.raises(ProbeError), attach(nn.Sequential(nn.Linear(4, 4)), {point: look}):
        pass


def test_patterns_choose_and_suggest() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True), 3
    ).eval()
    x = torch.randn(2, TOKENS, WIDTH)
    points = {"hidden_state": look, "linear_input": look}
    with attach(model, points, layers="layers.[01]", select=["*.linear1"]) as attachment:
        model(x)
    assert list(attachment.hits["hidden_state"]) == ["layers.0", "layers.1"]
    assert list(attachment.hits["linear_input"]) == [f"layers.{n}.linear1" for n in range(3)]
    for wrong in ({"layers": "layer.0"}, {"select": "*.linaer1"}, {"allow_unseen": "layrs.0"}):
        with pytest.raises(ProbeError, match=r"layers\.0"), attach(model, points, **wrong):
            pass


@pytest.mark.kind(7, "probes")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_and_compiled_modules_are_refused() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4)))
    in_place = nn.Sequential(nn.Linear(4, 4))
    in_place[0].compile()
    for model, word in (
        (nn.Sequential(scripted), "TorchScript"),
        (compiled, "compiled"),
        (in_place, "compiled"),
        (nn.DataParallel(nn.Linear(4, 4)), "DataParallel"),
    ):
        with pytest.raises(ProbeError, match=word), attach(model, {"linear_input": look}):
            pass


class Kernel(nn.Module):
    """An attention that cannot be intercepted."""

    def __init__(self, maps: int = 1) -> None:
        super().__init__()
        self.maps = maps
        self.qk = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = map(heads_of, self.qk(x).chunk(2, -1))
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        if self.maps == 1:
            quantkit.record_qk(self, q, k, 0.5, mask)
        else:
            quantkit.record_qk(self, q[:, ::2], k[:, ::2], 0.5, mask, map=1, maps=2)
            quantkit.record_qk(self, q[:, 1::2], k[:, 1::2], 0.5, mask, map=2, maps=2, mix=-0.3)
        F.softmax((q @ k.mT * 0.5).masked_fill(~mask, -torch.inf), -1)  # not counted again
        return x


@pytest.mark.parametrize("maps", [1, 2])
def test_record_qk(maps: int) -> None:
    model = nn.ModuleDict({"a": Kernel(maps), "b": Kernel(maps)})
    x = torch.randn(2, TOKENS, WIDTH)
    calls: list[AttentionLogits] = []
    model["a"](x)  # outside a recording: nothing
    with attach(model, {"attention_logit": calls.append}) as attachment:
        model["b"](model["a"](x))
        Kernel()(x)  # not of this model
    seen = [(call.layer, call.name, call.map, call.mix, call.heads) for call in calls]
    heads = HEADS // maps
    assert seen == [
        (layer, name, m + 1, (1.0, -0.3)[m], heads)
        for layer, name in enumerate("ab")
        for m in range(maps)
    ]
    q, k = map(heads_of, model["a"].qk(x).chunk(2, -1))
    [tile] = calls[0].tiles()
    torch.testing.assert_close(tile.logits, (0.5 * q @ k.mT)[:, ::maps])
    assert torch.equal(tile.valid[0, 0], torch.ones(TOKENS, TOKENS).tril().bool())
    assert attachment.hits["attention_logit"]["a"].elements == 2 * HEADS * TOKENS**2
    with (
        pytest.raises(ProbeError, match="looked at, not replaced"),
        attach(model, {"attention_logit": lambda call: lambda tile: tile.logits}),
    ):
        model["a"](x)


class Interleaved(nn.Module):
    """One call for both maps of a differential head, and a lambda."""

    attention_layout: ClassVar[AttentionLayout]

    def __init__(self, shared: bool, written: bool) -> None:
        super().__init__()
        self.shared, self.written = shared, written
        self.attention_layout = AttentionLayout(maps=2, order="interleaved", shared_keys=shared)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def differential_lambda(self) -> float:
        return 0.25

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        if self.shared:
            k, v = k[:, ::2], v[:, ::2]
        if self.written:
            wide = [t.repeat_interleave(2, 1) if self.shared else t for t in (k, v)]
            both = (q @ wide[0].mT * 0.5).softmax(-1) @ wide[1]
        else:
            both = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.shared)
        return (both[:, ::2] - 0.25 * both[:, 1::2]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_module_says_where_its_maps_are(shared: bool, written: bool) -> None:
    module = Interleaved(shared, written)
    x = torch.randn(2, TOKENS, WIDTH)
    calls: list[AttentionLogits] = []
    plain = module(x)
    with attach(module, {"attention_logit": calls.append}):
        assert torch.equal(module(x), plain)
    assert [(call.map, call.mix, call.heads) for call in calls] == [(1, 1.0, 2), (2, -0.25, 2)]
    q, k, v = map(heads_of, module.qkv(x).chunk(3, -1))
    for index, call in enumerate(calls):
        keys = k[:, ::2] if shared else k[:, index::2]
        [tile] = call.tiles()
        torch.testing.assert_close(tile.logits, q[:, index::2] @ keys.mT * 0.5)
    if written:
        return
    with attach(
        module, {"attention_logit": lambda call: lambda tile: tile.logits * (call.map == 2)}
    ):
        replaced = module(x)
    values = [v[:, ::2]] * 2 if shared else [v[:, ::2], v[:, 1::2]]
    first = values[0].mean(2, keepdim=True)
    keys = k[:, ::2] if shared else k[:, 1::2]
    second = (q[:, 1::2] @ keys.mT * 0.5).softmax(-1) @ values[1]
    expected = (first - 0.25 * second).transpose(1, 2).flatten(2)
    torch.testing.assert_close(replaced, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kind(7, "probes")
def test_memory_is_given_back() -> None:
    alive: list[Any] = []

    class Watched(Written):
        def forward(self, x: Tensor) -> Tensor:
            q, k = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)[:2]
            )
            s = q @ k.mT * 0.5
            alive.append(weakref.ref(s))
            out = (s + 1).softmax(-1) @ q
            return out.transpose(1, 2).flatten(2)

    model = nn.Sequential(Watched("x"), nn.Identity())
    x = torch.randn(2, TOKENS, WIDTH)
    with attach(model, {"attention_logit": look}):
        model[1].register_forward_hook(lambda *_: gc.collect() and None)
        model(x)
        assert alive[0]() is None
