"""Perplexity and bits per byte against numpy, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from quantkit.calib_sets import TokenBatch, TokenSlice, text_slice
from quantkit.tasks.perplexity import Perplexity, score_blocks

LENGTHS = (9, 30, 12, 30, 21)


def forward_of(model: Any) -> Any:
    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = model(**batch.inputs, use_cache=False).logits
        return logits if positions is None else logits[:, positions]

    return forward


def random_text(lengths: tuple[int, ...] = LENGTHS) -> TokenSlice:
    generator = torch.Generator().manual_seed(3)
    return text_of(*(torch.randint(0, 94, (n,), generator=generator) for n in lengths))


def text_of(*ids: Tensor) -> TokenSlice:
    return TokenSlice(
        source="made", source_sha256="0", ids=ids, seq_len=max(map(len, ids)), skip=0, bos="never"
    )


def oracle(model: Any, text: TokenSlice) -> np.ndarray[Any, Any]:
    """Negative log-likelihood of each block in float64, from one unpadded forward each."""
    found = []
    for block in text.ids:
        with torch.inference_mode():
            logits = model(input_ids=block[None], use_cache=False).logits[0, :-1].double().numpy()
        top = logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        found.append((log_sum - logits[np.arange(len(logits)), block[1:].numpy()]).sum())
    return np.array(found)


def rows_of(task: Any, forward: Any) -> np.ndarray[Any, Any]:
    rows = {}
    for batch in task.batches:
        rows.update(zip(batch, task.run(forward, batch), strict=True))
    return np.array([rows[index] for index in range(len(rows))])


@pytest.mark.kind(4, "sweep")
@pytest.mark.parametrize("batch_size", [1, 2, 5], ids=lambda size: f"batch {size}")
def test_figures_are_numpys_at_every_batch_size(
    tiny_llama: Any, tokenizer: Any, batch_size: int
) -> None:
    text = random_text()
    task = Perplexity.of(text, tokenizer, batch_size)
    rows = rows_of(task, forward_of(tiny_llama))
    nll = oracle(tiny_llama, text)
    predicted = sum(LENGTHS) - len(LENGTHS)
    np.testing.assert_allclose(rows[:, 0], nll, rtol=1e-5)
    perplexity, bits = task.scores(rows).metrics
    assert (perplexity.name, bits.name) == ("perplexity", "bits_per_byte")
    assert perplexity.value == pytest.approx(np.exp(nll.sum() / predicted), rel=1e-6)
    # one byte a token
    assert bits.value == pytest.approx(nll.sum() / predicted / np.log(2), rel=1e-6)
    assert not perplexity.higher_is_better and not bits.higher_is_better


def test_score_blocks_agrees_and_keeps_the_order(tiny_llama: Any) -> None:
    text = random_text()
    forward = forward_of(tiny_llama)
    seen: list[int] = []
    scores = score_blocks(
        forward, text, batch_size=2, progress=lambda what, done, of: seen.append(done)
    )
    np.testing.assert_allclose(scores.nll, oracle(tiny_llama, text), rtol=1e-5)
    assert scores.tokens.tolist() == [n - 1 for n in LENGTHS]
    assert seen == [0, 2, 4, 5]


def test_batches_hold_every_block_once_with_their_padded_size(tokenizer: Any) -> None:
    task = Perplexity.of(random_text(), tokenizer, 2)
    assert task.batches == ((1, 3), (4, 2), (0,))
    assert list(task.tokens) == [60, 42, 9]
    assert task.unit == "blocks" and task.name == "perplexity"


def test_without_a_tokenizer_there_are_no_bytes(tiny_llama: Any) -> None:
    text = random_text()
    task = Perplexity.of(text, None, 4)
    names = [metric.name for metric in task.scores(rows_of(task, forward_of(tiny_llama))).metrics]
    assert names == ["perplexity"]
    assert task.item_hashes == text.block_hashes


def test_bytes_are_those_of_the_predicted_text(
    tmp_path: Any, tokenizer: Any, bos_tokenizer: Any
) -> None:
    words = "Grüße aus Zürich, 你好. " * 20
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    source = str(tmp_path / "text.txt")
    plain = Perplexity.of(text_slice(source, tokenizer, seq_len=64, samples=6), tokenizer, 4)
    # one byte a token; a block's edges can cut a character, whose rest counts as three
    assert all(abs(size - 63) <= 4 for size in plain.predicted_bytes)
    # with a BOS the first byte of the text is predicted, too
    (tmp_path / "text.txt").write_text("abcdefgh" * 20)
    bos = Perplexity.of(text_slice(source, bos_tokenizer, seq_len=64, samples=2), bos_tokenizer, 4)
    assert bos.predicted_bytes == (63, 63)


def test_the_space_before_the_first_predicted_word_is_predicted_too() -> None:
    """Decoders of SentencePiece's kind drop a space that begins, so that a part is too short."""
    words = ["\u2581one", "\u2581two", "\u2581three"]
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    whole.pre_tokenizer = pre_tokenizers.Metaspace()
    whole.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole)
    assert tokenizer.decode([1, 2]) == "two three"
    task = Perplexity.of(text_of(torch.tensor([0, 1, 2]), torch.tensor([2, 0, 0])), tokenizer, 2)
    assert task.predicted_bytes == (len(" two three"), len(" one one"))


def test_the_same_text_has_the_same_hash_with_a_bos_and_without(
    tmp_path: Any, tokenizer: Any, bos_tokenizer: Any
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    source = str(tmp_path / "text.txt")
    plain = text_slice(source, tokenizer, seq_len=32, samples=3)
    begun = text_slice(source, bos_tokenizer, seq_len=33, samples=3)
    hashes = [Perplexity.of(plain, tokenizer, 4), Perplexity.of(begun, bos_tokenizer, 2)]
    assert hashes[0].item_hashes == hashes[1].item_hashes
    assert len(set(hashes[0].item_hashes)) == 3
