"""The tokenizer of a training: any text comes back, digits stand alone, BOS comes by itself."""

from __future__ import annotations

import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, DiffLlamaConfig, LlamaConfig

from quantkit.calib_sets.text import bos_tokens
from quantkit.errors import InputError
from quantkit.training import tokenizer as module
from quantkit.training.tokenizer import encoded, train_tokenizer

TEXTS = [str(text) for text in pydoc_data.topics.topics.values()][:40]
ANY_TEXT = {
    "prose": "The old mill's wheel, they said, hadn't turned since 1887.",
    "white space": "  two\n\n\n\tthree \r\n four  ",
    "other scripts": "naïve 日本語 Ελλάδα עברית 🙂‍↔️ e\u0301",
    "other digits": "\uff11\uff12 ½ Ⅷ ٣٤",
    "control characters": "\x00\x1c\x85\u2028\ufeff",
    "spaces before signs": "a , b . 'c' ( d )",
    "empty": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([*TEXTS, "is 1, 2 and 3 are 123456 " * 100], 600, found, 128)
    return found


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ANY_TEXT.values(), ids=ANY_TEXT.keys())
def test_any_text_comes_back_exactly(trained: Any, text: str) -> None:
    ids = trained(text, add_special_tokens=False)["input_ids"]

    assert trained.decode(ids) == text
    assert trained.decode(trained(text)["input_ids"], skip_special_tokens=True) == text


def test_it_has_the_size_and_length_that_were_asked_for(trained: Any) -> None:
    assert len(trained) == trained.vocab_size == 600
    assert sorted(trained.get_vocab().values()) == list(range(600))
    assert trained.model_max_length == 128


def test_every_digit_is_a_token_and_the_first_takes_the_space(trained: Any) -> None:
    ids = trained("is 1234,56", add_special_tokens=False)["input_ids"]

    pieces = [trained.decode([token]) for token in ids]
    assert pieces == ["is", " 1", "2", "3", "4", ",", "5", "6"]


def test_no_token_of_the_vocabulary_holds_two_digits(trained: Any) -> None:
    pieces = [trained.decode([token]) for token in range(len(trained))]

    assert max(sum(map(str.isdigit, piece)) for piece in pieces) == 1


def test_auto_puts_bos_before_a_block(trained: Any) -> None:
    assert bos_tokens(trained, "auto") == [trained.bos_token_id]
    assert trained("some text")["input_ids"].count(trained.bos_token_id) == 1
    assert trained.eos_token_id not in trained("some text")["input_ids"]


def test_offsets_say_where_a_token_stands(trained: Any) -> None:
    text = "The naïve number is 42."
    found = trained(text, return_offsets_mapping=True, add_special_tokens=False)

    for token, (begin, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        if text[begin:end].isascii():
            assert trained.decode([token]) == text[begin:end]
    assert found["offset_mapping"][-1] == (len(text) - 1, len(text))


@pytest.mark.parametrize("config", [LlamaConfig, DiffLlamaConfig], ids=["llama", "diffllama"])
def test_it_stays_itself_beside_a_models_config(
    folder: Path, trained: Any, tmp_path: Path, config: Any
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config().save_pretrained(tmp_path)
    text = "Beside a config: 123\n\n  four"

    beside = AutoTokenizer.from_pretrained(tmp_path)

    assert beside(text)["input_ids"] == trained(text)["input_ids"]
    assert beside.decode(beside(text)["input_ids"], skip_special_tokens=True) == text


def test_the_same_texts_give_the_same_bytes_in_another_process(
    folder: Path, tmp_path: Path
) -> None:
    program = (
        "import sys, pathlib, pydoc_data.topics\n"
        "from quantkit.training.tokenizer import train_tokenizer\n"
        "texts = [str(text) for text in pydoc_data.topics.topics.values()][:40]\n"
        "texts.append('is 1, 2 and 3 are 123456 ' * 100)\n"
        "train_tokenizer(texts, 600, pathlib.Path(sys.argv[1]), 128)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)

    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in tmp_path.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_a_long_text_in_parts_has_the_tokens_of_the_whole(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXTS[0], *ANY_TEXT.values(), "".join(ANY_TEXT.values()) * 20]
    whole = [trained(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    monkeypatch.setattr(module, "_PART_CHARACTERS", 7)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 30)

    assert list(encoded(trained, texts)) == whole
    assert len(list(module._parts(TEXTS[0]))) > len(TEXTS[0]) / 30


def test_a_text_cannot_hold_a_special_token(trained: Any) -> None:
    (ids,) = encoded(trained, ["<s>struck</s> out"])

    assert not {trained.bos_token_id, trained.eos_token_id} & set(ids)
    assert trained.decode(ids) == "<s>struck</s> out"


def test_a_lone_surrogate_becomes_a_question_mark(trained: Any) -> None:
    (ids,) = encoded(trained, ["a\ud800b"])

    assert trained.decode(ids) == "a?b"


@pytest.mark.parametrize(
    ("texts", "vocabulary"),
    [(["abc abc"], 600), ([], 300), (TEXTS, 200)],
    ids=["too little text", "no text", "no room for the bytes"],
)
def test_a_vocabulary_that_the_text_does_not_give_is_an_error(
    tmp_path: Path, texts: list[str], vocabulary: int
) -> None:
    with pytest.raises(InputError, match=rf"text gives \d+ tokens, expected {vocabulary}"):
        train_tokenizer(texts, vocabulary, tmp_path, 128)
    assert not list(tmp_path.iterdir())
