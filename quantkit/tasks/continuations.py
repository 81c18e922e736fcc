"""Log-likelihood of continuations: what multiple choice, needles, icl and lm-eval stand on.

Given a context, how likely is a continuation, and is it what greedy decoding would write? One
forward answers both: decoding begins with these tokens if and only if each of them is the argmax
after the true ones before it, since up to the first wrong token it has written the same. The last
token of the continuation is not fed, as nothing is asked about what follows it.

That is said of tokens: the same text in other ones does not count, and one that goes on (`1234567`
where `123456` is right) does. It is exact for plain models, `row` and static scales; the dynamic
scales of `tensor` and `head` are not causal, so that here they see the whole sequence, the true
continuation included, where decoding has seen its beginning only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quantkit.calib_sets import TokenBatch
from quantkit.calib_sets.text import bos_tokens
from quantkit.errors import InputError
from quantkit.tasks.task import TextForward

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Token ids: `continuation` is scored, each token after `context` and those before it.

    Attributes:
        context, continuation: One token or more.
        cut: Tokens of the context that were left out at its left, since the model takes no more.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = 0

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise InputError(
                "a continuation needs a token of context and one of its own; got "
                f"{len(self.context)} and {len(self.continuation)}."
            )

    @property
    def fed(self) -> tuple[int, ...]:
        """What the model is given: all but the last token."""
        return self.context + self.continuation[:-1]

    @property
    def positions(self) -> range:
        """Columns of `fed` from which the continuation is predicted."""
        return range(len(self.context) - 1, len(self.fed))


FedRow = tuple[Continuation, tuple[Continuation, ...]]
"""What is fed, and the continuations that it decides: what each would feed is its beginning."""


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What a model says about one continuation.

    Attributes:
        log_probability: In nats, summed over its tokens in float64; NaN where one of the logits
            that it needs is.
        tokens: How many it has.
        is_greedy: Whether each is the argmax (of equal ones the first), so that greedy decoding
            writes it.
    """

    log_probability: float
    tokens: int
    is_greedy: bool

    @property
    def greedy_or_nan(self) -> float:
        """1 or 0; NaN where the model says no number, so that it is not taken for an answer."""
        return math.nan if math.isnan(self.log_probability) else float(self.is_greedy)


def tokenized(
    tokenizer: Any,
    context: str,
    continuation: str,
    *,
    bos: str = "auto",
    max_length: int | None = None,
) -> Continuation:
    """Returns the token ids of a context and its continuation.

    As EleutherAI's harness does, the two are tokenized together, since a model has seen no others
    so, and spaces that end the context begin the continuation. What the context alone has in common
    with the whole is context: a token across the border counts as continuation. Nothing is
    tokenized with special tokens but `bos`; an empty context is the BOS or else the EOS token.

    Args:
        bos: `auto`, `always` or `never`, as for blocks of text.
        max_length: Positions that the model takes. Of a longer context the left is cut, its BOS
            stays.

    Raises:
        InputError: an empty continuation, one that alone is too long, no token for an empty
            context, no tokenizer.
    """
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: expected one, to read text with.")
    if not continuation:
        raise InputError(f"after {context[-40:]!r}: expected a continuation, got an empty text.")
    bare = context.rstrip()
    whole = encoded(tokenizer, context + continuation)
    before = encoded(tokenizer, bare) if bare else []
    shared = _common(before, whole)
    first = bos_tokens(tokenizer, bos)
    if not first and not shared:
        first = stand_in(tokenizer)
    own = whole[shared:]
    if not own:
        raise InputError(f"the continuation {continuation[:40]!r} has no token of this tokenizer.")
    kept = shared
    if max_length is not None:
        if len(own) > max_length:
            raise InputError(
                f"the continuation {continuation[:40]!r} has {len(own)} tokens; the model takes "
                f"{max_length} positions."
            )
        # the last token is not fed, hence one more
        kept = min(shared, max_length + 1 - len(own) - len(first))
    return Continuation(
        context=(*first, *whole[shared - kept : shared]),
        continuation=tuple(own),
        cut=shared - kept,
    )


def log_likelihoods(
    forward: TextForward, pairs: Sequence[Continuation], *, batch_size: int | None = None
) -> list[Likelihood]:
    """Returns the likelihood of each continuation, in order; every one is a row of its own."""
    return scored(forward, [(pair, (pair,)) for pair in pairs], batch_size=batch_size)


def scored(
    forward: TextForward, rows: Sequence[FedRow], *, batch_size: int | None = None
) -> list[Likelihood]:
    """Returns the likelihood of the continuations of each row, in order.

    Rows are padded on the right and only the positions that predict something are asked for.

    Args:
        batch_size: Rows of a forward pass, consecutive ones; None: all.
    """
    found: list[Likelihood] = []
    for part in in_parts(rows, batch_size or max(1, len(rows))):
        positions = sorted({n for _, pairs in part for pair in pairs for n in pair.positions})
        with torch.inference_mode():
            logits = forward(padded([fed for fed, _ in part]), torch.tensor(positions))
        for row, (_, pairs) in enumerate(part):
            for pair in pairs:
                first = positions.index(pair.positions.start)
                own = logits[row, first : first + len(pair.positions)]
                found.append(likelihood(own, torch.tensor(pair.continuation)))
    return found


def in_parts(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    """Returns consecutive rows, `size` together: what `scored` feeds at once."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def computed(fed: Sequence[Continuation], batch_size: int) -> int:
    """Returns the positions that `scored` computes for rows that feed these, with padding."""
    parts = in_parts([len(pair.fed) for pair in fed], batch_size)
    return sum(len(part) * max(part) for part in parts)


def likelihood(logits: Tensor, targets: Tensor) -> Likelihood:
    """Returns how likely targets `[tokens]` are, given vocabulary logits `[tokens, vocabulary]`."""
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return Likelihood(
        log_probability=-float(losses.double().sum()),
        tokens=len(targets),
        is_greedy=bool((logits.argmax(-1) == targets).all()),
    )


def padded(pairs: Sequence[Continuation]) -> TokenBatch:
    """Returns what the model is given for each, padded on the right."""
    return padded_rows([pair.fed for pair in pairs])


def padded_rows(rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Returns a batch of token ids, padded on the right."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return TokenBatch(input_ids=ids, attention_mask=mask, first_sequence=0)


def planned(lengths: Sequence[int], batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns batches of items of similar length: indices, the longest first.

    They are a function of the lengths alone, so that processes and resumed runs agree on them; the
    longest come first, so that what does not fit in memory is seen at once.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return tuple(
        tuple(order[start : start + batch_size]) for start in range(0, len(order), batch_size)
    )


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many first tokens are the same."""
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count


def stand_in(tokenizer: Any) -> list[int]:
    """Returns what an empty context is: the BOS or else the EOS token.

    Raises:
        InputError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    raise InputError("an empty context needs a BOS or EOS token; this tokenizer has neither.")
