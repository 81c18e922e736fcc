"""The monitor in a plain loop: right figures, an untouched training, a file that survives."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import InputError, ProbeError
from quantkit.monitoring import OutlierMonitor
from quantkit.results import read_curves
from tests.monitoring.oracle import (
    assert_line,
    checkpoint,
    figures,
    make_batch,
    make_model,
)

FAMILIES = ("llama", "diffllama")


def train_step(model: Any, batches: list[Any]) -> torch.Tensor:
    """One optimizer step's forward and backward passes; returns the last loss."""
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
    return loss.detach()


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_figures_are_those_of_brute_force(
    tmp_path: Path, family: str, padded: bool, attention: str
) -> None:
    model = make_model(family, attn_implementation=attention)
    batch = make_batch(1, padded=padded)
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=1)

    with monitor.step(7):
        train_step(model, [batch])

    (step,) = read_curves(tmp_path / "curves.jsonl").steps
    assert_line(step, figures(model, [batch]))
    tokens = 27 if not padded else 22
    assert (step.step, step.forwards, step.sequences, step.tokens) == (7, 1, 3, tokens)


def test_accumulated_forwards_enter_one_line(tmp_path: Path) -> None:
    model = make_model("llama")
    batches = [make_batch(1), make_batch(2, rows=2, length=13), make_batch(3, padded=True)]
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=1)

    with monitor.step(0):
        train_step(model, batches)

    (step,) = read_curves(tmp_path / "curves.jsonl").steps
    assert_line(step, figures(model, batches))
    assert (step.forwards, step.sequences) == (3, 8)


@pytest.mark.kind(7, "train")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        *product(FAMILIES, ["plain", "eager", "bf16", "checkpointed", "reentrant"]),
        ("llama", "dropout"),  # DiffLlama has none
    ],
)
def test_loss_gradients_and_weights_are_bitwise_those_of_an_unwatched_step(
    tmp_path: Path, family: str, how: str
) -> None:
    changes = {"attention_dropout": 0.3} if how == "dropout" else {}
    model = make_model(family, attn_implementation="eager" if how == "eager" else "sdpa", **changes)
    if how in ("checkpointed", "reentrant"):
        checkpoint(model, use_reentrant=how == "reentrant")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks_before = hooks(model)
    batches = [make_batch(1, padded=True), make_batch(2)]

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "bf16"):
            loss = train_step(model, batches)
        return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = step()
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=1)
    with monitor.step(0):
        watched_loss, watched = step()
    after_loss, after = step()

    assert torch.equal(loss, watched_loss) and torch.equal(loss, after_loss)
    assert len(gradients) == len(watched) > 10
    for one, two, three in zip(gradients, watched, after, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == ("eager" if how == "eager" else "sdpa")
    assert hooks(model) == hooks_before


@pytest.mark.kind(7, "train")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_counts_the_first_forward_only(
    tmp_path: Path, use_reentrant: bool
) -> None:
    model, batch = make_model("llama"), make_batch(1)
    expected = figures(model, [batch])
    checkpoint(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=1)

    with monitor.step(0):
        train_step(model, [batch])

    (step,) = read_curves(tmp_path / "curves.jsonl").steps
    assert (step.forwards, step.sequences, step.tokens) == (1, 3, 27)
    assert_line(step, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_backward_pass_may_come_after_the_step(tmp_path: Path, use_reentrant: bool) -> None:
    """Layers that are repeated then must run as they did."""
    model, batch = make_model("llama"), make_batch(1, padded=True)
    model(**batch).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    checkpoint(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=1)

    with monitor.step(0):
        loss = model(**batch).loss
    loss.backward()

    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


@pytest.mark.kind(3, "train")
def test_bf16_queries_and_keys_are_multiplied_in_float32(tmp_path: Path) -> None:
    """Inputs of bf16 have 8 bits; products that were rounded to them would be on a coarse grid."""
    model, batch = make_model("llama"), make_batch(1)
    seen = {}
    model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda m, a, out: seen.update(dtype=out.dtype)
    )
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=1)

    with monitor.step(0), torch.autocast("cpu", dtype=torch.bfloat16):
        train_step(model, [batch])

    (step,) = read_curves(tmp_path / "curves.jsonl").steps
    assert seen["dtype"] == torch.bfloat16
    assert_line(step, figures(model, [batch]), rel=0.05)
    values = [value for curve in step.logits for value in (curve.max, curve.min)]
    on_grid = [torch.tensor(v).bfloat16().item() == pytest.approx(v, rel=1e-6) for v in values]
    assert not all(on_grid)


