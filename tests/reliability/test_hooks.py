"""Kind 7: nothing stays behind, whatever happens inside a probe."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.errors import ProbeError
from quantkit.outliers import record
from quantkit.probes import POINTS, AttentionLogits, attach, record_qk
from tests.reliability.probed_models import IDS, MODELS, USES, nothing, traces


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.kind(7, "probes", "stats", "sweep")
@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError]
)
@pytest.mark.parametrize("where", ["first layer", "last layer", "head", "body"])
@pytest.mark.parametrize("use", USES)
def test_an_exception_anywhere_leaves_nothing(
    use: str, where: str, error: type[BaseException]
) -> None:
    model = MODELS["llama"]()
    with torch.no_grad():
        plain = model(IDS).logits
    places = {
        "first layer": model.model.layers[0].mlp.act_fn,
        "last layer": model.model.layers[1].mlp.act_fn,
        "head": model.lm_head,
    }

    def fail(*_: object) -> None:
        raise error("planted")

    before = traces(model)
    handle = places[where].register_forward_hook(fail) if where in places else None
    with pytest.raises(error, match="planted"), torch.no_grad(), USES[use](model):
        model(IDS)
        fail()
    if handle is not None:
        handle.remove()
    assert traces(model) == before
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain)


@pytest.mark.kind(7, "probes")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_an_exception_in_an_observer_leaves_nothing(
    kind: str, point: str, error: type[BaseException]
) -> None:
    if (kind, point) == ("bloom", "attention_value"):
        return  # its values pass through no function that is seen
    model = MODELS[kind]()
    before = traces(model)

    def fail(_visit: object) -> None:
        raise error("planted")

    with pytest.raises(error, match="planted"), torch.no_grad(), attach(model, {point: fail}):
        model(IDS)
    assert traces(model) == before


@pytest.mark.kind(7, "probes", "stats")
@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupted_forward_is_forgotten_by_the_next(kind: str) -> None:
    """In a notebook the `with` may go on after Ctrl-C, which skips the hooks behind a forward."""
    model = MODELS[kind]()
    interrupted = [True]

    def interrupt(*_: object) -> None:
        if interrupted.pop():
            raise KeyboardInterrupt

    seen: list[tuple[str, int]] = []

    def see(call: AttentionLogits) -> None:
        seen.append((call.name, call.map))

    late = [m for m in model.modules() if isinstance(m, nn.LayerNorm) or "Norm" in type(m).__name__]
    handle = late[-1].register_forward_pre_hook(interrupt)
    with torch.no_grad(), attach(model, {"attention_logit": see}) as attachment:
        with suppress(KeyboardInterrupt):
            model(IDS)
        handle.remove()
        seen.clear()
        padded = torch.ones_like(IDS)
        padded[1, 4:] = 0
        model(IDS, attention_mask=padded)
        x = torch.randn(1, 2, 5, 8)
        torch.softmax(x @ x.transpose(2, 3), -1)  # of the body: not of the model
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    layers = len(attachment.hits["attention_logit"])
    assert len(seen) == layers * (2 if kind == "diffllama" else 1)


@pytest.mark.kind(7, "probes", "stats", "sweep")
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_a_copy_that_is_made_while_probed_is_a_plain_model(kind: str, use: str, way: str) -> None:
    model = MODELS[kind]()
    if kind == "bloom" and use == "attach":
        points = [p for p in POINTS if p != "attention_value"]
        probe = attach(model, dict.fromkeys(points, nothing))
    else:
        probe = USES[use](model)
    with torch.no_grad(), probe as found:
        inside = model(IDS).logits
        twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        counted = repr(found)
        outside = twin(IDS).logits
        assert repr(found) == counted  # what the copy does is not recorded
    with torch.no_grad():
        assert torch.equal(twin(IDS).logits, outside)
        if use in ("attach", "record"):
            assert torch.equal(outside, inside)
        assert not str(twin.config._attn_implementation).startswith("quantkit")
        with attach(twin, {"attention_logit": nothing}) as attachment:  # it can be probed itself
            twin(IDS)
    assert all(hits.calls == 1 for hits in attachment.hits["attention_logit"].values())


@pytest.mark.kind(7, "probes", "stats")
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_two_threads_at_once_are_refused(kind: str) -> None:
    """The first waits inside its forward, so that the second is sure to come in between."""
    model = MODELS[kind]()
    inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(*_: object) -> None:
        if threading.current_thread() is first:
            inside.set()
            go_on.wait(20)

    def run() -> None:
        try:
            with torch.no_grad():
                model(IDS)
        except BaseException as error:
            errors.append(error)

    block = model.model.layers[1] if kind == "llama" else model.transformer.h[1]
    handle = block.register_forward_pre_hook(wait)
    first = threading.Thread(target=run)
    with (
        pytest.raises(ProbeError, match="two threads run the model at once"),
        torch.no_grad(),
        record(model, points=()),
    ):
        first.start()
        assert inside.wait(20)
        try:
            model(IDS)
        finally:
            go_on.set()
            first.join(20)
    handle.remove()
    assert errors == []


@pytest.mark.kind(7, "probes", "stats")
def test_a_refused_thread_does_not_spoil_the_others_figures() -> None:
    model = MODELS["llama"]()
    with torch.no_grad(), attach(model, {"attention_logit": nothing}) as alone:
        model(IDS)
    inside, go_on, errors = threading.Event(), threading.Event(), []

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(20)

    def run() -> None:
        with torch.no_grad():
            model(IDS)

    handle = model.model.layers[1].register_forward_pre_hook(wait)
    with torch.no_grad(), attach(model, {"attention_logit": nothing}) as attachment:
        thread = threading.Thread(target=run)
        thread.start()
        assert inside.wait(20)
        try:
            model(IDS)
        except ProbeError as error:
            errors.append(error)
        go_on.set()
        thread.join(20)
    handle.remove()
    assert len(errors) == 1 and attachment.hits == alone.hits


@pytest.mark.kind(7, "probes", "stats")
def test_a_thread_alone_is_seen_or_the_blindness_is_named() -> None:
    """A function mode belongs to its thread: attention by torch's functions is not seen there."""

    def run(model: Any) -> None:
        thread = threading.Thread(target=lambda: model(IDS))
        thread.start()
        thread.join()

    model = MODELS["llama"]()
    with attach(model, {"attention_logit": nothing}) as attachment:
        run(model)
    assert all(hits.calls == 1 for hits in attachment.hits["attention_logit"].values())
    with pytest.raises(
        ProbeError, match=r"never fired: attention_logit transformer\.h\.0\.self_attention"
    ):
        model = MODELS["bloom"]()
        with attach(model, {"attention_logit": nothing}):
            run(model)


