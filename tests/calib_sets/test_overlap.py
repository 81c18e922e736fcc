"""Shared data is found whatever the cuts are, and a text that repeats itself is no overlap."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import (
    TokenSlice,
    data_slice,
    repeated_blocks,
    require_disjoint,
    sample_count_warning,
    text_slice,
)
from quantkit.calib_sets.array_files import AS_GIVEN
from quantkit.calib_sets.arrays import ArraySlice
from quantkit.calib_sets.overlap import GRAM, WINDOW, fingerprints, shared_blocks
from quantkit.errors import InputError
from quantkit.models import LoadedModel

WRAP = 2**64


def mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WRAP
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WRAP
    return value ^ (value >> 31)


def slow_fingerprints(ids: list[int]) -> set[int]:
    """Winnowing by its definition, in Python's own whole numbers."""
    grams = []
    for start in range(len(ids) - GRAM + 1):
        total = 0
        for place, token in enumerate(ids[start : start + GRAM]):
            total += mixed(token + 1) * pow(0x9E3779B97F4A7C15, place, WRAP)
        grams.append(mixed(total % WRAP))
    if not grams:
        return set()
    if len(grams) <= WINDOW:
        return {min(grams)}
    return {min(grams[start : start + WINDOW]) for start in range(len(grams) - WINDOW + 1)}


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def blocks(*rows: list[int]) -> TokenSlice:
    """A slice of which nothing is known but its tokens."""
    return TokenSlice(
        source="t", source_sha256="0", ids=tuple(torch.tensor(row) for row in rows),
        seq_len=0, skip=0, bos="never",
    )  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 200])
def test_fingerprints_are_winnowing(length: int) -> None:
    ids = tokens(length, seed=length)

    found = fingerprints(np.array(ids, np.int64))

    assert set(found.tolist()) == slow_fingerprints(ids)
    assert len(found) == len(set(found.tolist()))


def test_a_run_of_31_equal_tokens_has_a_fingerprint_in_both() -> None:
    run = tokens(GRAM + WINDOW - 1, seed=1)
    for seed in range(30):
        one = tokens(100, seed=2 * seed + 10) + run + tokens(40, seed=seed + 500)
        other = tokens(7, seed=2 * seed + 11) + run + tokens(90, seed=seed + 900)

        shared = set(fingerprints(np.array(one))) & set(fingerprints(np.array(other)))
        assert slow_fingerprints(run) <= {int(value) for value in shared}


def test_few_fingerprints_a_block() -> None:
    counts = [len(fingerprints(np.array(tokens(512, seed)))) for seed in range(20)]

    assert np.mean(counts) == pytest.approx(2 * 497 / (WINDOW + 1), rel=0.1)  # the paper's density


def test_other_cuts_of_one_text_are_found_without_knowing_where_they_were_cut() -> None:
    stream = tokens(4000)
    one = blocks(*(stream[i : i + 256] for i in range(0, 2048, 256)))
    other = blocks(*(stream[i : i + 200] for i in range(0, 4000, 200)))

    # 2048 tokens hold ten blocks of 200 and a quarter of the eleventh
    assert shared_blocks(one, other) == 10
    assert shared_blocks(other, one) == 10
    with pytest.raises(InputError, match=r"share 10 blocks.*--allow-overlap"):
        require_disjoint(one, other, "calibration and evaluation")
    assert require_disjoint(one, other, "calibration and evaluation", allow=True) == 10


def test_a_short_block_inside_a_long_one_is_found() -> None:
    stream = tokens(2000)

    assert shared_blocks(blocks(stream), blocks(stream[700:764])) == 1
    assert shared_blocks(blocks(stream[700:764]), blocks(stream)) == 1


def test_a_shared_phrase_is_no_shared_block() -> None:
    phrase = tokens(40, seed=3)
    one = blocks(tokens(200, seed=4) + phrase)
    other = blocks(phrase + tokens(200, seed=5))

    assert require_disjoint(one, other, "they") == 0
    assert set(fingerprints(one.ids[0].numpy())) & set(fingerprints(other.ids[0].numpy()))


def test_equal_blocks_that_are_too_short_for_fingerprints() -> None:
    assert shared_blocks(blocks([1, 2, 3], [4, 5, 6]), blocks([4, 5, 6], [7, 8, 9])) == 1


