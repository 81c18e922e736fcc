"""Documents -> a tokenizer and rows of tokens, generated sequences among them.

A row is BOS and `context - 1` tokens of running text, as evaluations cut it. The rows of text stand
first, then those of `needles`, then those of `icl`: an order of them mixes all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from quantkit.calib_sets.content import file_sha256
from quantkit.errors import InputError
from quantkit.jobs.pair import PairSpec
from quantkit.progress import Progress, silent
from quantkit.results.io import read_json, write_json, written_whole
from quantkit.results.training import CorpusInfo, SourceInfo
from quantkit.training.generated import Rows, icl_rows, needles_rows, sample_texts
from quantkit.training.texts import Documents, read_documents
from quantkit.training.tokenizer import encoded, special_tokens, train_tokenizer

CORPUS_SCHEMA: Final = "quantkit.corpus/1"
_SAMPLE_TEXTS: Final = (200, 4000)
"""The fewest and the most generated samples of each kind that the tokenizer sees, so that their
words are short; between them one for `_SAMPLE_CHARACTERS` of text."""
_SAMPLE_CHARACTERS: Final = 1000
_HELD_OUT_SEED: Final = 0


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """`corpus.json`, the last file to be written: where it is, the corpus is finished.

    Attributes:
        recipe: What of PAIR.toml the rows depend on, e.g. `data.seed` -> `1000000`.
    """

    schema: str = CORPUS_SCHEMA
    recipe: dict[str, str]
    info: CorpusInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """What all arms and seeds are trained on.

    Attributes:
        rows: uint16 `[rows, context]`, memory-mapped.
        held_out: uint16 `[rows, context]` of held-out text, memory-mapped; the sources are mixed,
            so that its first rows are of all of them.
        tokenizer: Folder.
    """

    rows: Rows
    held_out: Rows
    tokenizer: Path
    info: CorpusInfo

    def order(self, seed: int, step: int, batch: int) -> NDArray[np.int64]:
        """Returns the `batch` rows of a step, counted from 0.

        Each epoch is a permutation of all rows, by seed and epoch alone; the steps run through the
        epochs without a gap, so that one may begin in the middle of a step.
        """
        count = len(self.rows)
        places = range(step * batch, (step + 1) * batch)
        return np.array(
            [_permutation(count, seed, place // count)[place % count] for place in places], np.int64
        )


def prepare_corpus(
    spec: PairSpec, folder: Path, *, cache: Path, progress: Progress = silent
) -> Corpus:
    """Returns the corpus of a folder, made there unless it is finished.

    The folder gets `tokenizer/`, `train.npy`, `heldout.npy` and `corpus.json`. Not for two
    processes at once: one makes it, the others read it afterwards.

    Args:
        cache: Where the packages of the sources are kept.

    Raises:
        InputError: text that cannot be read or is too short, a folder that holds the corpus of
            another recipe or files that have changed.
    """
    file = folder / "corpus.json"
    recipe = _recipe(spec)
    if not file.exists():
        documents = read_documents(
            spec.text, held_out=spec.data.held_out, cache=cache, progress=progress
        )
        write_json(file, CorpusFile(recipe=recipe, info=_make(spec, folder, documents, progress)))
    found = read_json(file, CorpusFile)
    _check(found, recipe, folder)
    return Corpus(
        rows=_mapped(folder / "train.npy"),
        held_out=_mapped(folder / "heldout.npy"),
        tokenizer=folder / "tokenizer",
        info=found.info,
    )


def _make(
    spec: PairSpec, folder: Path, documents: list[Documents], progress: Progress
) -> CorpusInfo:
    """Writes tokenizer and rows, and returns what they are."""
    context, data = spec.sizes.context, spec.data
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}.") from error
    progress("tokenizer", 0, 1)
    texts = [text for source in documents for text in source.train]
    fewest, most = _SAMPLE_TEXTS
    samples = min(most, max(fewest, sum(map(len, texts)) // _SAMPLE_CHARACTERS))
    train_tokenizer(
        chain(texts, sample_texts(samples, seed=data.seed)),
        spec.sizes.vocabulary,
        folder / "tokenizer",
        context,
    )
    progress("tokenizer", 1, 1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    text, held_out, sources = [], [], []
    for done, source in enumerate(documents):
        progress("tokens", done, len(documents))
        tokens = _stream(tokenizer, source.train)
        text += [_cut(tokenizer, tokens, context)] * source.source.repeat
        held_out.append(_stream(tokenizer, source.held_out))
        sources.append(_source_info(source, len(tokens)))
    progress("tokens", len(documents), len(documents))
    text_rows = sum(map(len, text))
    held_out_rows = _cut(tokenizer, np.concatenate(held_out), context)
    for what, count in (("text", text_rows), ("held-out text", len(held_out_rows))):
        if not count:
            raise InputError(
                f"the {what} gives no row of {context} tokens: give more text, or a smaller "
                "[sizes] context, or change [data] held_out. What is held out are whole documents, "
                "files or parts of about 20,000 characters, by their hash: of few files perhaps "
                "none; split the text into more."
            )
    generated = {}
    for name, make, share in (
        ("needles", needles_rows, data.needles),
        ("icl", icl_rows, data.icl),
    ):
        progress(f"{name} rows", 0, 1)
        count = round(text_rows * share / (1 - data.needles - data.icl))
        generated[name] = make(tokenizer, count, context=context, seed=data.seed)
        progress(f"{name} rows", 1, 1)
    _write(folder / "train.npy", [*text, *generated.values()], context)
    order = _permutation(len(held_out_rows), _HELD_OUT_SEED, 0)
    _write(folder / "heldout.npy", [held_out_rows[order]], context)
    return CorpusInfo(
        sources=sources,
        context=context,
        vocabulary=spec.sizes.vocabulary,
        rows=text_rows + sum(map(len, generated.values())),
        text_rows=text_rows,
        needles_rows=len(generated["needles"]),
        icl_rows=len(generated["icl"]),
        held_out_rows=len(held_out_rows),
        **_hashes(folder),
    )


def _stream(tokenizer: Any, documents: Iterable[str]) -> Rows:
    """Returns the tokens of all documents, uint16 `[tokens]`, EOS after each."""
    _, eos = special_tokens(tokenizer)
    parts = [np.array([*ids, eos], np.uint16) for ids in encoded(tokenizer, documents)]
    return np.concatenate([np.empty(0, np.uint16), *parts])


def _cut(tokenizer: Any, tokens: Rows, context: int) -> Rows:
    """Returns consecutive pieces with BOS before each; what is left at the end is dropped."""
    bos, _ = special_tokens(tokenizer)
    body = context - 1
    pieces = tokens[: len(tokens) // body * body].reshape(-1, body)
    return np.insert(pieces, 0, bos, axis=1)


def _write(path: Path, parts: list[Rows], context: int) -> None:
    """Writes the rows of all parts; whoever has the old file open keeps it."""
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(np.uint16)),
        "fortran_order": False,
        "shape": (sum(map(len, parts)), context),
    }
    with written_whole(path) as file:  # not into mapped memory, where a full disk is a SIGBUS
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.asarray(part, np.uint16).tobytes())


def _mapped(path: Path) -> Rows:
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def _source_info(found: Documents, tokens: int) -> SourceInfo:
    texts = (*found.train, *found.held_out)
    return SourceInfo(
        source=found.source.source,
        sha256=found.sha256,
        licence=found.source.licence,
        documents=len(texts),
        bytes=sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
        duplicates=found.duplicates,
        held_out=len(found.held_out),
        tokens=tokens,
    )


_FILES: Final = {
    "tokenizer_sha256": "tokenizer/tokenizer.json",
    "rows_sha256": "train.npy",
    "held_out_sha256": "heldout.npy",
}


def _hashes(folder: Path) -> dict[str, str]:
    return {field: file_sha256(folder / name) for field, name in _FILES.items()}


def _recipe(spec: PairSpec) -> dict[str, str]:
    """Returns what the rows depend on, by its name in PAIR.toml."""
    tables = {"data": spec.data} | {f"text.{i}": source for i, source in enumerate(spec.text)}
    return {
        "sizes.context": str(spec.sizes.context),
        "sizes.vocabulary": str(spec.sizes.vocabulary),
    } | {
        f"{name}.{field.name}": str(getattr(table, field.name))
        for name, table in tables.items()
        for field in dataclasses.fields(table)
    }


def _check(found: CorpusFile, recipe: dict[str, str], folder: Path) -> None:
    """Raises InputError unless the folder holds these rows, unchanged."""
    for name in {**recipe, **found.recipe}:
        ours, theirs = recipe.get(name, "nothing"), found.recipe.get(name, "nothing")
        if ours != theirs:
            raise InputError(
                f"{folder} holds the rows of another recipe: {name} is {theirs}, expected {ours}. "
                "Use another folder, or delete this one."
            )
    for field, name in _FILES.items():
        if not (folder / name).is_file():
            raise InputError(f"{folder / name} is missing: delete corpus.json to make it again.")
        if file_sha256(folder / name) != getattr(found.info, field):
            raise InputError(
                f"{folder / name} is not the file that corpus.json names (sha256): delete "
                "corpus.json to make it again."
            )


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns `range(count)` in the order of an epoch, the same on every version of numpy."""
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order
