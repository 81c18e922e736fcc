"""Generated rows: full, true, of the tasks' own form, and none of the tasks' own samples."""

from __future__ import annotations

import pydoc_data.topics
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from quantkit.calib_sets.draw import Draw
from quantkit.calib_sets.retrieval import CITIES, RetrievalSample, retrieval_sample
from quantkit.errors import InputError
from quantkit.jobs.tasks import IclSpec, NeedlesSpec
from quantkit.tasks.continuations import tokenized
from quantkit.tasks.icl import Icl
from quantkit.tasks.icl_items import CATEGORIES, LABELS, icl_item
from quantkit.tasks.needles import FIRST_INDEX, Needles
from quantkit.training import generated
from quantkit.training.generated import icl_rows, needles_rows, sample_texts
from quantkit.training.tokenizer import plain_encoder, train_tokenizer

MAKERS = {"needles": needles_rows, "icl": icl_rows}
FACT = re.compile(r"The magic number of (\w+) is (\d{6})\.")
ASKED = re.compile(
    r"\n\nQuestion: What is the magic number of (\w+)\?\n"
    r"Answer: The magic number of (\w+) is (\d{6})\."
)
SEED = 7


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(sample_texts(100, seed=SEED), 900, folder, 256)
    return AutoTokenizer.from_pretrained(folder)


def samples(tokenizer: Any, row: np.ndarray) -> list[str]:
    """Returns the texts of a row; the last may be cut."""
    text = tokenizer.decode(row[1:].tolist())
    return str(text).split(tokenizer.eos_token)


def split(sample: str) -> tuple[dict[str, str], list[tuple[str, str, str]], str]:
    """Returns the facts of a retrieval sample, its questions, and what no pattern took."""
    context, _, questions = sample.partition("\n\n")
    asked = ASKED.findall("\n\n" + questions)
    return dict(FACT.findall(context)), asked, ASKED.sub("", "\n\n" + questions)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("context", [16, 100, 256])
def test_a_row_is_bos_and_full(trained: Any, make: Any, context: int) -> None:
    rows = make(trained, 12, context=context, seed=SEED)

    assert rows.shape == (12, context)
    assert rows.dtype == np.uint16
    assert (rows[:, 0] == trained.bos_token_id).all()
    assert not (rows[:, 1:] == trained.bos_token_id).any()
    assert rows.max() < len(trained)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_row_depends_on_its_index_and_seed_alone(trained: Any, make: Any) -> None:
    rows = make(trained, 10, context=200, seed=SEED)

    assert (make(trained, 4, context=200, seed=SEED) == rows[:4]).all()
    assert len(np.unique(rows, axis=0)) == 10
    assert not (make(trained, 10, context=200, seed=SEED + 1) == rows).all(1).any()
    assert make(trained, 0, context=200, seed=SEED).shape == (0, 200)


def test_every_answer_stands_in_its_own_context(trained: Any) -> None:
    questions = 0
    for row in needles_rows(trained, 60, context=256, seed=SEED):
        *whole, _cut = samples(trained, row)
        for sample in whole:
            facts, asked, rest = split(sample)
            assert rest == ""
            assert asked
            assert len({city for city, _, _ in asked}) == len(asked)
            for city, again, number in asked:
                assert city == again
                assert facts[city] == number
            questions += len(asked)
    assert questions > 100


def test_needles_vary_in_facts_questions_order_and_distractors(trained: Any) -> None:
    found = []
    for row in needles_rows(trained, 150, context=400, seed=SEED):
        *whole, _cut = samples(trained, row)
        for sample in whole:
            facts, asked, _ = split(sample)
            order = [list(facts).index(city) for city, _, _ in asked]
            sentences = len(re.findall(r"\.(?: |$)", sample.partition("\n\n")[0])) - len(facts)
            found.append((len(facts), order, sentences))

    assert {facts for facts, _, _ in found} == set(range(1, 9))
    assert set(range(9)) <= {sentences for _, _, sentences in found}
    several = [(facts, order) for facts, order, _ in found if facts > 1]
    all_asked = sum(len(order) == facts for facts, order in several) / len(several)
    assert 0.7 < all_asked < 0.95
    # what is asked first is no place of the context more often than another, distractors or not
    for without in (True, False):
        first = [order[0] / (facts - 1) for facts, order, sentences in found
                 if facts > 1 and (sentences == 0) == without]  # fmt: skip
        assert len(first) > 50
        assert 0.38 < np.mean(first) < 0.62


def test_half_of_the_rows_begin_with_a_sample_that_fills_them(trained: Any) -> None:
    rows = needles_rows(trained, 80, context=400, seed=SEED)
    encoder = plain_encoder(trained)

    first = [len(encoder.encode(samples(trained, row)[0]).ids) for row in rows]
    assert all(length <= 400 for length in first)
    # less than one more sentence
    full = sum(length > 370 for length in first) / len(first)
    assert 0.4 < full < 0.7


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_row_without_room_for_one_sample_is_its_beginning(trained: Any, make: Any) -> None:
    for row in make(trained, 10, context=16, seed=SEED):
        (cut,) = samples(trained, row)
        start = r"The magic number of \w+" if make is needles_rows else r"\w+: \w+"
        assert re.match(start, cut)


