"""`record` around any forward, against `collect` on the same batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import quantkit
from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError, ProbeError
from quantkit.models import LoadedModel
from quantkit.outliers import collect


def rows(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 97, (length,), generator=generator) for length in lengths]


def sliced(ids: list[torch.Tensor]) -> TokenSlice:
    return TokenSlice(
        source="t", source_sha256="", ids=tuple(ids), seq_len=len(ids[0]), skip=0, bos="never"
    )


@pytest.mark.parametrize("family", ["gqa", "diffllama"])
def test_a_recording_is_what_collect_says(family: str, make_family: Any) -> None:
    model = make_family(family)
    ids = rows((20, 20, 20))
    loaded = LoadedModel(name="m", source="t", model=model, tokenizer=None, sha256="")
    wanted = collect(loaded, sliced(ids), batch_size=2)
    assert wanted is not None
    with torch.inference_mode(), quantkit.record(model) as recording:
        model(torch.stack(ids[:2]))
        model(input_ids=ids[2][None])
        inside = recording.stats()
    got = recording.stats()
    assert (recording.forwards, recording.sequences, got.data.sequences) == (2, 3, 3)
    assert repr(got.summary) == repr(wanted.summary) == repr(inside.summary)
    assert repr(got.points) == repr(wanted.points)
    assert got.differential == wanted.differential
    assert got.hits == wanted.hits == inside.hits != []


def test_sequences_are_counted_where_the_batch_is_not_first() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32)  # [token, batch, channel]
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(7, 3, 16)
    with torch.inference_mode(), quantkit.record(model) as recording:
        model(x)
        model(x[:, :1])
    stats = recording.stats()
    assert stats.data.sequences == 4
    assert stats.summary.attention_logit.count == 2 * 2 * 7 * 7 * 4
    assert stats.summary.hidden_state.count == 2 * 7 * 16 * 4
    sequences = {entry.sequence for group in stats.points["hidden_state"] for entry in group.top}
    assert max(sequences) <= 3


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")  # renamed in 5.40
def test_a_filled_cache_is_refused(make_family: Any) -> None:
    model = make_family("llama")
    with (
        pytest.raises(ProbeError, match=r"6 keys from 1 queries.*use_cache=False"),
        torch.inference_mode(),
        quantkit.record(model),
    ):
        cache = model(torch.zeros(1, 5, dtype=torch.int64), use_cache=True).past_key_values
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)


@pytest.mark.kind(7, "stats")
def test_a_forward_that_raises_is_not_counted(make_family: Any) -> None:
    model = make_family("llama")
    ids = rows((9,))[0][None]
    with torch.inference_mode(), quantkit.record(model) as recording:
        model(ids)
        clean = recording.stats()
        with pytest.raises(IndexError):
            model(torch.full((1, 9), 10_000))
        model(ids)
    stats = recording.stats()
    assert (recording.forwards, stats.data.sequences) == (2, 2)
    want = clean.summary.hidden_state.inf_norm_mean
    assert stats.summary.hidden_state.inf_norm_mean == pytest.approx(want)


def test_nothing_recorded_is_said(make_family: Any) -> None:
    model = make_family("llama")
    with (
        pytest.raises(InputError, match="nothing was recorded"),
        quantkit.record(model) as recording,
    ):
        recording.stats()


def test_patterns_on_linear_layers_ask_for_their_inputs(make_family: Any) -> None:
    model = make_family("llama")
    with torch.inference_mode(), quantkit.record(model, select="*.down_proj") as recording:
        model(rows((9,))[0][None])
    groups = recording.stats().points["linear_input"]
    assert {g.name for g in groups if g.layer is not None} == {
        f"model.layers.{n}.mlp.down_proj" for n in range(3)
    }


def test_both_readings_stand_side_by_side(make_family: Any) -> None:
    model = make_family("gqa")
    loaded = LoadedModel(name="m", source="t", model=model, tokenizer=None, sha256="")
    data = sliced(rows((20, 20)))
    both = collect(loaded, data, batch_size=2, both_readings=True)
    masked = collect(loaded, data, batch_size=2, count_masked=True)
    alone = collect(loaded, data, batch_size=2)
    assert both is not None and masked is not None and alone is not None
    second = both.summary.attention_logit_unmasked
    assert second is not None and alone.summary.attention_logit_unmasked is None
    left_out = dataclasses.replace(second, inf_norm_mean=0.0)
    wanted = dataclasses.replace(masked.summary.attention_logit, inf_norm_mean=0.0)
    assert left_out == wanted
    assert both.summary.attention_logit == alone.summary.attention_logit
    assert set(both.points) == set(alone.points)


def test_a_decoders_tokens_are_those_that_it_read(tokenizer: Any) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=257, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    loaded = LoadedModel(name="t5", source="t", model=model, tokenizer=tokenizer, sha256="")
    block = torch.tensor(tokenizer("abcdefgh")["input_ids"])
    data = dataclasses.replace(sliced([block]), decoder_start=0)
    stats = collect(loaded, data, batch_size=1)
    assert stats is not None
    first = tokenizer.decode([0])
    seen = set()
    for group in stats.points["hidden_state"]:
        side = "decoder" if "decoder" in (group.name or "") else "encoder"
        read = ["abcdefgh", first + "abcdefg"][side == "decoder"]
        for entry in group.top if group.layer is not None else ():
            assert entry.token == read[entry.position]
            seen.add(side)
    assert seen == {"encoder", "decoder"}
    crossed = set()
    for group in stats.points["attention_logit"]:
        name = group.name or ""
        queries, keys = (
            first + "abcdefg" if is_decoder else "abcdefgh"
            for is_decoder in ("decoder" in name, "decoder" in name and "EncDec" not in name)
        )
        for entry in group.top if group.layer is not None else ():
            assert entry.key is not None
            assert (entry.query_token, entry.token) == (queries[entry.position], keys[entry.key])
            crossed.add("EncDec" in name)
    assert crossed == {True, False}


@pytest.mark.kind(2, "stats")
def test_a_sequence_without_a_finite_value_is_in_no_mean(make_family: Any) -> None:
    model = make_family("llama")
    ids = rows((9, 9))
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    ids[0][:] = 5
    ids[1][ids[1] == 5] = 6
    with torch.inference_mode(), quantkit.record(model) as recording:
        model(torch.stack(ids))
    summary = recording.stats().summary
    for point in (summary.attention_logit, summary.hidden_state):
        assert point.nan_count > 0
        assert point.inf_norm_mean == pytest.approx(point.abs_max)
