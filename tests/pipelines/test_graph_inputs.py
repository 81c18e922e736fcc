"""What a graph is fed: by the names and shapes of its inputs, from text or arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantkit.errors import InputError
from quantkit.pipelines.graph_inputs import GraphInput, beside, graph_data

IDS = GraphInput(name="input_ids", shape=(None, None), type="tensor(int64)")
MASK = GraphInput(name="attention_mask", shape=(None, None), type="tensor(int64)")
POSITIONS = GraphInput(name="position_ids", shape=(None, None), type="tensor(int64)")
CACHE = GraphInput(name="past_key_values.0.key", shape=(None, 2, None, 8), type="tensor(float)")
TYPES = GraphInput(name="token_type_ids", shape=(None, None), type="tensor(int64)")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("0123456789" * 8)
    return str(path)


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, between [CLS] and [SEP]."""
    letters = {letter: index for index, letter in enumerate("0123456789")}
    made = Tokenizer(models.WordLevel(letters | {"[CLS]": 10, "[SEP]": 11, "?": 12}, "?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 10), ("[SEP]", 11)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, cls_token="[CLS]", sep_token="[SEP]")


def test_text_fills_what_a_decoder_reads(tmp_path: Path, text: str, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    inputs = (IDS, MASK, POSITIONS, CACHE)
    options: dict[str, Any] = {"samples": 3, "seq_len": 20}
    found = graph_data(text, tmp_path / "onnx" / "m.onnx", inputs, **options)
    assert (found.samples.sequences, len(list(found))) == (3, 3)
    feeds = next(iter(found)).feeds
    assert tokenizer.decode(feeds["input_ids"][0]) == "01234567890123456789"
    assert feeds["attention_mask"].tolist() == [[1] * 20]
    assert feeds["position_ids"].tolist() == [list(range(20))]
    assert feeds["past_key_values.0.key"].shape == (1, 2, 0, 8)
    pixels = GraphInput(name="pixels", shape=(None, 3), type="tensor(float)")
    with pytest.raises(InputError, match=r"'pixels' .* cannot be filled: give --calib"):
        graph_data(text, tmp_path / "m.onnx", (*inputs, pixels), **options)


@pytest.mark.parametrize("inputs", [(IDS, MASK), (IDS, MASK, TYPES)], ids=["two", "three"])
def test_an_encoder_reads_whole_texts(
    tmp_path: Path, text: str, inputs: tuple[GraphInput, ...]
) -> None:
    encoder_tokenizer().save_pretrained(tmp_path)
    found = graph_data(text, tmp_path / "m.onnx", inputs, samples=1, seq_len=6)
    feeds = next(iter(found)).feeds
    assert feeds["input_ids"].tolist() == [[10, 0, 1, 2, 3, 11]]
    assert all(feeds[value.name].shape == (1, 6) for value in inputs)


def test_a_wider_graph_gets_padding(tmp_path: Path, text: str, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    wide = (GraphInput(name="input_ids", shape=(1, 24), type="tensor(int32)"),)
    batch = next(iter(graph_data(text, tmp_path / "m.onnx", wide, samples=2, seq_len=20)))
    assert batch.feeds["input_ids"].dtype == np.int32
    assert batch.feeds["input_ids"].shape == (1, 24)
    assert batch.real is not None and batch.real.sum() == 20


def test_arrays_take_the_graph_s_types_and_what_is_missing_is_filled_in(tmp_path: Path) -> None:
    ids = np.arange(15, dtype=np.int32).reshape(3, 5)
    np.savez(tmp_path / "x.npz", input_ids=ids)
    found = graph_data(
        str(tmp_path / "x.npz"),
        tmp_path / "m.onnx",
        (IDS, MASK, CACHE),
        samples=2,
        seq_len=9,
        batch_size=2,
    )
    (batch,) = found
    assert batch.feeds["input_ids"].dtype == batch.feeds["attention_mask"].dtype == np.int64
    assert batch.feeds["input_ids"].tolist() == ids[:2].tolist()
    assert batch.feeds["attention_mask"].tolist() == [[1] * 5] * 2
    assert batch.real is None


def test_a_tokenizer_is_looked_for_in_order(tmp_path: Path, text: str, tokenizer: Any) -> None:
    one, other = tmp_path / "a" / "float", tmp_path / "b" / "int8"
    assert beside(one / "m.onnx", other / "m.onnx") == [one, other, one.parent, other.parent]
    assert beside(one / "m.onnx") == [one, one.parent]
    tokenizer.save_pretrained(other.parent)
    (one / "tokenizer").mkdir(parents=True)  # a folder of that name is no tokenizer
    options: dict[str, Any] = {"samples": 1, "seq_len": 20}
    with pytest.raises(InputError, match="no tokenizer beside the file"):
        graph_data(text, one / "m.onnx", (IDS,), **options)
    for more in (
        {"folders": beside(one / "m.onnx", other / "m.onnx")},
        {"tokenizer": str(other.parent)},
    ):
        assert graph_data(text, one / "m.onnx", (IDS,), **options, **more).samples.sequences == 1
    with pytest.raises(InputError, match=f"no tokenizer in {one}: "):
        graph_data(text, one / "m.onnx", (IDS,), tokenizer=str(one), **options)
