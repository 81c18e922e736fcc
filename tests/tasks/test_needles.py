"""Needles: prompts of the right length, and what greedy decoding answers to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantkit.calib_sets import TokenBatch
from quantkit.errors import InputError
from quantkit.jobs.tasks import NeedlesSpec
from quantkit.models import LoadedModel
from quantkit.tasks.needles import Needles
from quantkit.tasks.task import Rows

VOCABULARY = 257


def _tokens(tokenizer: Any, task: Needles, item: int) -> int:
    """Tokens of a whole prompt with its answers, without what the task says of itself."""
    text = task.samples[item].sample.text
    return len(tokenizer(text.rsplit(".", 1)[0], add_special_tokens=False)["input_ids"])


def _rows(task: Needles, forward: Any) -> Rows:
    rows = np.full((len(task.samples), task.spec.queries), np.nan)
    for items in task.batches:
        rows[list(items)] = task.run(forward, items)
    return rows


class Reader:
    """A language model of bytes that answers by looking the asked city up in its context.

    `wrong(city, digit)` says where it errs; it counts its rows.
    """

    def __init__(self, wrong: Any = lambda city, digit: False) -> None:
        self.wrong = wrong
        self.fed: list[str] = []

    def __call__(self, batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        logits = torch.zeros(len(batch.input_ids), len(positions), VOCABULARY)
        for row, ids in enumerate(batch.input_ids):
            text = bytes(i for i in ids.tolist() if i < 256).decode("latin1")
            offset = 1 if int(ids[0]) == 256 else 0
            self.fed.append(text)
            for column, position in enumerate(positions.tolist()):
                logits[row, column, self._next(text[: position + 1 - offset])] = 1
        return logits

    def _next(self, text: str) -> int:
        asked = re.search(r"Answer: The magic number of (\w+) is( ?\d*)$", text)
        if asked is None:  # another row's position
            return 0
        number = re.search(rf"magic number of {asked[1]} is (\d+)\.", text)
        assert number is not None
        said = len(asked[2])
        if self.wrong(asked[1], said):
            return ord("x")
        return ord(f" {number[1]}"[said])


def _byte_ids() -> PreTrainedTokenizerFast:
    """One token a character, its id the character's code: what `Reader` reads."""
    vocab = {chr(code): code for code in range(256)} | {"<s>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("bos", ["never", "always"])
@pytest.mark.parametrize("limit", [900, 1300])
def test_a_prompt_is_as_long_as_the_limit_allows(limit: int, bos: str) -> None:
    tokenizer = _byte_ids()
    task = Needles.of(NeedlesSpec(tokens=limit), tokenizer, samples=6, bos=bos)
    longest_sentence = 130  # characters of a distractor
    for item in range(6):
        tokens = _tokens(tokenizer, task, item) + (bos == "always")
        assert limit - longest_sentence < tokens <= limit
    assert task.seq_len == limit


def test_without_a_length_of_its_own_a_prompt_has_seq_len() -> None:
    task = Needles.of(NeedlesSpec(), _byte_ids(), samples=2, seq_len=1000)
    assert all(850 < _tokens(_byte_ids(), task, item) <= 1000 for item in range(2))
    assert task.name == "needles"


def test_samples_take_turns_over_the_depths() -> None:
    spec = NeedlesSpec(needles=3, queries=2, tokens=2000, depths=(0.0, 0.5, 1.0))
    task = Needles.of(spec, _byte_ids(), samples=5)
    for index, asked in enumerate(task.samples):
        depth = (0.0, 0.5, 1.0)[index % 3]
        sample = asked.sample
        assert asked.depth_frac == depth
        for needle in sample.asked:
            assert sample.needles[needle].depth_frac == pytest.approx(depth, abs=0.06)


def test_a_reader_that_finds_every_number_is_right_in_one_forward_a_sample() -> None:
    task = Needles.of(NeedlesSpec(tokens=900), _byte_ids(), samples=5, batch_size=2)
    reader = Reader()
    scores = task.scores(_rows(task, reader))
    assert [metric.value for metric in scores.metrics] == [1.0, 1.0]
    assert len(reader.fed) == 5
    assert scores.details == {f"exact_match at {d:g}": 1.0 for d in task.spec.depths}


@pytest.mark.parametrize("digit", [0, 1, 6], ids=["the space", "first digit", "last digit"])
def test_one_wrong_token_of_the_second_answer_costs_the_sample(digit: int) -> None:
    spec = NeedlesSpec(needles=3, queries=2, tokens=900, depths=(0.0, 1.0))
    task = Needles.of(spec, _byte_ids(), samples=4)
    victims = [
        sample.needles[sample.asked[1]].city
        for sample in (task.samples[0].sample, task.samples[3].sample)
    ]
    rows = _rows(task, Reader(lambda city, said: city in victims and said == digit))
    expected = np.ones((4, 2))
    for row, asked in enumerate(task.samples):
        for query, needle in enumerate(asked.sample.asked):
            expected[row, query] = asked.sample.needles[needle].city not in victims
    assert expected[0, 1] == expected[3, 1] == 0
    np.testing.assert_array_equal(rows, expected)
    exact, query = task.scores(rows).metrics
    assert exact.value == expected.all(1).mean()
    assert query.value == expected.mean()
    assert exact.total.sum() == expected.all(1).sum()


def test_an_answer_that_is_no_number_is_neither_right_nor_wrong() -> None:
    """NaN where a token of the second answer is decided: the first one stands."""
    task = Needles.of(NeedlesSpec(needles=3, queries=2, tokens=900), _byte_ids(), samples=2)
    spoilt = {task.samples[1].pairs[1].positions[3]}
    reader = Reader()

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        logits = reader(batch, positions)
        assert positions is not None
        for column, position in enumerate(positions.tolist()):
            if position in spoilt:
                logits[1, column, 5] = float("nan")
        return logits

    np.testing.assert_array_equal(task.run(forward, [0, 1]), [[1, 1], [1, np.nan]])

    def nothing(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        return torch.full_like(reader(batch, positions), float("nan"))

    assert np.isnan(_rows(task, nothing)).all()


def _decoded(model: LlamaForCausalLM, ids: Sequence[int], steps: int) -> list[int]:
    """Greedy decoding, one whole forward pass a token."""
    found = list(ids)
    for _ in range(steps):
        with torch.no_grad():
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


def test_exact_match_is_what_decoding_token_by_token_gives(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The answers are made those that the model gives for some samples, and spoilt for others."""
    task = Needles.of(NeedlesSpec(needles=2, queries=2, tokens=600), tokenizer, samples=3)

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = tiny_llama(**batch.inputs).logits
        return logits if positions is None else logits[:, positions]

    for asked, spoil in zip(task.samples, ((), (0,), (1,)), strict=True):
        first, second = asked.pairs
        between = second.context[len(first.context) + len(first.continuation) :]
        said, context = [], list(first.context)
        for query, more in enumerate(((), between)):
            context += more
            answer = _decoded(tiny_llama, context, len(first.continuation))
            if query in spoil:
                answer[-1] = (answer[-1] + 1) % 256
            said.append(answer)
            context += answer
        start = list(first.context)
        whole = [start, start + said[0] + list(between)]
        for pair, before, answer in zip(asked.pairs, whole, said, strict=True):
            object.__setattr__(pair, "context", tuple(before))
            object.__setattr__(pair, "continuation", tuple(answer))
    rows = task.run(forward, [0, 1, 2])
    np.testing.assert_array_equal(rows, [[1, 1], [0, 1], [1, 0]])


def test_rows_do_not_depend_on_the_batches(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        logits: Tensor = tiny_llama(**batch.inputs).logits[:, positions]
        return logits

    found = []
    for size in (1, 3):
        task = Needles.of(NeedlesSpec(tokens=700), tokenizer, samples=4, batch_size=size)
        assert sorted(item for items in task.batches for item in items) == [0, 1, 2, 3]
        assert max(map(len, task.batches)) == size
        found.append((_rows(task, forward), sum(task.tokens)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] <= found[1][1] <= 4 * 700


def test_a_token_across_the_border_of_an_answer_is_asked_for_apart() -> None:
    """With a tokenizer that glues `0.` the first answer is no beginning of the second prompt."""
    vocab = {chr(code): code for code in range(256)} | {f"{d}.": 256 + d for d in range(10)}
    merges = [(str(d), ".") for d in range(10)]
    glued = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=merges))
    )
    task = Needles.of(NeedlesSpec(needles=2, queries=2, tokens=800), glued, samples=2)
    for asked in task.samples:
        assert len(asked.rows) == 2
        for pair, answer in zip(asked.pairs, asked.sample.answers, strict=True):
            assert "".join(map(chr, pair.continuation)) == f" {answer}"
    assert len(task.run(Last(), [0, 1])) == 2
    assert sum(task.tokens) > sum(len(asked.pairs[1].fed) for asked in task.samples)


class Last:
    """A model that always says a space."""

    def __call__(self, batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        logits = torch.zeros(len(batch.input_ids), len(positions), 300)
        logits[..., ord(" ")] = 1
        return logits


def test_a_tokenizer_with_a_token_for_every_word_works() -> None:
    """The leading space is no token of its own, and a number is one."""
    probe = Needles.of(NeedlesSpec(tokens=900), _byte_ids(), samples=3)
    words = sorted({w for a in probe.samples for w in re.findall(r"\w+|[^\w\s]", a.sample.text)})
    vocab = {"<unk>": 0} | {word: index + 1 for index, word in enumerate(words)}
    whole = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>")
    task = Needles.of(NeedlesSpec(tokens=120), tokenizer, samples=3)
    assert all(len(pair.continuation) == 1 for asked in task.samples for pair in asked.pairs)
    assert all(90 < len(asked.pairs[-1].fed) <= 120 for asked in task.samples)


@pytest.mark.parametrize(
    ("needles", "queries", "exact", "query"),
    [
        (1, 1, 1 / 900_000, 1 / 900_000),
        (2, 2, 1 / 2, 3 / 4),
        (4, 2, 1 / 12, (1 / 4 + 1 / 3) / 2),
        (6, 3, 1 / 120, (1 / 6 + 1 / 5 + 1 / 4) / 3),
    ],
)
def test_chance_is_naming_numbers_of_the_context(
    needles: int, queries: int, exact: float, query: float
) -> None:
    spec = NeedlesSpec(needles=needles, queries=queries, tokens=1500)
    task = Needles.of(spec, _byte_ids(), samples=2)
    first, second = task.scores(np.zeros((2, queries))).metrics
    assert (first.name, first.trials, first.chance) == ("exact_match", True, pytest.approx(exact))
    assert first.is_share and second.is_share
    assert (second.name, second.trials) == ("query_accuracy", False)
    assert second.chance == pytest.approx(query)


def test_details_are_accuracies_by_depth() -> None:
    spec = NeedlesSpec(tokens=900, depths=(0.0, 0.5))
    task = Needles.of(spec, _byte_ids(), samples=5)
    rows = np.array([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]], float)  # depths 0 .5 0 .5 0
    details = task.scores(rows).details
    assert details == {
        "exact_match at 0": pytest.approx(2 / 3),
        "exact_match at 0.5": pytest.approx(1 / 2),
    }


def test_items_are_a_function_of_the_seed_and_none_of_a_calibration_sets() -> None:
    from quantkit.calib_sets.retrieval import retrieval_sample

    spec = NeedlesSpec(tokens=900)
    one, same = (Needles.of(spec, _byte_ids(), samples=3, seed=5) for _ in range(2))
    other = Needles.of(spec, _byte_ids(), samples=3, seed=6)
    more = Needles.of(spec, _byte_ids(), samples=4, seed=5)
    assert one.item_hashes == same.item_hashes == more.item_hashes[:3]
    assert not set(one.item_hashes) & set(other.item_hashes)
    assert len(set(one.item_hashes)) == 3
    theirs = {retrieval_sample(index, seed=5).answers for index in range(50)}
    assert not theirs & {asked.sample.answers for asked in one.samples}
    assert one.data.sequences == 3 and one.data.sha256 == same.data.sha256 != other.data.sha256


def test_a_limit_that_is_too_short_says_how_much_is_needed() -> None:
    with pytest.raises(InputError, match=r"64 tokens are too few; .* a prompt has \d{3}"):
        Needles.of(NeedlesSpec(tokens=64), _byte_ids(), samples=1)


@pytest.mark.parametrize(
    ("seq_len", "positions", "limit"),
    [(2000, 1000, 1000), (1000, 2000, 1000), (1000, None, 1000)],
    ids=["the model has fewer", "the model has more", "the model does not say"],
)
def test_a_prompt_is_no_longer_than_the_model(
    seq_len: int, positions: int | None, limit: int
) -> None:
    task = Needles.of(
        NeedlesSpec(), _byte_ids(), samples=2, seq_len=seq_len, max_length=positions
    )  # fmt: skip
    sizes = [_tokens(_byte_ids(), task, item) for item in range(2)]
    assert all(limit - 130 < size <= limit for size in sizes)
    assert task.seq_len == limit


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    said = r"1025 tokens are more than the 1024 positions of the model: give tokens=1024 or fewer"
    with pytest.raises(InputError, match=said):
        Needles.of(NeedlesSpec(tokens=1025), _byte_ids(), samples=1, max_length=1024)
    task = Needles.of(NeedlesSpec(tokens=1024), _byte_ids(), samples=1, max_length=1024)
    assert task.seq_len == 1024
    with pytest.raises(InputError, match="300 tokens are too few"):
        Needles.of(NeedlesSpec(), _byte_ids(), samples=1, max_length=300)


def test_smollm2_finds_a_single_needle(smollm2: LoadedModel) -> None:
    task = Needles.of(
        NeedlesSpec(needles=1, queries=1, tokens=160, depths=(0.0, 1.0)),
        smollm2.tokenizer,
        samples=2,
    )

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        found: Tensor = smollm2.model(**batch.inputs, logits_to_keep=positions).logits
        return found

    assert _rows(task, forward).tolist() == [[1], [1]]
