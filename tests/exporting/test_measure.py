"""Milliseconds by our own clock, perplexity by torch, intervals by hand, memory by known sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quantkit.errors import InputError
from quantkit.exporting import (
    block_scores,
    change_of,
    feeds_memory,
    latency,
    measure,
    memory,
    ort_perplexity,
    perplexity_of,
)
from quantkit.onnx_runtime import DecoderSession, open_decoder
from tests.exporting.conftest import VOCABULARY, Exported, TokenBatch, batch

MIB = 2**20


@dataclass
class Clock:
    """Seconds that pass only when a session runs."""

    now: float = 0.0
    calls: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now


@dataclass
class Timed:
    """A real session that takes as long as it is told, call by call, and keeps what it was fed."""

    inner: Any
    name: str
    clock: Clock
    seconds: list[float]
    feeds: list[dict[str, NDArray[Any]]] = field(default_factory=list)

    def run(self, names: list[str], feeds: dict[str, NDArray[Any]]) -> Any:
        self.clock.calls.append(self.name)
        self.clock.now += self.seconds[min(len(self.feeds), len(self.seconds) - 1)]
        self.feeds.append(feeds)
        return self.inner.run(names, feeds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", found)
    return found


@pytest.fixture
def case(exported: Callable[[str], Exported]) -> Exported:
    return exported("llama")


@pytest.fixture
def session(case: Exported) -> DecoderSession:
    return open_decoder(case.path, threads=1)


def timed(session: DecoderSession, name: str, clock: Clock, *seconds: float) -> DecoderSession:
    return replace(session, session=Timed(session.session, name, clock, list(seconds)))


def test_latency_is_the_median_without_the_first_call(
    session: DecoderSession, clock: Clock
) -> None:
    sessions = {
        "float": timed(session, "float", clock, 9.0, 0.004, 0.001, 0.003),
        "int8": timed(session, "int8", clock, 0.5, 0.002, 0.002, 0.008),
        "int4": timed(session, "int4", clock, 0.5, 0.006, 0.005, 0.007),
    }
    found = latency(sessions, batch(1, 8, seed=0).input_ids, repeats=3)
    assert found == pytest.approx({"float": 3.0, "int8": 2.0, "int4": 6.0})
    assert list(found) == list(sessions)


def test_sessions_take_turns_there_and_back(session: DecoderSession, clock: Clock) -> None:
    sessions = {name: timed(session, name, clock, 0.001) for name in "abc"}
    latency(sessions, batch(1, 8, seed=0).input_ids, repeats=3)
    assert "".join(clock.calls) == "cba" + "abc" + "cba" + "abc"


def test_any_calls_take_turns(clock: Clock) -> None:
    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            clock.calls.append(name)
            clock.now += seconds * (9.0 if len(clock.calls) < 3 else 1.0)

        return run

    found = measure.alternating({"a": call("a", 0.002), "b": call("b", 0.005)}, 2)
    assert found == pytest.approx({"a": 2.0, "b": 5.0})
    assert "".join(clock.calls) == "ba" + "ab" + "ba"
    with pytest.raises(InputError, match="got 0 and 2"):
        measure.alternating({}, 2)
    with pytest.raises(InputError, match="got 1 and 0"):
        measure.alternating({"a": call("a", 1.0)}, 0)


def test_decoding_is_one_token_behind_the_cache_of_the_others(
    case: Exported, session: DecoderSession, clock: Clock
) -> None:
    ids = batch(2, 13, seed=3).input_ids
    watched = timed(session, "float", clock, 5.0, 5.0, 0.002)
    assert latency({"float": watched}, ids, cached=12, repeats=2)["float"] == pytest.approx(2.0)
    prompt, *steps = watched.session.feeds
    assert prompt["input_ids"].tolist() == ids[:, :12].tolist()
    assert len(steps) == 3
    for feeds in steps:
        assert feeds["input_ids"].tolist() == ids[:, 12:].tolist()
        assert feeds["attention_mask"].shape == (2, 13)
        assert feeds["past_key_values.0.key"].shape == (2, 2, 12, 16)
    logits = session.session.run(["logits"], steps[-1])[0]
    expected = case.forward(ids, torch.ones_like(ids))[:, 12:].numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_what_cannot_be_timed_says_so(session: DecoderSession) -> None:
    ids = batch(1, 4, seed=0).input_ids
    with pytest.raises(InputError, match="at least 1 session"):
        latency({}, ids)
    with pytest.raises(InputError, match="1 repeat, got 1 and 0"):
        latency({"float": session}, ids, repeats=0)
    with pytest.raises(InputError, match="1 token behind 4 cached ones, got 4"):
        latency({"float": session}, ids, cached=4)
    without = replace(session, layout=replace(session.layout, past=(), present=()))
    with pytest.raises(InputError, match="'float' has no cache that 2 tokens"):
        latency({"float": without}, ids, cached=2)


def block_by_block(case: Exported, batches: list[TokenBatch]) -> tuple[list[float], list[int]]:
    """Scores in numpy, one block and one token at a time, of torch's logits without padding."""
    nll, counts = [], []
    for each in batches:
        for ids, mask in zip(each.input_ids, each.attention_mask, strict=True):
            real = ids[mask.bool()]
            logits = case.forward(real[None], torch.ones_like(real)[None])[0].double().numpy()
            total = 0.0
            for row, target in zip(logits[:-1], real[1:].tolist(), strict=True):
                total += float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[target])
            nll.append(total)
            counts.append(len(real) - 1)
    return nll, counts


