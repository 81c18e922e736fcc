"""In-context classification: items that only the shots can solve, and the spread over orders."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantkit.calib_sets import TokenBatch
from quantkit.errors import InputError
from quantkit.jobs.tasks import IclSpec
from quantkit.tasks.icl import Icl
from quantkit.tasks.icl_items import CATEGORIES, LABELS, icl_item
from quantkit.tasks.task import Rows

CATEGORY_OF = {word: name for name, words in CATEGORIES.items() for word in words}


def test_categories_hold_as_many_words_and_share_none() -> None:
    assert len(CATEGORIES) == len(LABELS) == len(set(LABELS)) == 16
    assert {len(set(words)) for words in CATEGORIES.values()} == {24}
    assert len(CATEGORY_OF) == 16 * 24
    assert not set(LABELS) & set(CATEGORY_OF)


@pytest.mark.parametrize(("labels", "shots"), [(2, 2), (4, 16), (4, 18), (3, 100), (16, 64)])
def test_a_label_stands_for_one_category_and_the_question_is_in_no_shot(
    labels: int, shots: int
) -> None:
    for index in range(20):
        item = icl_item(index, labels=labels, shots=shots, orders=2)
        categories: dict[str, set[str]] = {}
        for word, label in item.shots:
            categories.setdefault(label, set()).add(CATEGORY_OF[word])
        assert set(categories) == set(item.labels) and len(item.labels) == labels
        assert all(len(names) == 1 for names in categories.values())
        assert len(set().union(*categories.values())) == labels
        assert categories[item.labels[item.answer]] == {CATEGORY_OF[item.question]}
        assert item.question not in {word for word, _ in item.shots}
        counts = Counter(label for _, label in item.shots).values()
        assert max(counts) - min(counts) <= 1 and sum(counts) == shots


def test_words_repeat_only_when_all_were_shown() -> None:
    item = icl_item(0, labels=2, shots=2 * 23, orders=1)
    shown = Counter(item.shots)
    asked = CATEGORY_OF[item.question]
    own = [count for (word, _), count in shown.items() if CATEGORY_OF[word] == asked]
    assert len(own) == 23 and set(shown.values()) == {1}


def test_labels_say_nothing_about_categories_and_answers_are_even() -> None:
    """A label word is one category's in one sample and another's in the next."""
    pairs, answers, places = set(), Counter[int](), Counter[str]()
    for index in range(800):
        item = icl_item(index, labels=4, shots=4, orders=1)
        answer = item.labels[item.answer]
        pairs.add((answer, CATEGORY_OF[item.question]))
        answers[item.answer] += 1
        places[answer] += 1
    assert len(pairs) > 0.9 * 16 * 16
    assert all(150 < count < 250 for count in answers.values())
    assert len(places) == 16 and max(places.values()) < 85


def test_orders_permute_the_same_shots() -> None:
    item = icl_item(3, labels=4, shots=32, orders=5)
    lines = [item.prompt(order).split("\n") for order in range(5)]
    assert len({tuple(text) for text in lines}) == 5
    assert len({tuple(sorted(text)) for text in lines}) == 1
    assert all(text[-1] == f"{item.question}:" for text in lines)
    assert sorted(lines[0][:-1]) == sorted(f"{word}: {label}" for word, label in item.shots)


def test_an_item_is_a_function_of_seed_and_index() -> None:
    """Golden: it must stay the same on every version of Python and numpy."""
    item = icl_item(1, seed=7, labels=2, shots=4, orders=2)
    assert item == icl_item(1, seed=7, labels=2, shots=4, orders=2)
    assert item != icl_item(2, seed=7, labels=2, shots=4, orders=2)
    assert item != icl_item(1, seed=8, labels=2, shots=4, orders=2)
    assert item.prompt(0) == ("Italy: east\nJapan: east\nParis: three\nShanghai: three\nAmsterdam:")


@pytest.mark.parametrize(
    "wrong",
    [{"labels": 1}, {"labels": 17}, {"shots": 3}, {"orders": 0}, {"index": -1}, {"seed": -1}],
    ids=str,
)
def test_numbers_that_no_item_can_have_are_refused(wrong: dict[str, int]) -> None:
    given: dict[str, Any] = {"index": 0, "labels": 4, "shots": 4, "orders": 1} | wrong
    with pytest.raises(InputError, match="icl: expected 2 to 16 labels"):
        icl_item(given.pop("index"), **given)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every word, colon and line end."""
    words = [*CATEGORY_OF, *LABELS, ":", "\n"]
    vocab = {word: index for index, word in enumerate(words)}
    whole = Tokenizer(models.WordLevel(vocab=vocab, unk_token=":"))
    whole.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(" "), "removed"),
        pre_tokenizers.Split(Regex(r"\n|:"), "isolated"),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=whole)


