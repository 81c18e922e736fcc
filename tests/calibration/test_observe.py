"""The calibration pass against brute force; batches, processes and interruptions change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.calib_sets import TokenSlice
from quantkit.calibration import Observation, RangePlan, Recording, load, observe, ranges_now, save
from quantkit.calibration.watch import Watch
from quantkit.errors import InputError, ProbeError
from quantkit.jobs import CALIBRATION_POINTS
from quantkit.models import run_batch
from quantkit.numerics.methods import parse_methods
from quantkit.probes import attach
from tests.calibration.oracle import Seen, brute_force, loaded_model, text

MINMAX = RangePlan(methods=parse_methods("minmax", CALIBRATION_POINTS))


def run(model: Any, data: TokenSlice, batch_size: int = 2, **options: Any) -> Recording:
    found = observe(
        loaded_model(model),
        data,
        points=options.pop("points", CALIBRATION_POINTS),
        choose=options.pop("choose", lambda seen: ranges_now(seen, MINMAX)),
        batch_size=batch_size,
        **options,
    )
    assert found is not None
    return found


def check(observation: Observation, seen: Seen, name: str, constant: float = 0.01) -> None:
    groups = seen.samples[0][0].shape[0]
    assert observation.groups == groups, name
    for without_first in (False, True):
        bundle = observation.seen(without_first=without_first)
        low, high = observation.averages(without_first=without_first).finish()
        for group in range(groups):
            x = seen.values(group, without_first=without_first)
            place = f"{name} {group} {without_first}"
            close: Any = lambda value: pytest.approx(value, rel=2e-4, abs=2e-5)  # noqa: E731
            assert int(bundle.minmax.count[group]) == len(x), place
            assert float(bundle.minmax.min[group]) == close(x.min()), place
            assert float(bundle.minmax.max[group]) == close(x.max()), place
            top = np.sort(np.abs(x))[::-1][:5]
            assert bundle.topk.values[group, : len(top)].tolist() == close(top.tolist()), place
            assert float(bundle.moments.mean[group]) == close(x.astype(np.float64).mean()), place
            assert int(bundle.histogram.count[group]) == len(x), place
            median = float(bundle.histogram.quantile_abs(0.5)[group])
            assert median == pytest.approx(
                np.quantile(np.abs(x), 0.5, method="inverted_cdf"), rel=2**-7, abs=2e-5
            ), place
            expected = seen.moving(group, constant, without_first=without_first)
            assert (float(low[group]), float(high[group])) == (
                close(expected[0]),
                close(expected[1]),
            ), place


@pytest.mark.kind(1, "calibrate")
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_diffllama"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_point_equals_brute_force(
    request: pytest.FixtureRequest, family: str, batch_size: int
) -> None:
    """With rows of different lengths: what is padded or masked is nowhere."""
    model = request.getfixturevalue(family)
    data = text((5, 30, 17, 3))
    expected = brute_force(model, data)
    found = run(model, data, batch_size).seen
    assert found.keys() == expected.keys()
    for name, observation in found.items():
        assert observation.point == name.split("/")[0]
        check(observation, expected[name], name)


def test_one_token_alone_is_of_the_first_class(tiny_llama: LlamaForCausalLM) -> None:
    found = run(tiny_llama, text((1, 4)), points=("attention_logit",)).seen
    observation = found["attention_logit/0/map 1"]
    assert observation.classes["first"].minmax.count.tolist() == [1 + 4] * 4
    assert observation.classes["others"].minmax.count.tolist() == [6] * 4


def test_layers_that_share_an_input_share_its_observation(tiny_llama: LlamaForCausalLM) -> None:
    found = run(tiny_llama, text((9, 12)), 1, points=("linear_input",)).seen
    q, k, v, o = (found[f"linear_input/model.layers.0.self_attn.{n}_proj"] for n in "qkvo")
    assert q is k is v
    assert o is not q
    assert len({id(observation) for observation in found.values()}) == 2 * 4


def state_of(recording: Recording) -> dict[str, torch.Tensor]:
    return {
        f"{name}|{key}": x
        for name, observation in recording.seen.items()
        for key, x in observation.state().items()
    }


def check_same(one: Recording, other: Recording, *, bitwise: bool) -> None:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for key, x in first.items():
        exact = bitwise or not x.is_floating_point() or ".moments." not in key
        if bitwise or (exact and "moving" not in key and "histogram" in key):
            assert torch.equal(x, second[key]), key
        else:
            assert torch.allclose(x.double(), second[key].double(), rtol=1e-5, atol=1e-6), key


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.kind(4, "calibrate")
def test_an_interrupted_pass_goes_on_with_identical_results(
    after: int, tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    data = text((9, 12, 20, 7, 30, 11, 6))
    whole = run(tiny_llama, data, store=tmp_path / "whole", identity={"x": 1})
    batches = 0

    def interrupt(module: Any, args: Any) -> None:
        nonlocal batches
        batches += 1
        if batches > after:
            raise KeyboardInterrupt

    layer: Any = tiny_llama.model.layers[1]  # in the middle of a forward pass
    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_llama, data, store=tmp_path, identity={"x": 1})
    handle.remove()
    kept, _ = load(tmp_path / "observations.part-0-of-1.safetensors")
    assert kept.batches == after

    forwards = 0

    def count(module: Any, args: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = layer.register_forward_pre_hook(count)
    again = run(tiny_llama, data, store=tmp_path, identity={"x": 1})
    handle.remove()
    assert forwards == 4 - after
    check_same(whole, again, bitwise=True)
    assert again.hits == whole.hits
    assert [point.samples for point in again.checkpoints] == [
        point.samples for point in whole.checkpoints
    ]


@pytest.mark.parametrize("place", ["merge", "end", "count"])
@pytest.mark.kind(4, "calibrate")
def test_an_interruption_between_two_steps_counts_no_batch_twice(
    place: str, tiny_llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a batch is merged tensor by tensor, before it is counted, and while it is counted."""
    data = text((9, 12, 20, 7))
    whole = run(tiny_llama, data, 1)
    calls = 0

    def third_time(function: Any, after: bool) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args, **kwargs) if after or calls != limit else None
            if calls == limit:
                raise KeyboardInterrupt
            return result

        return wrapped

    limit = 40 if place == "merge" else 3
    with monkeypatch.context() as patch:
        if place == "merge":
            patch.setattr(Observation, "merge", third_time(Observation.merge, after=True))
        elif place == "end":
            patch.setattr(Watch, "end", third_time(Watch.end, after=True))
        else:
            patch.setattr(Recording, "add_hits", third_time(Recording.add_hits, after=False))
        with pytest.raises(KeyboardInterrupt):
            run(tiny_llama, data, 1, store=tmp_path, identity={"x": 1})
    again = run(tiny_llama, data, 1, store=tmp_path, identity={"x": 1})
    check_same(whole, again, bitwise=True)
    assert again.hits == whole.hits