def test_scores_are_those_of_each_block_alone(case: Exported, session: DecoderSession) -> None:
    nll, predicted = block_scores(session, case.batches)
    expected, counts = block_by_block(case, case.batches)
    assert predicted.tolist() == counts == [23, 23, 16, 16, 16]
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    value = np.exp(sum(expected) / sum(counts))
    assert ort_perplexity(session, case.batches) == pytest.approx(value, rel=1e-5)


def test_perplexity_without_a_predicted_token_says_so(session: DecoderSession) -> None:
    with pytest.raises(InputError, match="at least one predicted token"):
        ort_perplexity(session, [batch(2, 1, seed=0)])


def test_perplexity_of_a_ruined_graph_is_infinite() -> None:
    assert perplexity_of((np.array([8000.0]), np.array([10.0]))) == float("inf")


def planted(blocks: int, *, seed: int) -> tuple[Any, Any]:
    """Scores of two graphs, the second about 0.02 nats a token worse; blocks of several sizes."""
    random = np.random.default_rng(seed)
    predicted = random.integers(20, 256, blocks).astype(np.float64)
    nll = predicted * random.normal(3.3, 0.4, blocks)
    return (nll, predicted), (nll + predicted * random.normal(0.02, 0.01, blocks), predicted)


@pytest.mark.parametrize("seed", [0, 7], ids=["seed 0", "seed 7"])
def test_a_change_is_a_ratio_and_its_interval_a_paired_bootstrap(seed: int) -> None:
    (nll, predicted), (worse, _) = planted(24, seed=5)
    change, low, high = change_of((nll, predicted), (worse, predicted), seed)
    # By hand: the same blocks for both, two perplexities a resample, and then their ratio.
    chosen = np.random.default_rng(seed).integers(0, 24, size=(2000, 24))
    below = predicted[chosen].sum(1)
    ratios = np.exp(worse[chosen].sum(1) / below) / np.exp(nll[chosen].sum(1) / below)
    whole = np.exp(worse.sum() / predicted.sum()) / np.exp(nll.sum() / predicted.sum())
    assert change == pytest.approx(whole, rel=1e-12)
    assert (low, high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), rel=1e-9)
    assert low is not None and high is not None and low < change < high


def test_a_paired_interval_is_narrower_than_blocks_differ() -> None:
    scores, worse = planted(64, seed=1)
    _, low, high = change_of(scores, worse, 0)
    assert low is not None and high is not None
    assert 1.01 < low < high < 1.03  # of one perplexity alone it is about 20 % wide


