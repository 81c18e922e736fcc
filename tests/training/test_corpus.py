"""The rows of a pair: what stands in them, in which order they come, that they stay the same."""

from __future__ import annotations

import json
import pydoc_data.topics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from quantkit.errors import InputError
from quantkit.jobs.pair import Data, PairSpec, Sizes, TextSource, Training
from quantkit.training import corpus as module
from quantkit.training.corpus import Corpus, prepare_corpus
from quantkit.training.generated import icl_rows, needles_rows
from quantkit.training.texts import read_documents

CONTEXT = 64


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PairSpec:
    """Two sources of real prose, the second twice; some of the rows are generated."""
    topics = [str(text) for text in pydoc_data.topics.topics.values()]
    folder = tmp_path_factory.mktemp("texts")
    sources = []
    for name, texts, repeat in (("one", topics[:9], 1), ("two", topics[30:36], 2)):
        (folder / name).mkdir()
        for number, text in enumerate(texts):
            (folder / name / f"{number:02}.txt").write_text(text, encoding="utf-8")
        sources.append(TextSource(source=str(folder / name), licence="PSF", repeat=repeat))
    return PairSpec(
        name="small",
        sizes=Sizes(layers=1, width=32, heads=2, vocabulary=500, context=CONTEXT),
        training=Training(steps=1),
        data=Data(held_out=0.2, needles=0.05, icl=0.1, seed=5),
        text=tuple(sources),
    )