@pytest.mark.kind(9, "calibrate")
def test_an_interruption_while_the_result_is_written_loses_nothing(
    tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    data = text((9, 12, 20))

    def interrupted(recording: Recording) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_llama, data, 1, store=tmp_path, identity={}, finish=interrupted)
    found: list[Recording] = []
    again = run(tiny_llama, data, 1, store=tmp_path, identity={}, finish=found.append)
    assert found == [again]
    assert all(calls == 3 for m in again.hits.values() for calls, _ in m.values())


def test_what_the_model_cannot_run_on_is_one_line(tiny_llama: Any) -> None:
    data = text((9,))
    wrong = type(data)(**{**vars(data), "ids": (torch.tensor([1, 2, 300]),)})
    with pytest.raises(InputError, match=r"tiny cannot run on random \(given input_ids \[1, 3\]"):
        run(tiny_llama, wrong)


@pytest.mark.kind(2, "calibrate")
def test_a_point_of_which_nothing_is_seen_is_named() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=257, hidden_size=16, n_layer=1, n_head=2)
    model = BloomForCausalLM(config).eval()
    assert run(model, text((9, 4)), points=("attention_logit",)).samples == 2
    with pytest.raises(ProbeError, match="multiplies q and k itself"):
        run(model, text((9, 4)), points=("attention_key",))
    with pytest.raises(InputError, match=r"nothing of point attention_value .* --points"):
        run(model, text((9, 4)), points=("linear_input", "attention_value"))


