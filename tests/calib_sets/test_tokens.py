"""Sets of finished tokens: taken as they are, and only for the tokenizer that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quantkit.calib_sets import data_slice, text_slice
from quantkit.calib_sets.check import verified
from quantkit.calib_sets.find import named_set
from quantkit.calib_sets.make import SetRequest, make_set
from quantkit.calib_sets.token_files import read_tokens, tokenizer_sha256
from quantkit.errors import InputError
from quantkit.models import LoadedModel

ROWS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(kind: str) -> str:
    """Returns a file with ROWS."""
    if kind == "jsonl":
        Path("t.jsonl").write_text("\n\n".join(json.dumps({"input_ids": row}) for row in ROWS))
        return "t.jsonl"
    ids, mask = np.zeros((2, 3, 5), np.int64)
    for index, row in enumerate(ROWS):
        # the second row is padded on the left, as generation does
        place = slice(5 - len(row), 5) if index == 1 else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    np.savez("t.npz", input_ids=ids, attention_mask=mask)
    return "t.npz"


def made(source: str, **options: Any) -> Any:
    make_set(SetRequest(name="mine", source=source, kind="tokens", force=True, **options))
    return named_set("mine").manifest


@pytest.mark.parametrize("kind", ["jsonl", "npz"])
def test_a_row_is_a_sample_without_its_padding(kind: str, bos_tokenizer: Any) -> None:
    manifest = made(saved(kind), vocab_size=257)

    chosen = text_slice("mine", bos_tokenizer, seq_len=4, samples=2)

    assert [row.tolist() for row in chosen.ids] == [[1, 2, 3, 4], [6, 7]]  # no BOS is added
    assert (manifest.samples, manifest.cut, manifest.vocab_size) == (3, "documents", 257)
    info = chosen.info(2)
    assert (info.tokens, info.named_set, info.warnings) == (6, "mine", [])


def test_rows_as_one_text(tokenizer: Any) -> None:
    made(saved("jsonl"))
    path = Path("calib/mine/manifest.toml")
    path.write_text(path.read_text().replace('cut = "documents"', 'cut = "blocks"'))

    chosen = text_slice("mine", tokenizer, seq_len=4)

    assert [row.tolist() for row in chosen.ids] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_jsonl_of_tokens_is_known_without_being_told() -> None:
    make_set(SetRequest(name="mine", source=saved("jsonl")))

    assert named_set("mine").manifest.kind == "tokens"


def test_the_tokenizer_is_known_by_its_vocabulary(tokenizer: Any) -> None:
    tokenizer.save_pretrained("tok")
    manifest = made(saved("npz"), tokenizer="tok")
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(257)}, "0"))
    )

    assert manifest.tokenizer_sha256 == tokenizer_sha256(tokenizer) != tokenizer_sha256(other)
    assert text_slice("mine", tokenizer, seq_len=8).info(1).warnings == []
    with pytest.raises(InputError, match="tokens of another tokenizer"):
        text_slice("mine", other, seq_len=8)


def test_a_vocabulary_of_another_size(tokenizer: Any) -> None:
    made(saved("npz"), vocab_size=300)

    with pytest.raises(InputError, match="a vocabulary of 300; the model has 257"):
        text_slice("mine", tokenizer, seq_len=8)
    # the model's embedding is padded to 300
    assert text_slice("mine", tokenizer, seq_len=8, vocab_size=300).sequences == 3


def test_nothing_known_of_the_tokenizer_is_said(tokenizer: Any) -> None:
    made(saved("npz"))

    (warning,) = text_slice("mine", tokenizer, seq_len=8).info(1).warnings

    assert "nothing says that its tokens are the model's" in warning


def test_tokens_that_the_model_does_not_know(tokenizer: Any) -> None:
    Path("t.jsonl").write_text('{"input_ids": [1, 257]}')
    made("t.jsonl")

    with pytest.raises(InputError, match="holds token 257; the model knows 0 to 256"):
        text_slice("mine", tokenizer, seq_len=8)


def test_a_model_without_a_tokenizer_reads_tokens(tiny_llama: Any) -> None:
    made(saved("npz"), vocab_size=257)
    bare = LoadedModel(name="t", source="t", model=tiny_llama, tokenizer=None, sha256="0")

    chosen = data_slice("mine", bare, seq_len=8)

    (batch,) = chosen.batches(3)
    tiny_llama(**batch.inputs)
    assert (chosen.sequences, chosen.info(3).warnings) == (3, [])


def test_a_copy(tokenizer: Any) -> None:
    manifest = made(saved("npz"), copy=True)
    Path("t.npz").unlink()

    assert list(manifest.files) == ["files/t.npz"]
    verified(named_set("mine"))
    assert text_slice("mine", tokenizer, seq_len=8).sequences == 3


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"ids": [[1]]}, "holds ids; expected input_ids"),
        ({"input_ids": [[1]], "labels": [[1]]}, "holds input_ids, labels"),
        ({"input_ids": [1, 2]}, r"of shape \[2\]"),
        ({"input_ids": [[0.5]]}, "float64"),
        ({"input_ids": [[-1]]}, "tokens of 0 or more"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 2]]}, "a mask of 0 and 1"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, r"attention_mask has shape \[1, 1\]"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "row 0: .*leaves a hole"),
        ({"input_ids": np.zeros((0, 4), np.int64)}, "holds no sample"),
        ({"input_ids": [[1]], "attention_mask": [[0]]}, "holds no sample"),
    ],
)
def test_arrays_that_are_no_tokens(arrays: dict[str, Any], said: str) -> None:
    np.savez("t.npz", **{name: np.array(value) for name, value in arrays.items()})

    with pytest.raises(InputError, match=said):
        made("t.npz")


@pytest.mark.parametrize(
    "line", ['{"ids": [1]}', "[1]", '{"input_ids": [1.5]}', '{"input_ids": [true]}', "x",
             '{"input_ids": [-1]}', '{"input_ids": "12"}'],
)  # fmt: skip
def test_a_line_that_is_no_tokens_is_numbered(line: str) -> None:
    Path("t.jsonl").write_text('{"input_ids": [1]}\n' + line)

    with pytest.raises(InputError, match="line 2: expected a JSON object with 'input_ids'"):
        read_tokens(Path("t.jsonl"), "t.jsonl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokenizer": "nowhere"}, "no such folder"),
        ({"tokenizer": "empty"}, "--tokenizer empty cannot be used"),
        ({"samples": 2}, "leave --samples out"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    Path("empty").mkdir()

    with pytest.raises(InputError, match=said):
        made(saved("npz"), **options)
