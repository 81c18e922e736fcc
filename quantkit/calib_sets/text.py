"""Text as blocks of tokens, with the hashes that prove two slices disjoint.

A text file is tokenized whole without special tokens and cut into consecutive blocks; a folder or
`.jsonl` gives one padded sample a document; a named set says which of the two it is. `pydoc` is the
prose of `pydoc_data.topics`, which every CPython carries.

A decoder reads a running text: its blocks begin with BOS where the tokenizer adds one, and end
anywhere. An encoder was trained on whole texts: its blocks have what its tokenizer puts around one,
`[CLS] ... [SEP]`. An encoder-decoder's decoder reads the same block, shifted right by one behind
its start token, as in training on a text that is to be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from quantkit.calib_sets.batches import Span
from quantkit.calib_sets.check import SetInfo, require_as_read, verified
from quantkit.calib_sets.find import NamedSet, find_set
from quantkit.calib_sets.plain_text import documents_of
from quantkit.calib_sets.token_files import check_vocabulary, read_tokens
from quantkit.calib_sets.token_slice import TokenBatch, TokenSlice, short_hash
from quantkit.errors import InputError

__all__ = ["PYDOC", "TokenBatch", "TokenSlice", "bos_tokens", "text_slice"]

PYDOC: Final = "pydoc"


def text_slice(
    source: str,
    tokenizer: Any,
    *,
    seq_len: int = 512,
    samples: int = 128,
    skip: int = 0,
    bos: str = "auto",
    encoder: bool = False,
    decoder_start: int | None = None,
    vocab_size: int | None = None,
) -> TokenSlice:
    """Returns up to `samples` blocks of `seq_len` tokens after the first `skip` blocks.

    Args:
        source: A named set of text or tokens, a text file, a folder of `.txt`, or a `.jsonl` with a
            `text` field. Tokens are taken as they are: nothing is put around them.
        bos: `auto` puts the BOS token before each block where the tokenizer's config adds it; it
            takes the place of the block's last token.
        encoder: `auto` puts around each block all that the tokenizer puts around a text, before
            and after it; `always` adds the end to the BOS.
        decoder_start: First token of the decoder's inputs, for an encoder-decoder.
        vocab_size: Rows of the model's embedding, to check finished tokens with.

    Raises:
        InputError: no such source, no tokenizer, empty text, less than one block after `skip`, a
            set that changed, tokens of another tokenizer.
    """
    text = _text(source, tokenizer, vocab_size)
    prefix, suffix = _around(tokenizer, bos, encoder) if text.rows is None else ([], [])
    body = seq_len - len(prefix) - len(suffix)
    if body < 1 or seq_len < 2:
        raise InputError(f"sequence length {seq_len} leaves no room for text; expected 2 or more.")
    blocks: list[list[int]] = []
    spans: list[Span] = []
    for ids in text.tokens(tokenizer):
        if text.whole:
            limit = (skip + samples) * body
            ends = range(body, min(len(ids), limit) + 1, body)
            blocks += [ids[end - body : end] for end in ends]
            stream = short_hash(torch.tensor(ids))
            spans = [Span(stream=stream, begin=end - body, end=end) for end in ends]
        elif len(prefix) + len(ids) + len(suffix) >= 2:
            blocks.append(ids[:body])
        if len(blocks) >= skip + samples:
            break
    chosen = blocks[skip : skip + samples]
    if not chosen:
        unit = f"block of {seq_len} tokens" if text.whole else "document of two tokens"
        if blocks:
            raise InputError(
                f"{source} is too short: expected one more {unit} after {skip}, got {len(blocks)} "
                "in all; calibration used all of it: name another --eval, or calibrate on fewer "
                "samples."
            )
        raise InputError(
            f"{source} is too short: expected at least one {unit}. Give more text, or lower "
            "--seq-len."
        )
    return TokenSlice(
        source=source,
        source_sha256=text.sha256,
        ids=tuple(torch.tensor(prefix + block + suffix, dtype=torch.int64) for block in chosen),
        seq_len=seq_len,
        skip=skip,
        bos=bos,
        prefix=len(prefix),
        suffix=len(suffix),
        decoder_start=decoder_start,
        spans=tuple(spans[skip : skip + samples]),
        named=text.named,
    )


def bos_tokens(tokenizer: Any, bos: str) -> list[int]:
    """Returns the BOS token, alone, where `bos` (`auto`, `always`, `never`) puts it before a text.

    Raises:
        InputError: `always` with a tokenizer that has none.
    """
    token = tokenizer.bos_token_id
    if bos == "always" and token is None:
        raise InputError("--bos always: this tokenizer has no BOS token; use auto or never.")
    if bos == "never" or token is None:
        return []
    added = bos == "always" or list(tokenizer("a")["input_ids"])[:1] == [token]
    return [int(token)] if added else []


def _around(tokenizer: Any, bos: str, encoder: bool) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after the text of a block."""
    first = bos_tokens(tokenizer, bos)
    if bos == "never" or not encoder:
        return first, []
    plain, added = _encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    if not plain:
        return first, []
    for start in range(len(added) - len(plain) + 1):
        if added[start : start + len(plain)] == plain:
            before = first if bos == "always" else added[:start]
            return before, added[start + len(plain) :]
    return first, []


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Text:
    """What a source holds: documents, or rows of finished tokens. `whole`: they are one text."""

    documents: list[str]
    whole: bool
    sha256: str
    rows: list[list[int]] | None = None
    named: SetInfo | None = None

    def tokens(self, tokenizer: Any) -> Iterator[list[int]]:
        """Yields the tokens of each document."""
        if self.rows is not None:
            yield from self.rows
        else:
            yield from (_encode(tokenizer, document) for document in self.documents)


def _text(source: str, tokenizer: Any, vocab_size: int | None) -> _Text:
    found = find_set(source)
    if found is not None and found.manifest.kind == "tokens":
        return _token_set(found, tokenizer, vocab_size)
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: expected one, to read text with.")
    text = documents_of(source)
    return _Text(
        documents=list(text.documents), whole=text.whole, sha256=text.sha256, named=text.named
    )


def _token_set(found: NamedSet, tokenizer: Any, vocab_size: int | None) -> _Text:
    content, named = verified(found)
    name, path = next(iter(content.paths.items()))
    rows = [row for row in read_tokens(path, name) if row]
    require_as_read(found, content)
    unsure = check_vocabulary(found.manifest, rows, tokenizer, vocab_size)
    named = dataclasses.replace(named, warnings=(*named.warnings, *unsure))
    whole = found.manifest.cut == "blocks"
    if whole:
        rows = [[token for row in rows for token in row]]
    return _Text(documents=[], whole=whole, sha256=content.sha256, rows=rows, named=named)