def test_only_steps_that_every_divides_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = make_model("llama"), tmp_path / "deep" / "er" / "curves.jsonl"
    monitor = OutlierMonitor(model, path, every=3, name="mine")
    contexts = []
    for number in range(5):
        context = monitor.step(number)
        contexts.append(context)
        with context:
            loss = model(**make_batch(number)).loss
            loss.backward()
            monitor.note(loss=loss, lr=0.5 + number)

    assert contexts[1] is contexts[2] is contexts[4]
    curves = read_curves(path)
    assert [step.step for step in curves.steps] == [0, 3]
    assert [step.lr for step in curves.steps] == [0.5, 3.5]
    assert all(3 < step.loss < 20 for step in curves.steps)
    assert len(path.read_text("utf-8").splitlines()) == 3
    header = curves.header
    assert (header.schema, header.name) == ("quantkit.curves/1", "mine")
    assert (header.architecture, header.layers, header.maps) == ("LlamaForCausalLM", 2, 1)
    assert header.parameters == sum(p.numel() for p in model.parameters())
    assert (header.every, header.ranks) == (3, 1)
    assert header.versions["torch"] == torch.__version__


def test_a_step_that_is_not_recorded_reads_no_tensor(tmp_path: Path) -> None:
    class Unreadable:
        def __float__(self) -> float:
            raise AssertionError("was read")

    model = make_model("llama")
    monitor = OutlierMonitor(model, tmp_path / "curves.jsonl", every=50)
    with monitor.step(49):
        monitor.note(loss=Unreadable(), lr=Unreadable())  # type: ignore[arg-type]
        assert model.config._attn_implementation == "sdpa"
    assert not (tmp_path / "curves.jsonl").exists()


def test_what_is_noted_after_the_step_replaces_the_line(tmp_path: Path) -> None:
    model, path = make_model("llama"), tmp_path / "curves.jsonl"
    monitor = OutlierMonitor(model, path, every=2)
    with monitor.step(0):
        model(**make_batch(0))
    (before,) = read_curves(path).steps
    monitor.note(loss=torch.tensor(2.5, requires_grad=True))
    monitor.note(lr=0.125)
    with monitor.step(1):
        monitor.note(loss=9.0)

    (step,) = read_curves(path).steps
    assert math.isnan(before.loss) and math.isnan(before.lr)
    assert (step.loss, step.lr) == (2.5, 0.125)
    assert step.logits == before.logits


@pytest.mark.parametrize("next_step", [1, 2], ids=["not recorded", "recorded"])
def test_a_line_that_is_held_back_is_written_at_the_next_step(
    tmp_path: Path, next_step: int
) -> None:
    model, path = make_model("llama"), tmp_path / "curves.jsonl"
    monitor = OutlierMonitor(model, path, every=2)
    with monitor.step(0, hold=True):
        model(**make_batch(0))
    monitor.note(loss=1.5)
    assert monitor.is_held and read_curves(path).steps == ()
    with monitor.step(next_step):
        model(**make_batch(0))
    assert not monitor.is_held
    assert read_curves(path).steps[0].loss == 1.5
    assert path.read_text("utf-8").count('"step":0,') == 1


@pytest.mark.kind(2, "train")
def test_nan_logits_are_counted_and_training_goes_on(tmp_path: Path) -> None:
    model = make_model("llama", attn_implementation="eager")  # SDPA's kernel hides NaN
    path, batch = tmp_path / "curves.jsonl", make_batch(1)
    with torch.no_grad():  # head 1 of layer 1; its k head serves heads 0 and 1
        model.model.layers[1].self_attn.q_proj.weight[8:16] = math.nan
    monitor = OutlierMonitor(model, path, every=1)
    with monitor.step(0):
        loss = train_step(model, [batch, batch])
        monitor.note(loss=loss)

    (step,) = read_curves(path).steps
    good, bad = step.logits
    assert good.nan == 0 and math.isfinite(good.max)
    assert bad.nan == 2 * 3 * (9 * 10 // 2)  # two forwards, three causal sequences of nine
    assert bad.head == 1
    assert math.isnan(bad.max) and math.isnan(bad.min) and math.isnan(bad.abs_max)
    assert (step.hidden[0].nan, step.hidden[1].nan) == (0, 2 * 3 * 9 * 32)
    assert math.isnan(step.hidden[1].kurtosis) and math.isnan(step.hidden[1].inf_norm_mean)
    assert math.isnan(step.loss)
    assert '"max":null,"min":null,"abs_max":null,"head":1,"nan":270' in path.read_text("utf-8")


@pytest.mark.kind(3, "train")
def test_infinite_logits_are_recorded_as_such(tmp_path: Path) -> None:
    model, path = make_model("llama"), tmp_path / "curves.jsonl"
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1e25)
        model.model.layers[0].self_attn.k_proj.weight.mul_(1e25)
    with OutlierMonitor(model, path, every=1).step(0):
        model(**make_batch(1))
    (step,) = read_curves(path).steps
    assert step.logits[0].abs_max == math.inf
    assert step.logits[0].nan == 0


@pytest.mark.kind(1, "train")
def test_what_stands_in_the_padding_is_not_seen(tmp_path: Path) -> None:
    model, path = make_model("llama"), tmp_path / "curves.jsonl"
    batch = make_batch(1, padded=True)
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 1e4
    with OutlierMonitor(model, path, every=1).step(0):
        model(**batch)
    (step,) = read_curves(path).steps
    assert_line(step, figures(model, [batch]))


