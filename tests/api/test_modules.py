"""`stats` of an nn.Module: the figures of its folder, and nothing of the module changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import quantkit
from quantkit.errors import InputError
from quantkit.results import Stats, dumps, read_json


def state(model: nn.Module) -> tuple[object, ...]:
    """All that a recording could leave behind."""
    modules = dict(model.named_modules())
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [(p.requires_grad, p.grad) for p in model.parameters()],
        {name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), m.forward)
         for name, m in modules.items()},
    )  # fmt: skip


def assert_unchanged(before: tuple[Any, ...], model: nn.Module) -> None:
    after: tuple[Any, ...] = state(model)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:] == after[1:]


def without_model(stats: Stats) -> str:
    """The figures, NaN too, without what the model and the data are called."""
    return dumps([stats.summary, stats.points, stats.differential, stats.hits])  # type: ignore[arg-type]


def test_text_gives_what_the_folder_gives(
    tiny_llama: LlamaForCausalLM, tiny_folder: Path, tokenizer: PreTrainedTokenizerFast, text: Path
) -> None:
    wanted = quantkit.stats(tiny_folder, text, seq_len=16, samples=3, batch_size=2, paper=True)
    tiny_llama.train()
    tiny_llama.model.layers[0].eval()  # a mode of its own stays, too
    before = state(tiny_llama)

    found = quantkit.stats(
        tiny_llama, text, tokenizer=tokenizer, name="mine", seq_len=16, samples=3, batch_size=2,
        paper=True,
    )  # fmt: skip

    assert without_model(found) == without_model(wanted)
    assert (found.model.name, found.data, found.folder) == ("mine", wanted.data, None)
    assert_unchanged(before, tiny_llama)
    assert not list(Path("reports").glob("*mine*"))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensors": lambda ids: [ids[:2], ids[2:]],
    "mappings": lambda ids: [{"input_ids": ids[:2]}, {"input_ids": ids[2:]}],
    "tuples": lambda ids: ((part,) for part in (ids[:2], ids[2:])),
    "one tensor": lambda ids: ids,
    "one mapping": lambda ids: {"input_ids": ids},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_batches_give_the_logits_of_the_weights(
    form: Callable[[Tensor], Any], tiny_llama: LlamaForCausalLM
) -> None:
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden = tiny_llama.model(ids, output_hidden_states=True).hidden_states
    # the last one is behind the final norm
    wanted = hidden[1].abs().max().item()

    found = quantkit.stats(tiny_llama, form(ids), points=())

    first = next(g for g in found.points["hidden_state"] if g.layer == 0 and g.token_class == "all")
    assert first.abs_max == pytest.approx(wanted, rel=1e-6)
    assert first.count == ids.numel() * 32
    assert found.data.sequences == 3
    # 3 sequences, 2 layers, 4 heads, a triangle of 9
    assert found.summary.attention_logit.count == 3 * 2 * 4 * 9 * 10 // 2


def test_dropout_is_in_no_figure(tiny_llama: LlamaForCausalLM) -> None:
    ids = torch.arange(24).view(2, 12)
    wanted = quantkit.stats(tiny_llama, [ids])
    tiny_llama.config.attention_dropout = 0.5
    for layer in tiny_llama.model.layers:
        layer.self_attn.attention_dropout = 0.5
    tiny_llama.train()

    assert dumps(quantkit.stats(tiny_llama, [ids]).summary) == dumps(wanted.summary)
    assert tiny_llama.training


def test_a_forward_that_raises_leaves_the_model_as_it_was(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.train()
    before = state(tiny_llama)
    with pytest.raises(IndexError):
        quantkit.stats(tiny_llama, [torch.full((1, 4), 10_000)])
    assert_unchanged(before, tiny_llama)


def test_a_file_is_written_where_it_is_asked_for(tiny_llama: LlamaForCausalLM) -> None:
    ids = torch.arange(24).view(2, 12)
    found = quantkit.stats(tiny_llama, [ids], out="kept")
    assert found.folder == Path("kept")
    assert dumps(read_json(Path("kept/stats.json"), Stats)) == dumps(found)
    with pytest.raises(InputError, match=r"kept/stats\.json is there already"):
        quantkit.stats(tiny_llama, [ids], out="kept")
    again = quantkit.stats(tiny_llama, [ids[:1]], out=Path("kept"), force=True)
    assert again.data.sequences == 1
    assert quantkit.report(again)[0] == Path("kept/report.html")


def test_progress_counts_batches_also_of_an_iterator(tiny_llama: LlamaForCausalLM) -> None:
    seen: list[tuple[str, int, int]] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(2):
            yield torch.arange(8)[None]

    quantkit.stats(tiny_llama, batches(), name="m", progress=lambda *step: seen.append(step))
    assert seen == [("statistics of m", done, total) for done, total in ((0, 1), (1, 2), (2, 2))]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({}, "^stats of a LlamaForCausalLM: got no data and no tokenizer; expected"),
    "text without a tokenizer": ({"data": "text.txt"}, r"got text \(text\.txt\) and no tokenizer"),
    "no batches": ({"data": []}, "^stats: data is empty"),
    "a length of batches": (
        {"data": [torch.zeros(1, 4).long()], "seq_len": 8},
        r"^stats does not read seq_len with batches of your own: leave it out\.$",
    ),
    "how to load it": (
        {"data": [torch.zeros(1, 4).long()], "dtype": "bfloat16"},
        r"^stats does not read dtype with a model that is loaded: leave it out\.$",
    ),
    "no such point": ({"data": [], "points": ("mlp",)}, "^--points does not take 'mlp'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_named(case: tuple[dict[str, Any], str], tiny_llama: LlamaForCausalLM) -> None:
    given, said = case
    before = state(tiny_llama)
    with pytest.raises(InputError, match=said):
        quantkit.stats(tiny_llama, **given)
    assert_unchanged(before, tiny_llama)


@pytest.mark.parametrize("verb", ["calibrate", "sweep", "export", "compare", "sensitivity"])
def test_other_verbs_take_folders(verb: str, tiny_llama: LlamaForCausalLM) -> None:
    more = ("ranges",) if verb == "sensitivity" else ()
    said = rf"^{verb} takes the name or the folder of a model, got a LlamaForCausalLM: save it and"
    with pytest.raises(InputError, match=said):
        getattr(quantkit, verb)(tiny_llama, *more)
