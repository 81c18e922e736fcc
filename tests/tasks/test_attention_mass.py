"""Attention mass on a prompt's parts, against whole maps of eager attention."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantkit.errors import InputError
from quantkit.jobs.tasks import NeedlesSpec
from quantkit.results import AttentionMass
from quantkit.tasks.attention_mass import KINDS, PARTS, attention_mass
from quantkit.tasks.needles import Needles

Array = NDArray[np.float64]
SPEC = NeedlesSpec(needles=3, queries=2, tokens=560, depths=(0.0, 1.0))
"""With one token a byte there is room for three needles and one or two sentences."""


def _maps(model: Any, ids: list[int]) -> list[Array]:
    """Whole effective maps of one sequence, `[heads, query, key]` a layer, in numpy."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    found = []
    for layer, weights in zip(model.model.layers, attentions, strict=True):
        whole = weights[0].double().numpy()
        if model.config.model_type == "diffllama":
            own = layer.self_attn
            vectors = [
                getattr(own, f"lambda_{name}").detach().double().numpy()
                for name in ("q1", "k1", "q2", "k2")
            ]
            lam = np.exp(vectors[0] @ vectors[1]) - np.exp(vectors[2] @ vectors[3])
            lam += own.lambda_init
            half = len(whole) // 2
            whole = whole[:half] - lam * whole[half:]
        found.append(whole)
    model.set_attn_implementation("sdpa")
    return found


def _parts(text: str, city: str) -> list[str]:
    """The part of every character of a prompt, read off its text."""
    context = text.index("\n\nQuestion")
    parts = ["noise"] * context + ["question"] * (len(text) - context)
    for match in re.finditer(r"The magic number of (\w+) is \d{6}\.", text[:context]):
        name = "answer" if match[1] == city else "needles"
        parts[match.start() : match.end()] = [name] * len(match[0])
    return parts


def _expected(model: Any, task: Needles, bos: int) -> dict[tuple[float, str], Array]:
    """Mean masses by depth and kind, `[parts]`: one sample at a time, with whole maps."""
    found: dict[tuple[float, str], list[Array]] = {}
    for asked in task.samples:
        last = asked.pairs[-1]
        maps = _maps(model, list(last.fed))
        text, cities = asked.sample.text, re.findall(r"Answer: .* of (\w+) is", asked.sample.text)
        for city in cities:
            end = text.index(f"Answer: The magic number of {city} is") + len(
                f"Answer: The magic number of {city} is"
            )
            parts = (["first"] * bos + _parts(text, city))[: end + bos]
            parts[0] = "first"
            masses: dict[str, list[Array]] = {kind: [] for kind in KINDS}
            for layer in maps:
                for head in layer:
                    row = head[end + bos - 1]
                    assert not row[end + bos :].any()
                    row = row[: end + bos]
                    for kind, weights in (("signed", row), ("share", abs(row) / abs(row).sum())):
                        masses[kind].append(
                            np.array(
                                [
                                    sum(
                                        w for w, own in zip(weights, parts, strict=True) if own == p
                                    )
                                    for p in PARTS
                                ]
                            )
                        )
            for kind in KINDS:
                found.setdefault((asked.depth_frac, kind), []).append(np.mean(masses[kind], 0))
    return {key: np.mean(values, 0) for key, values in found.items()}


@pytest.mark.parametrize("bos", [0, 1], ids=["no BOS", "BOS"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_diffllama"])
def test_masses_are_those_of_whole_eager_maps(
    family: str, bos: int, tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    with torch.no_grad():  # random weights attend everywhere alike, which hides a wrong span
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(40)
            layer.self_attn.k_proj.weight.mul_(40)
    task = Needles.of(SPEC, tokenizer, samples=3, batch_size=2, bos="always" if bos else "never")
    assert len({len(asked.pairs[-1].fed) for asked in task.samples}) > 1  # some are padded
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = task.attention(model, "tiny")
    expected = _expected(model, task, bos)
    assert [(m.depth_frac, m.kind) for m in found] == [(d, k) for d in (0.0, 1.0) for k in KINDS]
    for mass in found:
        own = [getattr(mass, part) for part in PARTS]
        np.testing.assert_allclose(own, expected[mass.depth_frac, mass.kind], atol=2e-5)
    assert {mass.n for mass in found if mass.depth_frac == 0} == {4}
    assert {mass.n for mass in found if mass.depth_frac == 1} == {2}
    assert {(mass.model, mass.task) for mass in found} == {("tiny", task.name)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _sum(mass: AttentionMass) -> float:
    return float(sum(getattr(mass, part) for part in PARTS))


def test_rows_sum_to_one_minus_lambda(
    tiny_diffllama: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    lambdas = []
    with torch.no_grad():
        for layer, dot in zip(tiny_diffllama.model.layers, (0.3, -1.0), strict=True):
            own = layer.self_attn
            own.lambda_q1.fill_(1.0)
            own.lambda_k1.fill_(dot / len(own.lambda_k1))
            own.lambda_q2.zero_()
            lambdas.append(np.exp(dot) - 1 + own.lambda_init)
    found = Needles.of(SPEC, tokenizer, samples=2).attention(tiny_diffllama, "tiny")
    for mass in found:
        expected = 1 - np.mean(lambdas) if mass.kind == "signed" else 1.0
        assert _sum(mass) == pytest.approx(expected, abs=1e-5)


def test_both_kinds_are_one_for_a_plain_model(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = Needles.of(SPEC, tokenizer, samples=2).attention(tiny_llama, "tiny")
    assert [_sum(mass) for mass in found] == pytest.approx([1.0] * 4, abs=1e-6)
    for signed, share in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(
            [getattr(signed, part) for part in PARTS], [getattr(share, part) for part in PARTS],
            atol=1e-6,
        )  # fmt: skip


def test_a_window_that_ends_before_the_needle_gives_it_no_mass(
    make_family: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_family("mistral_window")  # 7 tokens
    model.resize_token_embeddings(257)
    for mass in Needles.of(SPEC, tokenizer, samples=2).attention(model, "tiny"):
        assert (mass.answer, mass.needles, mass.noise, mass.first) == (0, 0, 0, 0)
        assert mass.question == pytest.approx(1)


def test_only_one_row_of_each_map_is_computed(
    tiny_llama: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quantkit.tasks import attention_mass as module

    seen = []

    def watched(query: Any, key: Any, scale: float) -> Any:
        seen.append(tuple(query.shape))
        return real(query, key, scale)

    real = module.grouped_logits
    monkeypatch.setattr(module, "grouped_logits", watched)
    Needles.of(SPEC, tokenizer, samples=2).attention(tiny_llama, "tiny")
    assert seen == [(1, 4, 1, 8)] * (2 * 2 * 2)  # samples x questions x layers


def test_no_batches_are_no_masses(tiny_llama: LlamaForCausalLM) -> None:
    assert attention_mass(tiny_llama, []) == []


def test_a_tokenizer_without_offsets_is_refused(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    class Slow:
        is_fast = False
        bos_token_id = None

        def __call__(self, text: str, **options: Any) -> Any:
            return tokenizer(text, **options)

    task = Needles.of(SPEC, Slow(), samples=1)
    with pytest.raises(InputError, match=r"Slow does not say where .* fast tokenizer"):
        task.attention(tiny_llama, "tiny")