@pytest.mark.kind(1, "calibrate")
def test_keys_and_values_of_another_sequence_leave_its_padding_out() -> None:
    """T5's decoder attends to the encoder's tokens; those that are padding count nowhere."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model: Any = T5ForConditionalGeneration(config).eval()
    cross = model.decoder.block[0].layer[1].EncDecAttention
    projected: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    handles = [
        module.register_forward_hook(lambda m, a, out, n=name: projected[n].append(out))
        for name, module in (("k", cross.k), ("v", cross.v))
    ]
    ids = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 3:] = 0

    watch = Watch(points=("attention_key", "attention_value"))
    with torch.no_grad(), attach(model, watch.callbacks()):
        watch.begin(0)
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5])
        watch.end()
    for handle in handles:
        handle.remove()
    for name in ("k", "v"):
        values = projected[name][0][mask.bool()].view(-1, 2, 4)  # heads side by side
        point = "attention_key" if name == "k" else "attention_value"
        (found,) = [
            observation.seen().minmax
            for slot, observation in watch.seen.items()
            if slot.startswith(f"{point}/2")
        ]
        assert found.count.tolist() == [10 * 4] * 2
        assert found.min.tolist() == pytest.approx(values.amin((0, 2)).tolist())
        assert found.max.tolist() == pytest.approx(values.amax((0, 2)).tolist())


def test_what_another_job_left_is_not_taken_up(
    tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    data = text((9, 12, 20))
    part = tmp_path / "observations.part-0-of-1.safetensors"
    whole = run(tiny_llama, data, 1)
    whole.batches, whole.samples = 2, 2
    save(part, whole, {"x": 2, "processes": 1, "batch_size": 1})
    again = run(tiny_llama, data, 1, store=tmp_path, identity={"x": 1})
    assert all(calls == 3 for m in again.hits.values() for calls, _ in m.values())
    part.write_bytes(part.read_bytes()[:100])  # broken: begin again
    again = run(tiny_llama, data, 1, store=tmp_path, identity={"x": 1})
    assert all(calls == 3 for m in again.hits.values() for calls, _ in m.values())


@pytest.mark.kind(4, "calibrate")
def test_batches_change_nothing_but_rounding(tiny_llama: LlamaForCausalLM) -> None:
    data = text((16,) * 6)
    one, three = run(tiny_llama, data, 1), run(tiny_llama, data, 3)
    for name, observation in one.seen.items():
        other = three.seen[name]
        assert torch.equal(observation.seen().minmax.count, other.seen().minmax.count)
        for a, b in zip(
            observation.seen().minmax.finish(), other.seen().minmax.finish(), strict=True
        ):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), name
        for a, b in zip(observation.moving.finish(), other.moving.finish(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), name


@pytest.mark.kind(4, "calibrate")
def test_parts_absorb_to_one_pass(tiny_llama: LlamaForCausalLM) -> None:
    """As processes do that share the batches: each keeps the numbers of its samples."""
    data = text((16, 9, 24, 16))
    loaded = loaded_model(tiny_llama)
    whole = run(tiny_llama, data, 1)
    parts = []
    for rank in range(2):
        mine = run_share(loaded, data, rank)
        parts.append(mine)
    together = Recording()
    for part in parts:
        together.absorb(part)
    check_same(whole, together, bitwise=False)
    assert together.hits == whole.hits
    q, k = (together.seen[f"linear_input/model.layers.0.self_attn.{n}_proj"] for n in "qk")
    assert q is k


def run_share(loaded: Any, data: TokenSlice, rank: int) -> Recording:
    """One of two processes, without the other: what it has when the pass ends."""
    watch = Watch(points=CALIBRATION_POINTS)
    recording = Recording()
    with torch.no_grad(), attach(loaded.model, watch.callbacks()) as attachment:
        for index, batch in enumerate(data.batches(1)):
            if index % 2 == rank:
                watch.begin(batch.first_sequence)
                run_batch(loaded, batch.inputs, "here")
                watch.end()
    recording.seen = watch.seen
    recording.add_hits(
        {
            point: {name: (hits.calls, hits.elements) for name, hits in modules.items()}
            for point, modules in attachment.hits.items()
        }
    )
    return recording


def test_the_recording_survives_its_file(tiny_diffllama: Any, tmp_path: Path) -> None:
    whole = run(tiny_diffllama, text((9, 12, 20)), 1)
    save(tmp_path / "o.safetensors", whole, {"a": [1, {"b": None}]})
    again, identity = load(tmp_path / "o.safetensors")
    assert identity == {"a": [1, {"b": None}]}
    check_same(whole, again, bitwise=True)
    assert (again.batches, again.samples, again.hits, again.notes) == (
        whole.batches,
        whole.samples,
        whole.hits,
        whole.notes,
    )
    assert [c.samples for c in again.checkpoints] == [c.samples for c in whole.checkpoints]
    for one, two in zip(whole.checkpoints, again.checkpoints, strict=True):
        for name, pair in one.ranges.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, two.ranges[name], strict=True))
    shared = {id(x) for x in whole.seen.values()}
    assert len({id(x) for x in again.seen.values()}) == len(shared)
    assert [p.name for p in tmp_path.iterdir()] == ["o.safetensors"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "cannot be read"), (b"\x08\0\0\0\0\0\0\0{}      ", "schema"), (b"x" * 50, "cannot")],
)
def test_a_broken_file_is_one_clear_error(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "o.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        load(path)
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "none")


@pytest.mark.kind(2, "calibrate")
def test_a_module_that_never_ran_is_named(tiny_llama: Any) -> None:
    tiny_llama.model.layers[1].extra = torch.nn.Linear(4, 4)
    with pytest.raises(ProbeError, match=r"linear_input model\.layers\.1\.extra"):
        run(tiny_llama, text((8, 8)))
    found = run(tiny_llama, text((8, 8)), allow_unseen=("*.extra",))
    assert "linear_input/model.layers.1.extra" not in found.seen


def test_memory_does_not_grow_with_samples(tiny_llama: LlamaForCausalLM) -> None:
    few, many = (run(tiny_llama, text((12,) * n)) for n in (4, 32))
    sizes = [sum(x.nbytes for x in state_of(r).values()) for r in (few, many)]
    assert sizes[1] < 1.2 * sizes[0]  # octaves that only rare values reach
    bound = 254 * 2 * 128 * 8 + 8192
    for observation in many.seen.values():
        state = observation.state()
        assert sum(x.nbytes for x in state.values()) < 2 * observation.groups * bound


def test_progress_ends_at_the_total(tiny_llama: LlamaForCausalLM) -> None:
    seen: list[tuple[int, int]] = []
    run(tiny_llama, text((4, 4, 4)), progress=lambda _w, done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