@pytest.mark.kind(7, "train")
def test_a_body_that_raises_leaves_no_line_and_no_hook(tmp_path: Path) -> None:
    model, path = make_model("llama"), tmp_path / "curves.jsonl"
    monitor = OutlierMonitor(model, path, every=1)
    with pytest.raises(RuntimeError, match="out of luck"), monitor.step(0):
        model(**make_batch(0))
        raise RuntimeError("out of luck")

    assert not path.exists()
    assert model.config._attn_implementation == "sdpa"
    assert hooks(model) == 0
    monitor.note(loss=1.0)
    with monitor.step(1):
        model(**make_batch(0))
    assert [step.step for step in read_curves(path).steps] == [1]


def test_a_step_without_a_forward_is_an_error(tmp_path: Path) -> None:
    monitor = OutlierMonitor(make_model("llama"), tmp_path / "curves.jsonl", every=1)
    with pytest.raises(ProbeError, match="never fired"), monitor.step(0):
        pass


def run(path: Path, steps: range, *, every: int = 2, family: str = "llama") -> None:
    model = make_model(family)
    monitor = OutlierMonitor(model, path, every=every)
    for number in steps:
        with monitor.step(number):
            model(**make_batch(number))
            monitor.note(lr=steps.start + number / 100)


@pytest.mark.kind(4, "train")
def test_a_resumed_training_goes_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    run(path, range(0, 6))
    run(path, range(4, 9))  # from the checkpoint of step 4

    curves = read_curves(path)
    assert [step.step for step in curves.steps] == [0, 2, 4, 6, 8]
    assert [step.lr for step in curves.steps] == [0, 0.02, 4.04, 4.06, 4.08]
    assert path.read_text("utf-8").count("quantkit.curves/1") == 1


@pytest.mark.parametrize("cut", [1, 40, 0.5, 0.9])
def test_a_kill_in_the_middle_of_a_line_costs_that_line(tmp_path: Path, cut: float) -> None:
    path = tmp_path / "curves.jsonl"
    run(path, range(0, 6))
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    left = cut if isinstance(cut, int) else int(cut * (len(whole) - last))
    path.write_bytes(whole[: last + left])

    assert [step.step for step in read_curves(path).steps] == [0, 2]
    assert path.stat().st_size == last + left  # reading changes nothing
    run(path, range(6, 9))
    assert [step.step for step in read_curves(path).steps] == [0, 2, 6, 8]


@pytest.mark.parametrize("left", [0, 1, 15, 100])
def test_a_kill_in_the_middle_of_the_header_starts_anew(tmp_path: Path, left: int) -> None:
    path = tmp_path / "curves.jsonl"
    run(path, range(1))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InputError, match="no complete header"):
        read_curves(path)
    run(path, range(1))
    assert [step.step for step in read_curves(path).steps] == [0]


def test_the_curves_of_another_model_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    run(path, range(1))
    with pytest.raises(InputError, match=r"holds the curves of 'LlamaForCausalLM'.*DiffLlama"):
        run(path, range(1), family="diffllama")


def test_bad_arguments_say_so_at_once(tmp_path: Path) -> None:
    model = make_model("llama")
    for every in (0, -3, 2.5, True):
        with pytest.raises(InputError, match="every: expected a whole number of steps"):
            OutlierMonitor(model, tmp_path / "curves.jsonl", every=every)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a folder"):
        OutlierMonitor(model, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot write"):
        OutlierMonitor(model, tmp_path / "file" / "curves.jsonl")
    for text in ("notes of mine", '{"a": 1}\n', '{"schema": "quantkit.curves/9"}\n', "x\ny\n"):
        other = tmp_path / "other"
        other.write_text(text)
        with pytest.raises(InputError, match="other"):
            OutlierMonitor(model, other)
        assert other.read_text() == text
    with pytest.raises(ProbeError):
        OutlierMonitor(torch.nn.DataParallel(model), tmp_path / "curves.jsonl")
    compiled = make_model("llama")
    compiled.model.layers[0]._compiled_call_impl = print  # what `compile()` sets
    with pytest.raises(ProbeError, match="compiled"):
        OutlierMonitor(compiled, tmp_path / "curves.jsonl")
    assert not (tmp_path / "curves.jsonl").exists()


def test_a_wrapped_model_is_seen(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model, batch = make_model("llama"), make_batch(1)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        monitor = OutlierMonitor(wrapped, tmp_path / "curves.jsonl", every=1)
        with monitor.step(0):
            wrapped(**batch).loss.backward()
        (step,) = read_curves(tmp_path / "curves.jsonl").steps
    finally:
        torch.distributed.destroy_process_group()
    assert_line(step, figures(model, [batch]))


def test_other_ranks_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.monitoring.monitor._rank", lambda: 1)
    model = make_model("llama")
    monitor = OutlierMonitor(model, tmp_path / "deep" / "curves.jsonl", every=1)
    with monitor.step(0):
        assert model.config._attn_implementation == "sdpa"
        model(**make_batch(1))
        monitor.note(loss=1.0)
    assert not (tmp_path / "deep").exists()


def test_importing_the_package_loads_no_heavy_one() -> None:
    code = (
        "import sys, quantkit.monitoring\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "assert quantkit.monitoring.OutlierMonitor.__name__ == 'OutlierMonitor'\n"
        "assert 'transformers.trainer' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