def test_a_shot_says_the_same_label_for_a_category(trained: Any) -> None:
    category = {word: name for name, words in CATEGORIES.items() for word in words}
    counts = []
    for row in icl_rows(trained, 40, context=256, seed=SEED):
        for sample in samples(trained, row)[:-1]:
            shots = [line.split(": ") for line in sample.split("\n")]
            label = {category[word]: label for word, label in shots}
            assert [label[category[word]] for word, _ in shots] == [said for _, said in shots]
            # the question is the last: its label has been shown, and its word has not
            assert shots[-1][1] in {said for _, said in shots[:-1]}
            assert shots[-1][0] not in {word for word, _ in shots[:-1]}
            counts.append((len(label), len(shots) - 1))
    assert {labels for labels, _ in counts} == set(range(2, 9))
    assert all(labels <= shots <= 64 for labels, shots in counts)
    assert max(shots for _, shots in counts) > 30


def test_needles_are_token_for_token_what_the_task_asks(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Needles.of(NeedlesSpec(needles=3, queries=2), trained, samples=5, seq_len=256)
    encoder = plain_encoder(trained)
    for asked in task.samples:
        ids = [trained.bos_token_id, *encoder.encode(asked.sample.text).ids[1:]]
        for pair in asked.pairs:
            fed = [*pair.context, *pair.continuation]
            assert ids[: len(fed)] == fed

    made: list[RetrievalSample] = []

    def recorded(*args: Any, **values: Any) -> Any:
        made.append(replace(*args, **values))
        return made[-1]

    monkeypatch.setattr(generated, "replace", recorded)
    for row in needles_rows(trained, 10, context=256, seed=SEED):
        first = samples(trained, row)[0]
        (sample,) = {sample.text: sample for sample in made if sample.text == first}.values()
        # each question as the task asks it: all before it is context
        end = len(sample.context)
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            border = end + len(f"\n\n{question}")
            end = border + len(f" {answer}.")
            pair = tokenized(trained, first[:border], f" {answer}")
            fed = [*pair.context, *pair.continuation]
            assert first[border:end] == f" {answer}."
            assert row[: len(fed)].tolist() == fed
            assert len(pair.continuation) == 6
        assert end == len(first)


def test_icl_is_token_for_token_what_the_task_asks(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Icl.of(IclSpec(labels=3, shots=12, orders=1), trained, samples=1, seed=3, seq_len=256)
    ((prompt,),), (item,) = task.prompts, task.items
    right = prompt[item.answer]
    monkeypatch.setattr(generated, "icl_item", lambda *_args, **_options: item)

    (row,) = icl_rows(trained, 1, context=256, seed=SEED)

    fed = [*right.context, *right.continuation]
    assert row[: len(fed) + 1].tolist() == [*fed, trained.eos_token_id]
    assert len(right.continuation) == 1


@pytest.mark.parametrize("seed", [0, 1_000_000])
def test_no_sample_is_one_of_an_evaluation_even_with_its_seed(trained: Any, seed: int) -> None:
    facts: set[tuple[str, str]] = set()
    for row in needles_rows(trained, 60, context=256, seed=seed):
        facts |= set(FACT.findall(trained.decode(row.tolist())))
    theirs = {
        (needle.city, needle.number)
        for first in (0, FIRST_INDEX)
        for index in range(50)
        for needle in retrieval_sample(first + index, seed=seed, needles=8, queries=8).needles
    }
    # of 67.5 million pairs of a city and a number
    assert len(facts) > 200
    assert len(theirs) == 800
    assert not facts & theirs

    shown = {
        tuple(sample.split("\n")[:3])
        for row in icl_rows(trained, 60, context=256, seed=seed)
        for sample in samples(trained, row)
    }
    for index in range(50):
        for labels in range(2, 9):
            item = icl_item(index, seed=seed, labels=labels, shots=16, orders=1)
            assert tuple(item.prompt(0).split("\n")[:3]) not in shown


def test_seeds_below_2_to_the_32_share_no_draw_and_longer_ones_may() -> None:
    index = generated._FIRST_SAMPLE + 5

    def drawn(seed: int, index: int) -> list[int]:
        draw = Draw(seed, index)
        return [draw.below(1 << 32) for _ in range(4)]

    largest = (1 << 32) - 1
    theirs = [drawn(s, i) for s in (0, 7, largest) for i in (0, 5, 1 << 20, largest)]
    assert all(drawn(seed, index) not in theirs for seed in (0, 7, largest))
    # the words 7, 5, 2^20, of the seed and the index together
    assert drawn(7 + (5 << 32), 1 << 20) == drawn(7, index)


def test_words_of_the_tasks_are_one_token_where_the_tokenizer_saw_samples(tmp_path: Path) -> None:
    text = [str(topic) for topic in pydoc_data.topics.topics.values()]
    train_tokenizer([*text, *sample_texts(200, seed=SEED)], 4096, tmp_path, 256)
    trained = AutoTokenizer.from_pretrained(tmp_path)

    long = [word for word in (*CITIES, *LABELS) if len(trained.tokenize(f" {word}")) > 1]
    assert not long
    assert all(len(trained.tokenize(f" {digit}")) == 1 for digit in range(1, 10))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("missing", ["bos_token", "eos_token"])
def test_a_tokenizer_without_borders_is_an_error(trained: Any, make: Any, missing: str) -> None:
    lacking = type(trained)(
        tokenizer_object=trained.backend_tokenizer,
        **({"bos_token": "<s>", "eos_token": "</s>"} | {missing: None}),
    )

    with pytest.raises(InputError, match="no BOS or no EOS token"):
        make(lacking, 1, context=64, seed=SEED)
