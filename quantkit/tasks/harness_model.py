"""A scored callable as a model of EleutherAI's lm-evaluation-harness (extra `data`).

Only what needs the harness imports this file. What follows its conventions: a context and its
continuation are tokenized together, rolling windows overlap by one token, generated text ends at
the first stop string or after 256 tokens. What does not: a context that is cut keeps its BOS.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from quantkit.calib_sets.text import bos_tokens
from quantkit.errors import InputError, ProbeError
from quantkit.tasks.continuations import (
    Continuation,
    encoded,
    log_likelihoods,
    padded_rows,
    planned,
    stand_in,
    tokenized,
)
from quantkit.tasks.task import TextForward

_MODEL: Any = importlib.import_module("lm_eval.api.model")
_UTILS: Any = importlib.import_module("lm_eval.utils")

MAX_TOKENS: Final = 256
"""Of generated text, where a task does not say."""
_LIMITS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to be continued greedily.

    Attributes:
        ids: Token ids; `cut`: how many were left out at the left.
        limit: Tokens to write at most.
        until: Texts that end it and are not part of it.
    """

    ids: tuple[int, ...]
    limit: int
    until: tuple[str, ...]
    cut: int = 0


class Encoder:
    """Requests of the harness as token ids; each different one is tokenized once.

    Args:
        max_length: Positions that the model takes; None: as many as there are.
        bos: `auto`, `always` or `never`, as for blocks of text.
    """

    def __init__(self, tokenizer: Any, *, max_length: int | None = None, bos: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.bos = bos
        self._max_length = max_length
        self.pair = cache(self._pair)
        self.windows = cache(self._windows)
        self._ids = cache(lambda text: tuple(encoded(tokenizer, text)))

    def _pair(self, context: str, continuation: str) -> Continuation:
        return tokenized(
            self.tokenizer, context, continuation, bos=self.bos, max_length=self._max_length
        )

    def _windows(self, text: str) -> tuple[Continuation, ...]:
        """Returns the parts of a text, each token predicted once; none for an empty text."""
        ids = encoded(self.tokenizer, text)
        parts = _UTILS.get_rolling_token_windows(
            token_list=ids,
            prefix_token=stand_in(self.tokenizer)[0],
            max_seq_len=self._max_length or max(1, len(ids)),
            context_len=1,
        )
        pairs = map(_UTILS.make_disjoint_window, parts)
        return tuple(Continuation(context=tuple(a), continuation=tuple(b)) for a, b in pairs)

    def prompt(self, context: str, options: Mapping[str, Any]) -> Prompt:
        """Returns what is generated after a context.

        Raises:
            InputError: the task samples its text, or asks for more than the model takes.
        """
        if options.get("do_sample", float(options.get("temperature") or 0) > 0):
            raise InputError("this task samples its text: quantkit decodes greedily only.")
        limit = next((int(options[name]) for name in _LIMITS if options.get(name)), MAX_TOKENS)
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        ids = self._ids(context)
        first = bos_tokens(self.tokenizer, self.bos) or ([] if ids else stand_in(self.tokenizer))
        kept = len(ids)
        if self._max_length is not None:
            room = self._max_length - limit - len(first)
            if room < 1:
                raise InputError(
                    f"this task writes up to {limit} tokens; the model takes {self._max_length} "
                    "positions, the prompt among them."
                )
            kept = min(kept, room)
        return Prompt(
            ids=(*first, *ids[len(ids) - kept :]),
            limit=limit,
            until=tuple(stop for stop in stops if stop),
            cut=len(ids) - kept,
        )

    def text(self, prompt: Prompt, written: Sequence[int]) -> str:
        """Returns what was written, up to the first text that ends it."""
        found = str(self.tokenizer.decode(list(written), skip_special_tokens=True))
        for stop in prompt.until:
            found = found.split(stop)[0]
        return found


class HarnessModel(_MODEL.LM):  # type: ignore[misc]
    """What the harness asks of a model, answered by a `TextForward`.

    Generating has no cache: each token takes a forward pass over all before it. Dynamic ranges
    therefore see the whole prefix each time, as they do when a text is scored.
    """

    def __init__(self, forward: TextForward, encoder: Encoder, *, batch_size: int = 4) -> None:
        super().__init__()
        self._forward = forward
        self._encoder = encoder
        self._batch_size = batch_size

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns (log-probability in nats, whether greedy decoding writes it) of each."""
        pairs = [self._encoder.pair(*request.args) for request in requests]
        return [(found[0], bool(found[1])) for found in self._scored([(p,) for p in pairs])]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-probability of each whole text."""
        windows = [self._encoder.windows(*request.args) for request in requests]
        return [found[0] for found in self._scored(windows)]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns what greedy decoding writes after each context.

        Raises:
            ProbeError: the model computes NaN after one of them.
        """
        prompts = [self._encoder.prompt(*request.args) for request in requests]
        texts = []
        for request, prompt, ids in zip(requests, prompts, self.written(prompts), strict=True):
            if ids is None:
                said = str(request.args[0])[-40:]
                raise ProbeError(f"after {said!r} the model computes NaN: it writes no text.")
            texts.append(self._encoder.text(prompt, ids))
        return texts

    def _scored(self, texts: Sequence[Sequence[Continuation]]) -> list[tuple[float, bool]]:
        """Returns the sum over the parts of each text, and whether all are greedy."""
        parts = [part for text in texts for part in text]
        likely: dict[int, Any] = {}
        for batch in planned([len(part.fed) for part in parts], self._batch_size):
            found = log_likelihoods(self._forward, [parts[index] for index in batch])
            likely.update(zip(batch, found, strict=True))
        sums, start = [], 0
        for text in texts:
            own = [likely[start + index] for index in range(len(text))]
            total = sum(part.log_probability for part in own)
            sums.append((float(total), all(part.is_greedy for part in own)))
            start += len(text)
        return sums

    def written(self, prompts: Sequence[Prompt]) -> list[list[int] | None]:
        """Returns the token ids that greedy decoding writes after each prompt; None where a logit
        that decides one of them is NaN.
        """
        found: list[list[int]] = [[] for _ in prompts]
        broken: set[int] = set()
        for batch in planned([len(prompt.ids) for prompt in prompts], self._batch_size):
            active = list(batch)
            while active:
                rows = [(*prompts[index].ids, *found[index]) for index in active]
                lasts = [len(row) - 1 for row in rows]
                positions = sorted(set(lasts))
                with torch.inference_mode():
                    logits = self._forward(padded_rows(rows), torch.tensor(positions))
                for row, index in enumerate(active):
                    own = logits[row, positions.index(lasts[row])]
                    found[index].append(int(own.argmax()))
                    if own.isnan().any():
                        broken.add(index)
                active = [
                    i for i in active if i not in broken and not self._is_done(prompts[i], found[i])
                ]
        return [None if index in broken else ids for index, ids in enumerate(found)]

    def _is_done(self, prompt: Prompt, written: list[int]) -> bool:
        if len(written) >= prompt.limit or written[-1] == self._encoder.tokenizer.eos_token_id:
            return True
        text = self._encoder.tokenizer.decode(written, skip_special_tokens=True)
        return any(stop in text for stop in prompt.until)
