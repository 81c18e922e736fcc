"""Text as blocks of tokens, with the hashes that prove two slices disjoint.

A text file is tokenized whole without special tokens and cut into consecutive blocks; a folder or
`.jsonl` gives one padded sample a document. `pydoc` is the prose of `pydoc_data.topics`, which
every CPython carries; it differs between Python versions, so its hash is recorded.

A decoder reads a running text: its blocks begin with BOS where the tokenizer adds one, and end
anywhere. An encoder was trained on whole texts: its blocks have what its tokenizer puts around one,
`[CLS] ... [SEP]`. An encoder-decoder's decoder reads the same block, shifted right by one behind
its start token, as in training on a text that is to be repeated.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quantkit.errors import InputError, suggest
from quantkit.results import DataInfo

NAMED: Final = ("pydoc",)
KNOWN_PYDOC: Final = {
    "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee": "CPython 3.11.7",
}
"""sha256 of the `pydoc` text where it was seen; another one is used too, and recorded."""
_HASH_DIGITS: Final = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Some sequences, padded on the right.

    Attributes:
        input_ids: int64 `[batch, sequence]`, 0 where padded.
        attention_mask: int64 `[batch, sequence]`, 1 for real tokens.
        first_sequence: Index of the first one in the slice.
        decoder_start: First token of the decoder's inputs, of an encoder-decoder; else None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    first_sequence: int
    decoder_start: int | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the model or its backbone.

        An encoder-decoder's decoder gets the same tokens shifted right: its start token, then all
        but the last. Real and padded positions are therefore the same in both.
        """
        named = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.decoder_start is not None:
            start = torch.full_like(self.input_ids[:, :1], self.decoder_start)
            named["decoder_input_ids"] = torch.cat([start, self.input_ids[:, :-1]], 1)
            named["decoder_attention_mask"] = self.attention_mask
        return named

    @property
    def real(self) -> Tensor | None:
        """Which positions are no padding, `[batch, sequence]`."""
        return self.attention_mask.bool()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSlice:
    """Consecutive blocks of one source.

    Attributes:
        ids: One int64 tensor a sequence.
        skip: Blocks of the source before the first one.
        source_sha256: Hash of the text; of the tokens: `sha256`.
        prefix: Tokens at the start of each block that are not the text's: 1 with a BOS, else 0.
        suffix: The same at its end: 1 with a [SEP].
        decoder_start: First token of the decoder's inputs, of an encoder-decoder; else None.
    """

    source: str
    source_sha256: str
    ids: tuple[Tensor, ...]
    seq_len: int
    skip: int
    bos: str
    prefix: int = 0
    suffix: int = 0
    decoder_start: int | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Real tokens in all."""
        return sum(len(block) for block in self.ids)

    @property
    def block_hashes(self) -> tuple[str, ...]:
        """One short hash a block, over its text alone: a BOS does not make it another text."""
        return tuple(_hash(block[self.prefix : len(block) - self.suffix]) for block in self.ids)

    @property
    def sha256(self) -> str:
        """Hash of all token ids and of where blocks end."""
        return hashlib.sha256("".join(map(_hash, self.ids)).encode()).hexdigest()

    def batches(self, batch_size: int) -> Iterator[TokenBatch]:
        """Yields the sequences in order, `batch_size` at a time."""
        for start in range(0, len(self.ids), batch_size):
            rows = self.ids[start : start + batch_size]
            longest = max(len(row) for row in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for index, row in enumerate(rows):
                ids[index, : len(row)] = row
                mask[index, : len(row)] = 1
            yield TokenBatch(
                input_ids=ids,
                attention_mask=mask,
                first_sequence=start,
                decoder_start=self.decoder_start,
            )

    def info(self, batch_size: int) -> DataInfo:
        """Returns what a result file says about the slice."""
        return DataInfo(
            source=self.source,
            sha256=self.sha256,
            sequences=self.sequences,
            seq_len=self.seq_len,
            tokens=self.tokens,
            batch_size=batch_size,
            bos=self.bos,
            block_hashes=list(self.block_hashes),
            skipped_blocks=self.skip,
            python=platform.python_version(),
        )


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
) -> TokenSlice:
    """Returns up to `samples` blocks of `seq_len` tokens after the first `skip` blocks.

    Args:
        source: `pydoc`, a text file, a folder of `.txt`, or a `.jsonl` with a `text` field.
        bos: `auto` puts the BOS token before each block where the tokenizer's config adds it; it
            takes the place of the block's last token.
        encoder: `auto` puts around each block all that the tokenizer puts around a text, before
            and after it; `always` adds the end to the BOS.
        decoder_start: First token of the decoder's inputs, for an encoder-decoder.

    Raises:
        InputError: no such source, no tokenizer, empty text, or less than one block after `skip`.
    """
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: expected one, to read text with.")
    prefix, suffix = _around(tokenizer, bos, encoder)
    body = seq_len - len(prefix) - len(suffix)
    if body < 1 or seq_len < 2:
        raise InputError(f"sequence length {seq_len} leaves no room for text; expected 2 or more.")
    documents, whole = _documents(source)
    digest = hashlib.sha256("\x00".join(documents).encode()).hexdigest()
    if not any(document.strip() for document in documents):
        raise InputError(f"{source} is empty: expected text.")
    blocks: list[list[int]] = []
    for document in documents:
        ids = _encode(tokenizer, document)
        if whole:
            limit = (skip + samples) * body
            ends = range(body, min(len(ids), limit) + 1, body)
            blocks += [ids[end - body : end] for end in ends]
        elif len(prefix) + len(ids) + len(suffix) >= 2:
            blocks.append(ids[:body])
        if len(blocks) >= skip + samples:
            break
    chosen = blocks[skip : skip + samples]
    if not chosen:
        unit = f"block of {seq_len} tokens" if whole else "document of two tokens"
        raise InputError(
            f"{source} is too short: expected at least one {unit} after {skip} that are used "
            f"elsewhere, got {len(blocks)} in all. Give more text, or lower --seq-len or --samples."
        )
    return TokenSlice(
        source=source,
        source_sha256=digest,
        ids=tuple(torch.tensor(prefix + block + suffix, dtype=torch.int64) for block in chosen),
        seq_len=seq_len,
        skip=skip,
        bos=bos,
        prefix=len(prefix),
        suffix=len(suffix),
        decoder_start=decoder_start,
    )


def _hash(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:_HASH_DIGITS]


def _around(tokenizer: Any, bos: str, encoder: bool) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after the text of a block."""
    if bos == "never":
        return [], []
    token = tokenizer.bos_token_id
    if bos == "always" and token is None:
        raise InputError("--bos always: this tokenizer has no BOS token; use auto or never.")
    plain, added = _encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    begins_with_bos = token is not None and (bos == "always" or added[:1] == [token])
    first = [int(token)] if begins_with_bos else []
    if not encoder or not plain:
        return first, []
    for start in range(len(added) - len(plain) + 1):
        if added[start : start + len(plain)] == plain:
            before = first if bos == "always" else added[:start]
            return before, added[start + len(plain) :]
    return first, []


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _documents(source: str) -> tuple[list[str], bool]:
    """Returns the documents, and whether they are one text to be cut into blocks."""
    path = Path(source).expanduser()
    if source == "pydoc" and not path.exists():
        from pydoc_data import topics

        texts: dict[str, str] = topics.topics
        return ["\n\n".join(texts[key] for key in sorted(texts))], True
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise InputError(f"{source} holds no .txt file: expected one document a file.")
        return [_read(file) for file in files], False
    if path.is_file():
        text = _read(path)
        return (_jsonl(text, source), False) if path.suffix == ".jsonl" else ([text], True)
    raise InputError(f"text {source!r}: no such file or folder.{suggest(source, NAMED)}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path.name} is not UTF-8 text (byte {error.start}): expected a text file."
        ) from None


def _jsonl(text: str, source: str) -> list[str]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.append(str(row["text"]))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{source}, line {number}: expected a JSON object with a 'text' field."
            ) from None
    return found
