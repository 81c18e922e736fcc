"""A byte-level BPE of the training text, as a transformers folder.

Words begin with their space. Every digit is a token of its own; the first of a number may take its
space, so that where a model begins to write a number it already decides on a digit. Any text comes
back exactly: each of the 256 bytes has a token.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.errors import InputError

BOS: Final = "<s>"
EOS: Final = "</s>"
_PIECES: Final = r" ?\p{N}|[ ']?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What no token reaches across: a digit, a word, a run of signs, white space."""
_BORDER: Final = re.compile(r"(?<=[!-~])[ \n]")
"""White space after a sign or letter: a piece always begins here, whatever stands around."""
_PART_CHARACTERS: Final = 50_000
_BATCH_CHARACTERS: Final = 1_000_000


def train_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path, context: int) -> None:
    """Writes a tokenizer that `AutoTokenizer.from_pretrained(folder)` loads.

    It puts BOS before a text by itself, so that `bos=auto` does. The same texts in the same order
    give the same bytes.

    Args:
        vocabulary: Tokens: 256 bytes, BOS, EOS, and merges.
        context: Positions that its models have.

    Raises:
        InputError: the texts give fewer tokens, there is no room for the first 258, or the folder
            cannot be written to.
    """
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    found.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
    if found.get_vocab_size() != vocabulary:
        raise InputError(
            f"[sizes] vocabulary: the text gives {found.get_vocab_size():,} tokens, expected "
            f"{vocabulary:,}: give more text, or a smaller vocabulary (258 at least)."
        )
    found.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, found.token_to_id(BOS))],
    )
    whole = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=found,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
            whole.save_pretrained(aside)
            for path in Path(aside).iterdir():
                os.replace(path, folder / path.name)
    except Exception as error:  # tokenizers' own has no class: a full disk is an Exception
        raise InputError(f"cannot write {folder}: {str(error)[:200]}.") from error


def plain_encoder(tokenizer: Any) -> Tokenizer:
    """Returns what encodes text and nothing else: nothing is cut or padded, and the name of a
    special token is letters and signs like any other, so that no text can end itself.
    """
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    return plain


def encoded(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yields the tokens of each text, nothing put around them, in bounded memory."""
    plain = plain_encoder(tokenizer)
    ids: list[int] = []
    for batch in _batches(texts):
        found = plain.encode_batch_fast([part for part, _ in batch], add_special_tokens=False)
        for encoding, (_, is_last) in zip(found, batch, strict=True):
            ids += encoding.ids
            if is_last:
                yield ids
                ids = []


def special_tokens(tokenizer: Any) -> tuple[int, int]:
    """Returns the ids of BOS and EOS.

    Raises:
        InputError: a tokenizer that lacks one.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None or eos is None:
        raise InputError("this tokenizer has no BOS or no EOS token: expected both.")
    return int(bos), int(eos)


def _parts(text: str) -> Iterator[str]:
    """Yields a long text in parts whose tokens are, one after the other, those of the text.

    A lone surrogate, which no tokenizer takes, becomes a question mark.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    begin = 0
    while True:
        border = _BORDER.search(text, begin + _PART_CHARACTERS)
        if border is None:
            yield text[begin:]
            return
        yield text[begin : border.start()]
        begin = border.start()


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yields parts of texts, each with whether it is its text's last."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        parts = list(_parts(text))
        for number, part in enumerate(parts, 1):
            batch.append((part, number == len(parts)))
            size += len(part)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