class Learner:
    """Reads a prompt's tokens and says the label of the shots of the same category.

    `fails(question, first label)` says where it errs, by the order that it sees.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, fails: Any = lambda *_: False) -> None:
        self.tokenizer, self.fails = tokenizer, fails
        self.rows = 0
        self.size = len(tokenizer) + 300

    def __call__(self, batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        self.rows += len(batch.input_ids)
        logits = torch.zeros(len(batch.input_ids), len(positions), self.size)
        for row, (ids, mask) in enumerate(zip(batch.input_ids, batch.attention_mask, strict=True)):
            words = [self.tokenizer.convert_ids_to_tokens(i) for i in ids[mask.bool()].tolist()]
            text = "".join(words).replace("\u0120", " ").replace("\u010a", "\n")
            shots = re.findall(r"(\w+): ?(\w+)\n", text)
            question = text.rsplit("\n", 1)[1].split(":")[0]
            of = {CATEGORY_OF[word]: label for word, label in shots}
            said = of[CATEGORY_OF[question]]
            if self.fails(question, shots[0][1]):
                said = next(label for label in of.values() if label != said)
            tokens = self._tokens(said)
            for column, position in enumerate(positions.tolist()):
                step = position - self._colon(ids, mask)
                if 0 <= step < len(tokens):
                    logits[row, column, tokens[step]] = 5
        return logits

    def _colon(self, ids: Tensor, mask: Tensor) -> int:
        colon = self.tokenizer(":", add_special_tokens=False)["input_ids"][0]
        return int((ids[mask.bool()] == colon).nonzero()[-1])

    def _tokens(self, label: str) -> list[int]:
        found: list[int] = self.tokenizer(f" {label}", add_special_tokens=False)["input_ids"]
        return found


def _rows(task: Icl, forward: Any) -> Rows:
    rows = np.full((len(task.items), task.spec.orders), np.nan)
    for items in task.batches:
        rows[list(items)] = task.run(forward, items)
    return rows


@pytest.mark.parametrize("kind", ["one token a label", "one token a byte"])
def test_who_learns_from_the_shots_is_right_in_every_order(
    kind: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    own = word_tokenizer() if kind == "one token a label" else tokenizer
    spec = IclSpec(labels=3, shots=9, orders=2)
    task = Icl.of(spec, own, samples=5, batch_size=4)
    learner = Learner(own)
    scores = task.scores(_rows(task, learner))
    assert scores.metrics[0].value == 1.0
    assert learner.rows == 5 * 2 * (1 if kind == "one token a label" else 3)
    assert scores.details == {
        "order_min": 1.0, "order_max": 1.0, "order_range": 0.0, "order_sd": 0.0
    }  # fmt: skip


def test_who_errs_in_some_orders_errs_in_those_columns() -> None:
    tokenizer = word_tokenizer()
    spec = IclSpec(labels=4, shots=12, orders=4)
    task = Icl.of(spec, tokenizer, samples=8, batch_size=8)
    bad = set(LABELS[::2])  # an order that begins with one of these is answered wrongly
    rows = _rows(task, Learner(tokenizer, lambda question, first: first in bad))
    expected = np.array([
        [item.prompt(order).split("\n")[0].split(": ")[1] not in bad for order in range(4)]
        for item in task.items
    ])  # fmt: skip
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(rows, expected)
    scores = task.scores(rows)
    metric = scores.metrics[0]
    assert metric.value == pytest.approx(expected.mean())
    by_order = expected.mean(0)
    assert scores.details == {
        "order_min": by_order.min(),
        "order_max": by_order.max(),
        "order_range": pytest.approx(np.ptp(by_order)),
        "order_sd": pytest.approx(np.sqrt(((by_order - by_order.mean()) ** 2).sum() / 3)),
    }
    assert metric.chance == 1 / 4 and metric.trials
    assert metric.successes is not None
    np.testing.assert_array_equal(metric.successes, expected[:, 0])


def test_one_order_has_no_spread() -> None:
    task = Icl.of(IclSpec(labels=2, shots=2, orders=1), word_tokenizer(), samples=3)
    scores = task.scores(np.array([[1.0], [0.0], [1.0]]))
    assert scores.details == {} and scores.metrics[0].value == pytest.approx(2 / 3)


def test_who_prefers_no_label_is_wrong() -> None:
    """Equal log-probabilities are no answer: chance is not reached by a tie."""
    task = Icl.of(IclSpec(labels=2, shots=2, orders=2), word_tokenizer(), samples=2)
    rows = _rows(task, lambda batch, at: torch.zeros(len(batch.input_ids), len(at), 500))
    np.testing.assert_array_equal(rows, np.zeros((2, 2)))


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_a_logit_of_another_label_that_is_no_number(value: str) -> None:
    """NaN is no answer at all, not a wrong one; -inf is what no model would say."""
    tokenizer = word_tokenizer()
    task = Icl.of(IclSpec(labels=2, shots=2, orders=2), tokenizer, samples=3)
    learner = Learner(tokenizer)

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        logits = learner(batch, positions)
        item = task.items[1]
        (word,) = tokenizer(item.labels[1 - item.answer])["input_ids"]
        if batch.input_ids.tolist() == [list(task.prompts[1][1][0].fed)]:
            logits[..., word] = float(value)
        return logits

    expected = np.ones((3, 2))
    if value == "nan":
        expected[1, 1] = np.nan
    rows = np.array([task.run(_one_by_one(forward), [item])[0] for item in range(3)])
    np.testing.assert_array_equal(rows, expected)


def test_nan_in_a_later_token_of_another_label_shows(tokenizer: PreTrainedTokenizerFast) -> None:
    """With a token a byte each label is fed by itself, so that the right one has no NaN."""
    task = Icl.of(IclSpec(labels=2, shots=2, orders=2), tokenizer, samples=2)
    item = task.items[1]
    wrong = f"{item.prompt(0)} {item.labels[1 - item.answer]}"[:-1]
    learner = Learner(tokenizer)

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        logits = learner(batch, positions)
        if tokenizer.decode(batch.input_ids[0]) == wrong:
            logits[0, -1] = float("nan")
        return logits

    rows = [task.run(_one_by_one(forward), [index])[0] for index in range(2)]
    np.testing.assert_array_equal(rows, [[1, 1], [np.nan, 1]])


def _one_by_one(forward: Any) -> Any:
    """Gives a callable the rows of a batch without their padding."""

    def rows(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        parts = []
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            own = ids[mask.bool()][None]
            alone = replace(batch, input_ids=own, attention_mask=torch.ones_like(own))
            parts.append(forward(alone, positions))
        return torch.cat(parts)

    return rows


def test_a_model_that_computes_nan_has_no_accuracy() -> None:
    task = Icl.of(IclSpec(labels=2, shots=2, orders=2), word_tokenizer(), samples=2)
    rows = _rows(task, lambda b, at: torch.full((len(b.input_ids), len(at), 500), float("nan")))
    assert rows.shape == (2, 2) and np.isnan(rows).all()


def test_several_tokens_count_by_their_summed_log_probability(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    task = Icl.of(IclSpec(labels=4, shots=4, orders=2), tokenizer, samples=4, batch_size=3)
    with torch.no_grad():
        tiny_llama.lm_head.weight.mul_(30)

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        found: Tensor = tiny_llama(**batch.inputs).logits[:, positions]
        return found

    rows = _rows(task, forward)
    for row, item in zip(rows, task.items, strict=True):
        for order in range(2):
            sums = []
            for label in item.labels:
                text = item.prompt(order)
                ids = tokenizer(f"{text} {label}")["input_ids"]
                with torch.no_grad():
                    logits = tiny_llama(torch.tensor([ids])).logits[0].double()
                said = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
                sums.append(float(said[len(text) - 1 :].sum()))
            assert row[order] == float(int(np.argmax(sums)) == item.answer)


def test_batches_hold_every_question_once_and_change_nothing(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        assert positions is not None and len(batch.input_ids) <= size
        found: Tensor = tiny_llama(**batch.inputs).logits[:, positions]
        return found

    found = []
    for size in (1, 7):
        spec = IclSpec(labels=2, shots=4, orders=3)
        task = Icl.of(spec, tokenizer, samples=5, batch_size=size)
        assert sorted(item for items in task.batches for item in items) == list(range(5))
        assert len(task.tokens) == len(task.batches)
        found.append(_rows(task, forward))
    np.testing.assert_array_equal(found[0], found[1])


def test_the_same_items_have_the_same_hashes_for_another_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    spec = IclSpec(labels=2, shots=4, orders=3)
    one = Icl.of(spec, tokenizer, samples=4, seed=2)
    other = Icl.of(spec, word_tokenizer(), samples=4, seed=2)
    assert one.item_hashes == other.item_hashes and len(set(one.item_hashes)) == 4
    assert one.data.sha256 != other.data.sha256
    assert not set(one.item_hashes) & set(Icl.of(spec, tokenizer, samples=4).item_hashes)
    assert (one.data.source, one.data.sequences) == ("icl", 4)


def test_a_prompt_that_is_too_long_says_how_many_shots_fit() -> None:
    """With a token a word, a shot has four tokens and the question two, with its answer three."""
    said = r"has 131 tokens, and about 24 shots fit in the 100 .* give shots=24"
    with pytest.raises(InputError, match=said):
        Icl.of(IclSpec(), word_tokenizer(), samples=1, seq_len=100)
    with pytest.raises(InputError, match=r"about 3 shots fit .* give fewer labels"):
        Icl.of(IclSpec(), word_tokenizer(), samples=1, seq_len=17)
    assert Icl.of(IclSpec(shots=24), word_tokenizer(), samples=1, seq_len=100).data.seq_len <= 100


def test_a_prompt_is_no_longer_than_the_model() -> None:
    """The hint does not offer more tokens where the model has no more positions."""
    said = r"about 24 shots fit in the 100 positions of the model: give shots=24\.$"
    with pytest.raises(InputError, match=said):
        Icl.of(IclSpec(), word_tokenizer(), samples=1, seq_len=512, max_length=100)
    with pytest.raises(InputError, match=r"in the 100 of --seq-len: give shots=24, or more tokens"):
        Icl.of(IclSpec(), word_tokenizer(), samples=1, seq_len=100, max_length=512)
    one, other = (
        Icl.of(IclSpec(), word_tokenizer(), samples=1, seq_len=131, max_length=positions)
        for positions in (131, None)
    )
    assert one.prompts == other.prompts
