"""The float graph takes every batch, length and cache, and computes what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from quantkit.errors import InputError
from quantkit.exporting import (
    FLOAT_GATE,
    check_parity,
    compare_logits,
    export_float,
    ort_perplexity,
    paired_latency,
)
from quantkit.onnx_runtime import open_decoder
from tests.exporting.conftest import Exported, tiny

KINDS = ["llama", "diff"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_is_valid_and_says_its_shapes(
    exported: Callable[[str], Exported], kind: str
) -> None:
    path = exported(kind).path
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(str(path), load_external_data=False)
    assert {(opset.domain, opset.version) for opset in graph.opset_import} == {("", 21)}
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.graph.input, *graph.graph.output)
    }
    sides = {"past_key_values": "past_sequence", "present": "total_sequence"}
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total_sequence"],
        "logits": ["batch", "sequence", 128],
        **{
            f"{side}.{layer}.{part}": ["batch", 2, length, 16]
            for side, length in sides.items()
            for layer in range(2)
            for part in ("key", "value")
        },
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_path_of_this_machine_is_in_the_graph(
    exported: Callable[[str], Exported], kind: str
) -> None:
    text = exported(kind).path.read_bytes()
    assert b"site-packages" not in text
    assert str(Path.home()).encode() not in text
    assert b".py" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_parity_with_torch(exported: Callable[[str], Exported], kind: str) -> None:
    case = exported(kind)
    found = check_parity(open_decoder(case.path), case.forward, case.batches, FLOAT_GATE)
    assert all(run.passed for run in found), found
    assert [(run.batch, run.seq_len, run.cached) for run in found] == [
        (3, 24, 0),
        (2, 17, 0),
        (1, 12, 0),
        (3, 12, 12),
    ]
    assert max(run.max_abs for run in found) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "prompt"), [(1, 1), (1, 5), (4, 2)], ids=str)
def test_token_by_token_is_the_whole_at_once(
    exported: Callable[[str], Exported], kind: str, batch: int, prompt: int
) -> None:
    case = exported(kind)
    session = open_decoder(case.path, threads=1)
    ids = torch.arange(batch * 8).reshape(batch, 8) * 5 % 128
    output = session.run(ids[:, :prompt].numpy())
    parts = [output.logits]
    for step in range(prompt, 8):
        output = session.run(ids[:, step : step + 1].numpy(), None, output.present)
        parts.append(output.logits)
    mask = torch.ones_like(ids)
    found = compare_logits(case.forward(ids, mask), np.concatenate(parts, axis=1), mask)
    assert FLOAT_GATE.passes(found), found


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    steps: list[int] = []
    export_float(model, tmp_path, progress=lambda _what, done, _total: steps.append(done))
    assert steps == [0, 1, 2, 3]
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_what_cannot_be_exported_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="opset 21 or more"):
        export_float(tiny("llama"), tmp_path, opset=17)
    with pytest.raises(InputError, match="float32"):
        export_float(tiny("llama").to(torch.bfloat16), tmp_path)
    assert not list(tmp_path.iterdir())


def test_latency_and_perplexity(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")
    session = open_decoder(case.path)
    float_ms, quantized_ms = paired_latency(session, session, case.batches[0].input_ids, repeats=3)
    assert float_ms > 0 and quantized_ms > 0
    total, count = 0.0, 0
    for each in case.batches:
        logits = case.forward(each.input_ids, each.attention_mask)[:, :-1].log_softmax(-1)
        nll = -logits.gather(-1, each.input_ids[:, 1:, None])[..., 0]
        total += float(nll[each.attention_mask[:, 1:]].sum())
        count += int(each.attention_mask[:, 1:].sum())
    expected = np.exp(total / count)
    assert ort_perplexity(session, case.batches) == pytest.approx(expected, rel=1e-5)
