"""Continuations: where a text is parted, and what is scored, against numpy and real decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quantkit.calib_sets import TokenBatch
from quantkit.errors import InputError
from quantkit.tasks.continuations import (
    Continuation,
    computed,
    log_likelihoods,
    planned,
    scored,
    tokenized,
)


def forward_of(model: Any) -> Any:
    def forward(batch: TokenBatch, positions: torch.Tensor | None = None) -> torch.Tensor:
        assert positions is not None
        assert positions.tolist() == sorted(set(positions.tolist()))
        return model(**batch.inputs, use_cache=False).logits[:, positions]

    return forward


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, and `bc` as one token: it crosses the border of `ab` and `c`."""
    vocab = {letter: index for index, letter in enumerate("abcd")} | {"bc": 4, "</s>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(merging_tokenizer()(text)["input_ids"])


def test_spaces_that_end_the_context_begin_the_continuation(tokenizer: Any) -> None:
    apart = tokenized(tokenizer, "one", " two")
    assert tokenized(tokenizer, "one ", "two") == apart
    assert tokenizer.decode(apart.context) == "one"
    assert tokenizer.decode(apart.continuation) == " two"


def test_a_token_across_the_border_is_continuation() -> None:
    pair = tokenized(merging_tokenizer(), "ab", "cd")
    assert pair.context + pair.continuation == ids("abcd")
    assert pair.context == ids("a")


@pytest.mark.parametrize(
    ("bos", "first"), [("auto", (256,)), ("always", (256,)), ("never", ())], ids=str
)
def test_bos_goes_before_the_context(
    tokenizer: Any, bos_tokenizer: Any, bos: str, first: tuple[int, ...]
) -> None:
    pair = tokenized(bos_tokenizer, "ab", "c", bos=bos)
    assert pair.context == (*first, *tokenizer("ab")["input_ids"])
    assert pair.continuation == tuple(tokenizer("c")["input_ids"])


def test_an_empty_context_is_bos_or_else_eos(tokenizer: Any) -> None:
    assert tokenized(tokenizer, "", "abc", bos="never").context == (256,)
    assert tokenized(merging_tokenizer(), "", "abc").context == (5,)
    # nothing is left of the context before a token that crosses the border
    assert tokenized(merging_tokenizer(), "b", "c").context == (5,)


@pytest.mark.parametrize(
    ("max_length", "kept", "cut"), [(20, "abcdefgh", 0), (11, "abcdefgh", 0), (10, "bcdefgh", 1),
                                    (4, "h", 7), (3, "", 8)]
)  # fmt: skip
def test_a_long_context_is_cut_at_the_left_behind_its_bos(
    bos_tokenizer: Any, max_length: int, kept: str, cut: int
) -> None:
    pair = tokenized(bos_tokenizer, "abcdefgh", "xyz", max_length=max_length)
    assert pair.context[0] == 256
    assert bos_tokenizer.decode(pair.context[1:]) == kept
    assert pair.cut == cut
    assert len(pair.fed) <= max_length


def test_what_cannot_be_scored_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="expected a continuation, got an empty text"):
        tokenized(tokenizer, "abc", "")
    with pytest.raises(InputError, match="has 5 tokens; the model takes 4 positions"):
        tokenized(tokenizer, "abc", "12345", max_length=4)
    with pytest.raises(InputError, match="no tokenizer"):
        tokenized(None, "abc", "d")
    with pytest.raises(InputError, match="got 0 and 1"):
        Continuation(context=(), continuation=(1,))


def pairs_of(tokenizer: Any) -> list[Continuation]:
    texts = [("a long context, it says", " yes"), ("short", " a much longer one than that"),
             ("", "x"), ("one two three", " 4")]  # fmt: skip
    return [tokenized(tokenizer, *text) for text in texts]


