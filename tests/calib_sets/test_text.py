"""Blocks of tokens: which, how many, and the proof that two slices have none in common."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calib_sets import TokenSlice, data_slice, require_disjoint, text_slice
from quantkit.errors import InputError
from quantkit.models import LoadedModel, load

BOS_ID = 256


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    """26 tokens (letters) with the byte tokenizer."""
    path = tmp_path / "letters.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    return str(path)


def words(tokenizer: Any, ids: Any) -> list[str]:
    return [tokenizer.decode(row) for row in ids]


def test_a_text_is_cut_into_consecutive_blocks(text_file: str, tokenizer: Any) -> None:
    chosen = text_slice(text_file, tokenizer, seq_len=8, samples=2, skip=1)

    assert words(tokenizer, chosen.ids) == ["ijklmnop", "qrstuvwx"]
    assert chosen.tokens == 16
    assert all(row.dtype == torch.int64 for row in chosen.ids)


def test_a_tail_shorter_than_a_block_is_dropped(text_file: str, tokenizer: Any) -> None:
    assert len(text_slice(text_file, tokenizer, seq_len=8, samples=100).ids) == 3


@pytest.mark.parametrize(
    ("adds", "bos", "expected"),
    [
        (False, "auto", False),
        (True, "auto", True),
        (False, "always", True),
        (True, "never", False),
    ],
)
def test_bos(
    text_file: str, tokenizer: Any, bos_tokenizer: Any, adds: bool, bos: str, expected: bool
) -> None:
    chosen = text_slice(
        text_file, bos_tokenizer if adds else tokenizer, seq_len=8, samples=2, bos=bos
    )

    assert [len(row) for row in chosen.ids] == [8, 8]
    assert [int(row[0]) == BOS_ID for row in chosen.ids] == [expected, expected]
    assert words(tokenizer, [row[int(expected) :] for row in chosen.ids]) == (
        ["abcdefg", "hijklmn"] if expected else ["abcdefgh", "ijklmnop"]
    )


def test_bos_always_needs_one(text_file: str, tokenizer: Any) -> None:
    tokenizer.bos_token = None

    with pytest.raises(InputError, match="no BOS token"):
        text_slice(text_file, tokenizer, seq_len=8, bos="always")


def test_a_folder_gives_one_padded_sample_a_document(tmp_path: Path, tokenizer: Any) -> None:
    for name, text in {"b.txt": "second", "a.txt": "a first document", "c.txt": ""}.items():
        (tmp_path / name).write_text(text)

    chosen = text_slice(str(tmp_path), tokenizer, seq_len=8, samples=10)
    (batch,) = chosen.batches(4)

    assert words(tokenizer, chosen.ids) == ["a first ", "second"]
    assert batch.input_ids.shape == (2, 8)
    assert batch.attention_mask.to(torch.int64).tolist() == [[1] * 8, [1] * 6 + [0] * 2]


def test_a_jsonl_gives_one_sample_a_line(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "set.jsonl"
    # U+2028 ends a line for str.splitlines, and stands unescaped in many a JSON file
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("one", "two\u2028too")]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")

    assert words(tokenizer, text_slice(str(path), tokenizer, seq_len=32).ids) == [
        "one",
        "two\u2028too",
    ]


@pytest.mark.parametrize("line", ['{"txt": "a"}', "not json", "[1]", '"text"'])
def test_a_bad_line_is_numbered(tmp_path: Path, tokenizer: Any, line: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")

    with pytest.raises(InputError, match=r"set\.jsonl.*2.*text"):
        text_slice(str(path), tokenizer)


def test_batches_do_not_change_what_is_in_them(text_file: str, tokenizer: Any) -> None:
    chosen = text_slice(text_file, tokenizer, seq_len=5, samples=5)

    batches = list(chosen.batches(2))

    assert [batch.first_sequence for batch in batches] == [0, 2, 4]
    assert [len(batch.input_ids) for batch in batches] == [2, 2, 1]
    assert torch.equal(
        torch.cat([batch.input_ids for batch in batches]), torch.stack(list(chosen.ids))
    )


@pytest.mark.parametrize("text", ["", " \n\t\n"], ids=["nothing", "white space"])
def test_an_empty_text(tmp_path: Path, tokenizer: Any, text: str) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(text)

    with pytest.raises(InputError, match="empty"):
        text_slice(str(path), tokenizer)


def test_a_text_shorter_than_a_block_says_the_numbers(text_file: str, tokenizer: Any) -> None:
    for skip in (0, 3):
        with pytest.raises(
            InputError, match=r"one block of 27 tokens\..*lower --seq-len\.$"
        ) as error:
            text_slice(text_file, tokenizer, seq_len=27, skip=skip)
        assert "calibration" not in str(error.value)


def test_a_text_that_ends_before_the_skipped_blocks_do(text_file: str, tokenizer: Any) -> None:
    for skip in (3, 200):
        with pytest.raises(InputError) as error:
            text_slice(text_file, tokenizer, seq_len=8, skip=skip)
        said = str(error.value)
        assert f"one more block of 8 tokens after {skip}, got 3 in all" in said
        assert "calibration used all of it: name another --eval, or calibrate on fewer" in said
        assert "lower" not in said  # which cannot help


def test_bytes_that_are_no_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "image.txt"
    path.write_bytes(b"ab\xff\xfe")

    with pytest.raises(InputError, match=r"UTF-8.*2"):
        text_slice(str(path), tokenizer)


def test_a_source_that_is_not_there(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="Did you mean 'pydoc'"):
        text_slice("pydocs", tokenizer)


def test_a_model_without_a_tokenizer(text_file: str) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        text_slice(text_file, None)


def test_disjoint_slices_pass_and_others_do_not(text_file: str, tokenizer: Any) -> None:
    first = text_slice(text_file, tokenizer, seq_len=8, samples=2)
    after = text_slice(text_file, tokenizer, seq_len=8, samples=1, skip=2)
    across = text_slice(text_file, tokenizer, seq_len=8, samples=1, skip=1)

    require_disjoint(first, after, "calibration and evaluation")
    with pytest.raises(InputError, match="calibration and evaluation share 1 block"):
        require_disjoint(first, across, "calibration and evaluation")


def test_bos_does_not_hide_a_shared_document(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("the same")

    bare = text_slice(str(tmp_path), tokenizer, bos="never")
    with_bos = text_slice(str(tmp_path), tokenizer, bos="always")

    with pytest.raises(InputError, match="share 1"):
        require_disjoint(bare, with_bos, "calibration and evaluation")


def test_hashes_know_the_tokens_and_where_they_end(tmp_path: Path, tokenizer: Any) -> None:
    def sha(*texts: str) -> str:
        path = tmp_path / "set.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        return text_slice(str(path), tokenizer).sha256

    assert sha("abcd", "ef") == sha("abcd", "ef")
    assert len({sha("abcd", "ef"), sha("ab", "cdef"), sha("ef", "abcd"), sha("abcdef")}) == 4


def test_pydoc_is_what_python_carries(tokenizer: Any) -> None:
    chosen = text_slice("pydoc", tokenizer, seq_len=64, samples=2)
    info = chosen.info(batch_size=2)

    assert (info.source, info.sequences, info.tokens) == ("pydoc", 2, 128)
    assert info.python == platform.python_version()
    if platform.python_version() == "3.11.7":
        assert chosen.source_sha256 == (
            "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"
        )


def test_a_decoders_blocks_are_what_they_were(smollm2: LoadedModel) -> None:
    if platform.python_version() != "3.11.7":
        pytest.skip("pydoc differs between versions of Python")
    plain = data_slice("pydoc", smollm2, seq_len=64, samples=3, skip=1)
    with_bos = data_slice("pydoc", smollm2, seq_len=64, samples=2, bos="always")

    # taken before encoders were known
    assert plain.sha256 == "f047543bd6821a03d29718639c06b79c535478be76c3895a4bba92879ebc7fe9"
    assert plain.block_hashes == ("0db4e633a48c9300", "24486e643b0b61bc", "c28006fe41cd4369")
    assert with_bos.sha256 == "af75c5d245989941ec54a6974d1e87483f75719c1c76df90d76d330a9fd22b56"
    assert with_bos.block_hashes == ("6842293144934438", "60fc947d98fbfa06")


def test_an_encoders_text_is_what_its_tokenizer_makes_of_it(tmp_path: Path) -> None:
    minilm = load("minilm")
    texts = ["A short text about transformers.", "Another."]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))

    chosen = data_slice(str(tmp_path / "a.jsonl"), minilm)

    assert isinstance(chosen, TokenSlice)
    assert [row.tolist() for row in chosen.ids] == [minilm.tokenizer(t).input_ids for t in texts]
    assert (chosen.prefix, chosen.suffix) == (1, 1)
    (batch,) = chosen.batches(2)
    expected = minilm.tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch.inputs["input_ids"], expected.input_ids)
    assert torch.equal(batch.inputs["attention_mask"], expected.attention_mask)
    assert batch.real is not None
    assert torch.equal(batch.real, expected.attention_mask.bool())


@pytest.mark.parametrize(("bos", "around"), [("auto", 2), ("never", 0)])
def test_an_encoders_blocks_are_whole(bos: str, around: int) -> None:
    minilm = load("minilm")

    chosen = text_slice("pydoc", minilm.tokenizer, seq_len=16, samples=1, bos=bos, encoder=True)

    (row,) = chosen.ids

    assert len(row) == 16
    special = [token for token in row.tolist() if token in minilm.tokenizer.all_special_ids]
    assert len(special) == around
    if around:
        assert [row[0], row[-1]] == [minilm.tokenizer.cls_token_id, minilm.tokenizer.sep_token_id]


def test_what_stands_around_a_text_does_not_hide_it(tmp_path: Path) -> None:
    minilm = load("minilm")
    (tmp_path / "a.txt").write_text("the same")

    bare = data_slice(str(tmp_path), minilm, bos="never")
    around = data_slice(str(tmp_path), minilm, bos="auto")

    assert bare.block_hashes == around.block_hashes
    assert bare.sha256 != around.sha256