@pytest.fixture(scope="module")
def made(spec: PairSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Path]:
    folder = tmp_path_factory.mktemp("corpus")
    told: dict[str, tuple[int, int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        told[what] = (done, total)

    found = prepare_corpus(spec, folder, cache=folder / "cache", progress=progress)
    kinds = ("tokenizer", "tokens", "needles rows", "icl rows")
    assert [told[kind] for kind in kinds] == [(1, 1), (2, 2), (1, 1), (1, 1)]
    return found, folder


@pytest.fixture
def corpus(made: tuple[Corpus, Path]) -> Corpus:
    return made[0]


@pytest.fixture
def copy(made: tuple[Corpus, Path], tmp_path: Path) -> Path:
    """A folder of its own, to be damaged."""
    for file in made[1].rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(made[1])
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    return tmp_path


def unread(*_args: Any, **_options: Any) -> Any:
    raise AssertionError("the text was read again")


def text_rows(tokenizer: Any, documents: tuple[str, ...]) -> np.ndarray:
    """Returns the rows of one source, made one token at a time."""
    rows, row = [], [tokenizer.bos_token_id]
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        for token in [*ids, tokenizer.eos_token_id]:
            row.append(token)
            if len(row) == CONTEXT:
                rows.append(row)
                row = [tokenizer.bos_token_id]
    return np.array(rows)


def test_the_rows_are_the_text_then_needles_then_icl(spec: PairSpec, corpus: Corpus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    one, two = read_documents(spec.text, held_out=0.2, cache=Path("unused"))
    first, second = text_rows(tokenizer, one.train), text_rows(tokenizer, two.train)
    text = np.concatenate([first, second, second])
    info = corpus.info

    assert corpus.rows.dtype == corpus.held_out.dtype == np.uint16
    assert info.text_rows == len(text)
    assert (corpus.rows[: len(text)] == text).all()
    assert info.needles_rows == round(len(text) * 0.05 / 0.85)
    assert info.icl_rows == round(len(text) * 0.1 / 0.85)
    needles, icl = corpus.rows[len(text) :][: info.needles_rows], corpus.rows[-info.icl_rows :]
    made = needles_rows(tokenizer, info.needles_rows, context=CONTEXT, seed=5)
    assert (needles == made).all()
    assert (icl == icl_rows(tokenizer, info.icl_rows, context=CONTEXT, seed=5)).all()
    assert corpus.rows.shape == (info.text_rows + info.needles_rows + info.icl_rows, CONTEXT)


def test_held_out_rows_are_of_all_sources_from_the_first_on(spec: PairSpec, corpus: Corpus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    sources = read_documents(spec.text, held_out=0.2, cache=Path("unused"))
    rows = text_rows(tokenizer, tuple(text for source in sources for text in source.held_out))

    def as_set(found: np.ndarray) -> set[tuple[int, ...]]:
        return set(map(tuple, found.tolist()))

    assert len(rows) == len(corpus.held_out) == corpus.info.held_out_rows
    assert as_set(corpus.held_out) == as_set(rows)
    first = text_rows(tokenizer, sources[0].held_out)
    share = len(first) / len(rows)
    shown = corpus.held_out[:24].tolist()
    assert abs(np.mean([tuple(row) in as_set(first) for row in shown]) - share) < 0.25
    assert not as_set(corpus.rows) & as_set(rows)


def test_info_counts_what_was_read(spec: PairSpec, corpus: Corpus) -> None:
    sources = read_documents(spec.text, held_out=0.2, cache=Path("unused"))
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    for info, source in zip(corpus.info.sources, sources, strict=True):
        texts = [*source.train, *source.held_out]
        assert (info.source, info.licence) == (source.source.source, "PSF")
        assert info.sha256 == source.sha256
        assert (info.documents, info.held_out) == (len(texts), len(source.held_out))
        assert info.bytes == len("".join(texts).encode())
        tokens = tokenizer(list(source.train), add_special_tokens=False, verbose=False)["input_ids"]
        assert info.tokens == sum(map(len, tokens)) + len(tokens)
    assert (corpus.info.context, corpus.info.vocabulary) == (CONTEXT, len(tokenizer))


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_an_epoch_is_a_permutation_and_steps_leave_no_gap(corpus: Corpus, batch: int) -> None:
    count = len(corpus.rows)
    steps = 3 * count // batch + 1
    order = np.concatenate([corpus.order(3, step, batch) for step in range(steps)])

    epochs = order[: 3 * count].reshape(3, count)
    assert (np.sort(epochs, axis=1) == np.arange(count)).all()
    assert not (epochs[0] == epochs[1]).all()
    assert not (epochs[1] == epochs[2]).all()


def test_the_order_is_of_the_seed_alone_and_no_batch_moves_it(corpus: Corpus) -> None:
    first = corpus.order(0, 0, 24)

    assert first.dtype == np.int64
    assert (np.concatenate([corpus.order(0, step, 8) for step in range(3)]) == first).all()
    assert not (corpus.order(1, 0, 24) == first).all()
    # by hand, the order of the raw 64-bit words of PCG64
    keys = np.random.PCG64(np.random.SeedSequence([0, 0])).random_raw(len(corpus.rows))
    assert first.tolist() == sorted(range(len(keys)), key=lambda row: int(keys[row]))[:24]


def test_the_order_mixes_text_and_generated_rows(corpus: Corpus) -> None:
    kinds = corpus.order(0, 0, 100) >= corpus.info.text_rows

    assert 0.05 < kinds.mean() < 0.35
    assert kinds[:50].any()
    assert kinds[50:].any()


def test_what_is_finished_is_read_and_not_made(
    spec: PairSpec, made: tuple[Corpus, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_documents", unread)

    again = prepare_corpus(spec, made[1], cache=made[1])

    assert again.info == made[0].info
    assert isinstance(again.rows, np.memmap)
    assert (again.rows == made[0].rows).all()
    assert (again.held_out == made[0].held_out).all()


OTHERS = {
    "seed": (lambda spec: replace(spec, data=replace(spec.data, seed=6)), r"data\.seed is 5.* 6"),
    "context": (
        lambda spec: replace(spec, sizes=replace(spec.sizes, context=32)),
        r"sizes\.context is 64, expected 32",
    ),
    "fewer sources": (
        lambda spec: replace(spec, text=spec.text[:1]),
        r"text\.1\.source is .*, expected nothing",
    ),
    "repeat": (
        lambda spec: replace(spec, text=(spec.text[0], replace(spec.text[1], repeat=3))),
        r"text\.1\.repeat is 2, expected 3",
    ),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_a_folder_of_another_recipe_is_an_error(
    spec: PairSpec, made: tuple[Corpus, Path], change: Any, message: str
) -> None:
    with pytest.raises(InputError, match=f"rows of another recipe: {message}"):
        prepare_corpus(change(spec), made[1], cache=made[1])


def test_what_the_rows_do_not_depend_on_may_change(
    spec: PairSpec, made: tuple[Corpus, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_documents", unread)
    other = replace(
        spec,
        name="other",
        seeds=(3, 4),
        sizes=replace(spec.sizes, layers=2),
        training=Training(steps=9, batch=2),
    )

    assert prepare_corpus(other, made[1], cache=made[1]).info == made[0].info


@pytest.mark.parametrize("name", ["train.npy", "heldout.npy", "tokenizer/tokenizer.json"])
def test_a_file_that_changed_is_an_error(spec: PairSpec, copy: Path, name: str) -> None:
    damaged = bytearray((copy / name).read_bytes())
    damaged[-3] ^= 1
    (copy / name).write_bytes(damaged)

    with pytest.raises(InputError, match=rf"{name} is not the file that corpus\.json names"):
        prepare_corpus(spec, copy, cache=copy)
    (copy / name).unlink()
    with pytest.raises(InputError, match=rf"{name} is missing: delete corpus\.json"):
        prepare_corpus(spec, copy, cache=copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain | {"schema": "quantkit.corpus/9"}, "version '9'"),
        (lambda plain: plain | {"more": 1}, "more"),
        (lambda plain: {k: v for k, v in plain.items() if k != "info"}, "info"),
        (lambda plain: plain["info"], "no field `schema`"),
    ],
    ids=["version", "unknown field", "missing field", "another file"],
)
def test_a_corpus_json_that_is_none_is_an_error(
    spec: PairSpec, copy: Path, change: Any, message: str
) -> None:
    file = copy / "corpus.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))

    with pytest.raises(InputError, match=message):
        prepare_corpus(spec, copy, cache=copy)


def test_an_interrupted_preparation_is_made_again_with_the_same_bytes(
    spec: PairSpec, made: tuple[Corpus, Path], tmp_path: Path
) -> None:
    def interrupted(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    for at in ("train_tokenizer", "needles_rows", "write_json"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, at, interrupted)
            with pytest.raises(KeyboardInterrupt):
                prepare_corpus(spec, tmp_path, cache=tmp_path / "cache")
        assert not (tmp_path / "corpus.json").exists()
    (tmp_path / "train.npy").write_bytes(b"half a file")

    assert prepare_corpus(spec, tmp_path, cache=tmp_path / "cache").info == made[0].info
    for name in ("train.npy", "heldout.npy", "corpus.json", "tokenizer/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (made[1] / name).read_bytes(), name


def test_rows_that_are_open_outlive_a_new_preparation(spec: PairSpec, copy: Path) -> None:
    open_one = prepare_corpus(spec, copy, cache=copy)
    before = np.array(open_one.rows)
    (copy / "corpus.json").unlink()

    other = prepare_corpus(replace(spec, data=replace(spec.data, seed=6)), copy, cache=copy)

    assert (open_one.rows == before).all()
    assert not np.array_equal(other.rows, before)


SHORT = {
    "all text is short": (Data(held_out=0.2), 60_000, "the text gives no row of 60000 tokens"),
    "nothing held out": (Data(held_out=0.0), CONTEXT, "the held-out text gives no row of 64"),
}


@pytest.mark.parametrize(("data", "context", "message"), SHORT.values(), ids=SHORT.keys())
def test_too_little_text_is_an_error(
    spec: PairSpec, tmp_path: Path, data: Data, context: int, message: str
) -> None:
    sizes = replace(spec.sizes, context=context, vocabulary=400)
    short = replace(spec, data=data, sizes=sizes, text=spec.text[1:])

    with pytest.raises(InputError, match=message):
        prepare_corpus(short, tmp_path, cache=tmp_path / "cache")
    assert not (tmp_path / "corpus.json").exists()


def test_a_folder_that_cannot_be_made_is_an_error(spec: PairSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(InputError, match="cannot write to"):
        prepare_corpus(spec, tmp_path / "file", cache=tmp_path / "cache")