def test_a_graph_beside_itself_has_not_changed() -> None:
    scores, _ = planted(8, seed=2)
    assert change_of(scores, scores, 0) == (1.0, 1.0, 1.0)


def test_one_block_or_a_score_without_a_number_has_no_interval() -> None:
    scores, worse = planted(1, seed=3)
    change, *bounds = change_of(scores, worse, 0)
    assert change > 1 and bounds == [None, None]
    scores, (nll, predicted) = planted(8, seed=3)
    broken = np.where(np.arange(8) == 2, np.nan, nll)
    change, *bounds = change_of(scores, (broken, predicted), 0)
    assert np.isnan(change) and bounds == [None, None]


def test_scores_of_other_blocks_are_refused() -> None:
    scores, (nll, predicted) = planted(8, seed=4)
    with pytest.raises(InputError, match=r"same blocks, got 8 blocks of .* and 7 of"):
        change_of(scores, (nll[:7], predicted[:7]), 0)


def wide(path: Path, columns: int, *extra: Any, domain: str = "") -> Path:
    """A "decoder" with an int8 cache that makes one float matrix `[tokens, columns]` inside."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    past = helper.make_tensor_value_info("past.0", TensorProto.INT8, ["batch", 2, "past", 4])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["tokens", 1])
    present = helper.make_tensor_value_info("present.0", TensorProto.INT8, None)
    column = helper.make_tensor("column", TensorProto.INT64, [2], [-1, 1])
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [1, columns])
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["floats", "column"], ["rows"]),
        helper.make_node("Expand", ["rows", "shape"], ["matrix"]),
        helper.make_node("ReduceMax", ["matrix"], ["logits"], axes=[1]),
        helper.make_node("Identity", ["past.0"], ["present.0"], domain=domain),
    ]
    graph = helper.make_graph(
        nodes, "wide", [ids, past, *extra], [logits, present], [column, shape]
    )
    opsets = [helper.make_opsetid("", 17)]
    opsets += [helper.make_opsetid(domain, 1)] if domain else []
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path))
    return path


def test_memory_grows_by_what_the_graph_makes(tmp_path: Path) -> None:
    ids = torch.arange(16)[None]
    small, large = (memory(wide(tmp_path / f"{n}.onnx", n), ids) for n in (MIB, 3 * MIB))
    assert small is not None and large is not None
    assert 0.95 * 64 * MIB < small < 1.6 * 64 * MIB
    # Allocators round up, and the process itself differs by a few MiB from run to run.
    assert large - small == pytest.approx(128 * MIB, abs=16 * MIB)


def test_memory_of_a_decoder_and_of_given_feeds_are_alike(case: Exported) -> None:
    ids = batch(2, 16, seed=0).input_ids
    found = memory(case.path, ids)
    past = {
        f"past_key_values.{layer}.{part}": np.zeros((2, 2, 0, 16), np.float32)
        for layer in range(2)
        for part in ("key", "value")
    }
    tokens = {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids.numpy())}
    given = feeds_memory(case.path, {**tokens, **past})
    assert found is not None and given is not None
    assert VOCABULARY * 64 * 4 < found < 64 * MIB  # its embedding, and not torch
    assert given == pytest.approx(found, abs=4 * MIB)


def test_memory_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    ids = torch.arange(4)[None]
    with pytest.raises(InputError, match=r"no ONNX file .*absent\.onnx"):
        memory(tmp_path / "absent.onnx", ids)
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3])
    with pytest.raises(InputError, match=r"input 'pixels' .* neither tokens, mask"):
        memory(wide(tmp_path / "pixels.onnx", 4, pixels), ids)
    with pytest.raises(InputError, match=r"unknown\.onnx cannot be measured: .*Identity"):
        memory(wide(tmp_path / "unknown.onnx", 4, domain="nobody"), ids)


def test_without_proc_memory_is_unknown(case: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: "proc" not in self.parts and real(self))
    assert memory(case.path, torch.arange(4)[None]) is None