def test_places_decide_where_both_are_of_one_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "letters.txt"
    path.write_text("".join(random.Random(0).choices("abcdefgh", k=120)))

    def cut(seq_len: int, samples: int, skip: int = 0) -> TokenSlice:
        return text_slice(str(path), tokenizer, seq_len=seq_len, samples=samples, skip=skip)

    first = cut(8, 5)  # characters 0 to 39
    assert shared_blocks(first, cut(8, 10, skip=5)) == 0
    assert shared_blocks(first, cut(10, 8, skip=4)) == 0
    assert shared_blocks(first, cut(10, 9, skip=3)) == 2  # its first block lies in two
    assert shared_blocks(first, cut(6, 14, skip=6)) == 1  # characters 36 to 41 begin inside
    assert shared_blocks(first, cut(5, 24)) == 8


def test_a_text_that_repeats_itself_is_no_overlap_of_its_parts(
    tmp_path: Path, tokenizer: Any
) -> None:
    part = "".join(random.Random(1).choices("abcdefgh ", k=128))
    (tmp_path / "a.txt").write_text(part + "x" + part + "y")
    first = text_slice(str(tmp_path / "a.txt"), tokenizer, seq_len=64, samples=2)
    second = text_slice(str(tmp_path / "a.txt"), tokenizer, seq_len=64, samples=2, skip=2)

    assert require_disjoint(first, second, "they") == 0
    assert repeated_blocks(first, second) == 2
    # another file with the same text has no place in the first one
    (tmp_path / "b.txt").write_text("z" + part)
    copy = text_slice(str(tmp_path / "b.txt"), tokenizer, seq_len=64)
    assert shared_blocks(first, copy) == 2


def test_blocks_of_pydoc(smollm2: LoadedModel) -> None:
    def cut(seq_len: int, samples: int, skip: int = 0) -> Any:
        return data_slice("pydoc", smollm2, seq_len=seq_len, samples=samples, skip=skip)

    assert require_disjoint(cut(256, 16), cut(256, 32, skip=16), "they") == 0
    assert require_disjoint(cut(512, 128), cut(512, 64, skip=128), "they") == 0
    shifted = cut(200, 20)
    assert require_disjoint(cut(256, 16), shifted, "they", allow=True) == 20


def test_bos_and_the_cut_that_it_shifts_hide_nothing(bos_tokenizer: Any) -> None:
    bare = text_slice("pydoc", bos_tokenizer, seq_len=64, samples=10, bos="never")
    with_bos = text_slice("pydoc", bos_tokenizer, seq_len=64, samples=10, bos="always")

    # 640 characters against ten blocks of 63
    assert shared_blocks(bare, with_bos) == 10
    assert (
        shared_blocks(
            bare, text_slice("pydoc", bos_tokenizer, seq_len=64, samples=9, skip=11, bos="always")
        )
        == 0
    )


def test_documents_of_retrieval_are_no_copies_of_each_other(smollm2: LoadedModel) -> None:
    first = data_slice("retrieval", smollm2, samples=64)
    second = data_slice("retrieval", smollm2, samples=64, skip=64)

    assert require_disjoint(first, second, "they") == 0
    assert max(map(len, first.ids)) < 512  # no answer is cut off  # type: ignore[union-attr]


def arrays(modality: str, count: int, preprocessing: str) -> ArraySlice:
    hashes = tuple(f"{index:064x}" for index in range(count))
    return ArraySlice(
        source="a", modality=modality, rows=(), hashes=hashes, skip=0,  # type: ignore[arg-type]
        preprocessing=preprocessing, seq_len=0, tokens=count,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (blocks(*[[1] * 512] * 128), None),
        (blocks(*[[1] * 512] * 127), "65,024 tokens"),
        (blocks(*[[1] * 1024] * 64), None),
        (arrays("image", 300, "computed"), None),
        (arrays("image", 299, "computed"), "299 images.*300"),
        (arrays("image", 3, AS_GIVEN), None),
        (arrays("audio", 3, AS_GIVEN), None),
    ],
)
def test_fewer_samples_than_usual(data: Any, said: str | None) -> None:
    warning = sample_count_warning(data)

    assert (warning is None) == (said is None)
    if said is not None and warning is not None:
        assert re.search(said, warning)


def test_equal_documents_of_two_files(tmp_path: Path, tokenizer: Any) -> None:
    for name, texts in {"a": ["one text", "two"], "b": ["three", "one text"]}.items():
        rows = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    first, second = (text_slice(str(tmp_path / f"{n}.jsonl"), tokenizer) for n in "ab")

    assert shared_blocks(first, second) == 1
