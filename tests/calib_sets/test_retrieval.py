"""Retrieval samples: the same everywhere, with needles where they are said to be."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from quantkit.calib_sets.retrieval import CITIES, RetrievalSample, retrieval_sample
from quantkit.errors import InputError

NEEDLE = re.compile(r"The magic number of ([A-Z][a-z]+) is (\d{6})\.")


@pytest.mark.parametrize("needles, queries", [(1, 1), (4, 2), (8, 8), (75, 3)])
def test_the_context_holds_the_needles_and_nothing_else_that_looks_like_one(
    needles: int, queries: int
) -> None:
    for index in range(5):
        sample = retrieval_sample(index, needles=needles, queries=queries)

        found = NEEDLE.findall(sample.context)
        assert found == [(needle.city, needle.number) for needle in sample.needles]
        assert len({city for city, _ in found}) == needles
        assert len({number for _, number in found}) == needles
        assert not re.search(r"\d", NEEDLE.sub("", sample.context))
        assert not any(city in NEEDLE.sub("", sample.context) for city in CITIES)


def test_places_are_where_they_are_said_to_be() -> None:
    for index in range(20):
        sample = retrieval_sample(index, needles=5, sentences=40)
        sentences = re.split(r"(?<=\.) ", sample.context)
        assert len(sentences) == 45
        for needle in sample.needles:
            assert sample.context[needle.start :].startswith(needle.sentence)
            before = sentences[: sentences.index(needle.sentence)]
            distractors = sum(not NEEDLE.fullmatch(sentence) for sentence in before)
            assert needle.depth_frac == distractors / 40


def test_questions_ask_for_needles_and_answers_are_theirs() -> None:
    sample = retrieval_sample(3, needles=6, queries=3)
    facts = dict(NEEDLE.findall(sample.context))

    assert len(sample.questions) == len(set(sample.questions)) == 3
    for question, answer in zip(sample.questions, sample.answers, strict=True):
        (city,) = re.findall(r"magic number of (\w+)\?", question)
        assert question.endswith(f"The magic number of {city} is")
        assert facts[city] == answer
        assert f"{question} {answer}." in sample.text
    assert sample.text.startswith(sample.context)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_an_asked_needle_stands_at_the_depth_that_is_given(depth: float) -> None:
    for index in range(5):
        sample = retrieval_sample(index, needles=4, queries=1, sentences=40, depths=(depth,))

        assert sample.needles[sample.asked[0]].depth_frac == depth


def test_depths_are_drawn_from_all_of_the_context() -> None:
    depths = [n.depth_frac for i in range(400) for n in retrieval_sample(i, sentences=4).needles]

    assert set(depths) == {0, 0.25, 0.5, 0.75, 1}
    counts = [depths.count(depth) for depth in sorted(set(depths))]
    assert min(counts) > 0.8 * len(depths) / 5  # 320 expected, four standard deviations are 64


def test_the_bytes_are_the_same_on_every_machine() -> None:
    # a version of numpy that draws otherwise would change this
    text = "\0".join(retrieval_sample(index, seed=7).text for index in range(50))

    assert hashlib.sha256(text.encode()).hexdigest() == (
        "0b0dc3c787ebff1dff095a45517f63bfca4404158dc03a1ccaa071d11c990e6b"
    )


def test_index_seed_and_parameters_make_other_samples() -> None:
    samples: list[RetrievalSample] = [
        retrieval_sample(0),
        retrieval_sample(1),
        retrieval_sample(0, seed=1),
        retrieval_sample(0, needles=5),
        retrieval_sample(0, sentences=20),
    ]

    assert len({sample.context for sample in samples}) == 5
    assert retrieval_sample(0) == samples[0]


def test_a_haystack_without_distractors() -> None:
    sample = retrieval_sample(0, needles=2, queries=1, sentences=0)

    assert sample.context == " ".join(needle.sentence for needle in sample.needles)


@pytest.mark.parametrize(
    "wrong",
    [
        {"needles": 0}, {"needles": 76}, {"queries": 0}, {"queries": 5}, {"sentences": -1},
        {"seed": -1}, {"depths": (0.5, 0.5, 0.5)}, {"depths": (1.5,)},
    ],
)  # fmt: skip
def test_numbers_that_no_sample_can_have(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="retrieval: expected"):
        retrieval_sample(0, **wrong)