@pytest.mark.kind(4, "sweep")
@pytest.mark.parametrize("batch_size", [1, 3, None], ids=lambda size: f"batch {size}")
def test_sums_are_numpys_at_every_batch_size(
    tiny_llama: Any, tokenizer: Any, batch_size: int | None
) -> None:
    pairs = pairs_of(tokenizer)
    found = log_likelihoods(forward_of(tiny_llama), pairs, batch_size=batch_size)
    for pair, likely in zip(pairs, found, strict=True):
        whole = torch.tensor([pair.context + pair.continuation])
        with torch.inference_mode():
            logits = tiny_llama(input_ids=whole, use_cache=False).logits[0].double().numpy()
        rows = logits[len(pair.context) - 1 : -1]
        logs = rows - rows.max(-1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
        expected = logs[np.arange(len(rows)), list(pair.continuation)].sum()
        assert likely.log_probability == pytest.approx(expected, rel=1e-5)
        assert likely.tokens == len(pair.continuation)


def test_what_greedy_decoding_writes_is_greedy_and_nothing_else(
    tiny_llama: Any, tokenizer: Any
) -> None:
    context = tuple(tokenizer("What comes next?")["input_ids"])
    written = tiny_llama.generate(
        torch.tensor([context]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, len(context) :].tolist()
    pairs = [Continuation(context=context, continuation=tuple(written))]
    for place in range(6):
        other = [*written[:place], (written[place] + 1) % 256, *written[place + 1 :]]
        pairs.append(Continuation(context=context, continuation=tuple(other)))
    found = log_likelihoods(forward_of(tiny_llama), pairs)
    assert [likely.is_greedy for likely in found] == [True] + 6 * [False]


def test_one_row_decides_several_continuations(tiny_llama: Any, tokenizer: Any) -> None:
    """Beginnings of what is fed, and those that differ from it in what is not fed."""
    long = tokenized(tokenizer, "one two", " three four")
    ids = long.context + long.continuation
    early = Continuation(context=ids[:3], continuation=ids[3:6])
    other = Continuation(context=long.context, continuation=(*long.continuation[:-1], 7))
    short = tokenized(tokenizer, "a", " b")
    rows = [(long, (early, long, other)), (short, (short,))]
    sizes = []

    def forward(batch: TokenBatch, positions: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(tuple(batch.input_ids.shape))
        found: torch.Tensor = forward_of(tiny_llama)(batch, positions)
        return found

    found = scored(forward, rows)
    assert sizes == [(2, len(ids) - 1)]
    alone = log_likelihoods(forward_of(tiny_llama), [early, long, other, short], batch_size=1)
    for one, two in zip(found, alone, strict=True):
        assert one.log_probability == pytest.approx(two.log_probability, rel=1e-5)
        assert (one.tokens, one.is_greedy) == (two.tokens, two.is_greedy)
    assert len({likely.log_probability for likely in found}) == 4


@pytest.mark.parametrize("batch_size", [1, 2, 3], ids=lambda size: f"batch {size}")
def test_computed_positions_are_those_that_a_forward_is_given(
    tiny_llama: Any, tokenizer: Any, batch_size: int
) -> None:
    pairs, seen = pairs_of(tokenizer), []

    def forward(batch: TokenBatch, positions: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(batch.input_ids.numel())
        found: torch.Tensor = forward_of(tiny_llama)(batch, positions)
        return found

    log_likelihoods(forward, pairs, batch_size=batch_size)
    assert computed(pairs, batch_size) == sum(seen)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(float("nan"), float("nan")), (float("-inf"), 1.0), (float("inf"), float("nan"))],
    ids=["NaN", "-inf", "+inf"],
)
def test_another_tokens_logit_is_needed_too_but_may_be_minus_infinity(
    value: float, expected: float
) -> None:
    def forward(batch: TokenBatch, positions: torch.Tensor | None = None) -> torch.Tensor:
        assert positions is not None
        logits = torch.zeros(1, len(positions), 5)
        logits[..., 3] = 1.0
        logits[0, 0, 1] = value
        return logits

    (likely,) = log_likelihoods(forward, [Continuation(context=(0,), continuation=(3, 3))])
    np.testing.assert_equal(likely.greedy_or_nan, expected)
    assert np.isnan(likely.log_probability) == np.isnan(expected)


@pytest.mark.kind(1, "sweep")
def test_the_rows_of_a_batch_do_not_share_their_nan() -> None:
    def forward(batch: TokenBatch, positions: torch.Tensor | None = None) -> torch.Tensor:
        assert positions is not None
        logits = torch.ones(2, len(positions), 5)
        logits[0] = float("nan")
        return logits

    pairs = [Continuation(context=(0,), continuation=(token,)) for token in (0, 0)]
    found = [likely.greedy_or_nan for likely in log_likelihoods(forward, pairs)]
    np.testing.assert_equal(found, [np.nan, 1.0])


def test_batches_are_of_similar_length_and_hold_each_item_once() -> None:
    assert planned([3, 9, 3, 7, 8], 2) == ((1, 4), (3, 0), (2,))
    assert planned([], 2) == ()