@pytest.mark.kind(7, "probes")
def test_hooks_of_the_user_keep_their_order_and_their_place() -> None:
    model = MODELS["llama"]()
    told: list[str] = []

    def tell(name: str) -> Callable[..., None]:
        return lambda *_: told.append(name)

    layer = model.model.layers[0]
    handles = [
        layer.register_forward_hook(tell("hook 1")),
        layer.register_forward_pre_hook(tell("before 1")),
        layer.register_forward_hook(tell("hook 2")),
        layer.register_forward_pre_hook(tell("before 2")),
    ]
    order = ["before 1", "before 2", "hook 1", "hook 2"]
    keys = list(layer._forward_hooks), list(layer._forward_pre_hooks)
    with torch.no_grad(), attach(model, dict.fromkeys(POINTS, nothing)):
        model(IDS)
        inner = layer.register_forward_hook(tell("inside"))  # one that outlives the probe
        model(IDS)
        handles[0].remove()  # and one that does not
    assert told == [*order, *order, "inside"]
    assert [list(layer._forward_hooks), list(layer._forward_pre_hooks)] == [
        [*keys[0][1:], inner.id],
        keys[1],
    ]


@pytest.mark.kind(7, "probes", "sweep")
@pytest.mark.parametrize("kind", ["llama", "diffllama", "bloom"])
def test_probes_inside_probes_see_the_same_and_leave_in_any_order(kind: str) -> None:
    model = MODELS[kind]()
    before = traces(model)
    outer, inner = {"attention_logit": nothing}, {"attention_logit": nothing}
    with torch.no_grad():
        with attach(model, outer) as first:
            with record(model, points=()) as recording, attach(model, inner) as second:
                model(IDS)
            model(IDS)
        for name, hits in second.hits["attention_logit"].items():
            assert hits.calls * 2 == first.hits["attention_logit"][name].calls
        assert recording.forwards == 1
        early, late = attach(model, outer), attach(model, inner)
        early.__enter__()
        late.__enter__()
        model(IDS)
        late.__exit__(None, None, None)
        early.__exit__(None, None, None)
    assert traces(model) == before


@pytest.mark.kind(7, "probes")
def test_record_qk_outside_of_any_probe_does_nothing() -> None:
    x = torch.randn(1, 2, 3, 4)
    record_qk(nn.Identity(), x, x, scale=1.0)
