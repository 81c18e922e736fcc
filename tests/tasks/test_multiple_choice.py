"""Multiple choice: against numpy, files in HellaSwag's fields, and items made from a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import TokenBatch
from quantkit.calib_sets.plain_text import documents_of, joined
from quantkit.errors import InputError
from quantkit.jobs.tasks import MultipleChoiceSpec
from quantkit.tasks.choice_items import made_from, read_items
from quantkit.tasks.items import sampled
from quantkit.tasks.multiple_choice import MultipleChoice

ROWS = [
    {"ctx": "The sky is", "endings": ["blue", "made of stone and of sand"], "label": 0},
    {"ctx": "Water boils at ", "endings": ["a hundred", " ten", "noon", "é"], "label": "2"},
    {
        "ctx": "",
        "endings": ["Alone", "together with all others"],
        "label": 1,
        "activity_label": "x",
    },
    {"ctx": "One, two,", "endings": ["three", "four or five", "six"], "label": 1},
]


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return written(tmp_path / "items.jsonl", ROWS)


def task_of(source: str | None, tokenizer: Any, **options: Any) -> MultipleChoice:
    spec = MultipleChoiceSpec(source=source)
    return MultipleChoice.of(spec, tokenizer, **{"text_source": "pydoc"} | options)


def forward_of(model: Any) -> Any:
    def forward(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        assert len(batch.input_ids) <= 4
        return model(**batch.inputs, use_cache=False).logits[:, positions]

    return forward


def rows_of(task: MultipleChoice, forward: Any) -> np.ndarray[Any, Any]:
    rows = {}
    for batch in task.batches:
        rows.update(zip(batch, task.run(forward, batch), strict=True))
    return np.array([rows[index] for index in range(len(rows))])


def log_likelihood(model: Any, context: list[int], ending: list[int]) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([context + ending]), use_cache=False).logits[0]
    rows = logits[len(context) - 1 : -1].double().numpy()
    rows = rows - rows.max(-1, keepdims=True)
    logs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return float(logs[np.arange(len(ending)), ending].sum())


@pytest.mark.parametrize("batch_size", [1, 3, 4], ids=lambda size: f"batch {size}")
def test_figures_are_numpys_at_every_batch_size(
    source: str, tiny_llama: Any, tokenizer: Any, batch_size: int
) -> None:
    # sharper than random, so that endings differ
    tiny_llama.lm_head.weight.data.mul_(20)
    task = task_of(source, tokenizer, batch_size=batch_size)
    rows = rows_of(task, forward_of(tiny_llama))
    # a space that ends the context belongs to the ending, which may begin with one more
    joints = [" ", " ", "", " "]
    expected = []
    for row, joint in zip(ROWS, joints, strict=True):
        context = tokenizer(row["ctx"].rstrip())["input_ids"] or [256]
        likely, sizes = [], []
        for ending in row["endings"]:
            likely.append(
                log_likelihood(tiny_llama, context, tokenizer(joint + ending)["input_ids"])
            )
            sizes.append(len(ending.encode()))
        label = int(row["label"])
        norm = np.argmax(np.array(likely) / sizes) == label
        expected.append([norm, np.argmax(likely) == label])
    assert rows.tolist() == np.array(expected, dtype=float).tolist()
    norm, plain = task.scores(rows).metrics
    assert (norm.name, plain.name) == ("acc_norm", "acc")
    assert norm.chance == pytest.approx((1 / 2 + 1 / 4 + 1 / 2 + 1 / 3) / 4)
    assert norm.trials and norm.higher_is_better and norm.is_share and plain.is_share
    assert norm.value == np.mean([row[0] for row in expected])


def test_length_decides_between_acc_and_acc_norm(tmp_path: Path, tokenizer: Any) -> None:
    """Every byte is as unlikely: the shorter one wins, and by length the longer one, since the
    space before it weighs less.
    """

    def forward(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(batch.input_ids), len(positions), 257)

    rows = [{"ctx": "a", "endings": ["bc", "b" * 30], "label": label} for label in (0, 1)]
    task = task_of(written(tmp_path / "x.jsonl", rows), tokenizer)
    assert rows_of(task, forward).tolist() == [[0.0, 1.0], [1.0, 0.0]]


def _indifferent(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
    """Every byte is as likely as any other."""
    return torch.zeros(len(batch.input_ids), len(positions), 257)


def test_the_length_of_an_ending_is_in_bytes(tmp_path: Path, tokenizer: Any) -> None:
    """With the space before them 7 and 5 tokens: 7/6 a byte against 5/4, but 7/3 a character."""
    rows = [{"ctx": "a", "endings": ["\u00e9" * 3, "bcde"], "label": label} for label in (0, 1)]
    task = task_of(written(tmp_path / "x.jsonl", rows), tokenizer)
    assert rows_of(task, _indifferent).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("label", [0, 1, 2])
def test_who_prefers_no_ending_is_wrong(tmp_path: Path, tokenizer: Any, label: int) -> None:
    """A tie is no answer, wherever the right one stands; a worse ending that ties harms nobody."""
    tied = {"ctx": "a", "endings": ["bc", "de", "fg"], "label": label}
    best = {"ctx": "a", "endings": ["bcdefg", "hijkln"], "label": 0}
    best["endings"].insert(label, "x")  # type: ignore[attr-defined]
    best["label"] = label
    task = task_of(written(tmp_path / "x.jsonl", [tied, best]), tokenizer)
    # by length the long ones are likelier: they tie before the short one
    assert rows_of(task, _indifferent).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_likelihoods_that_are_no_numbers_show(source: str, tokenizer: Any) -> None:
    def forward(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        return torch.full((len(batch.input_ids), len(positions), 257), float("nan"))

    assert np.isnan(rows_of(task_of(source, tokenizer), forward)).all()


def test_what_a_task_says_of_itself(source: str, tokenizer: Any, bos_tokenizer: Any) -> None:
    task = task_of(source, tokenizer, max_length=35)
    assert task.name == f"multiple-choice={source}" and task.unit == "items"
    assert sorted(index for batch in task.batches for index in batch) == [0, 1, 2, 3]
    assert len(task.tokens) == len(task.batches)
    data = task.data
    assert (data.source, data.sequences, data.warnings) == (source, 4, [])
    assert data.block_hashes == list(task.item_hashes) and len(set(task.item_hashes)) == 4
    # another tokenizer reads the same items, but other tokens
    other = task_of(source, bos_tokenizer)
    assert other.item_hashes == task.item_hashes and other.data.sha256 != data.sha256
    cut = task_of(source, bos_tokenizer, max_length=35)
    assert cut.data.warnings == ["1 of 11 contexts are cut at the left: the model takes no more."]


def test_of_more_items_some_are_drawn_in_the_files_order(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"ctx": f"{i}", "endings": ["a", "b"], "label": 0} for i in range(50)]
    path = written(tmp_path / "x.jsonl", rows)
    chosen = [int(item.ctx) for item in task_of(path, tokenizer, items=10, seed=1).items]
    assert len(chosen) == 10 and chosen == sorted(chosen) and chosen != list(range(10))
    again = [int(item.ctx) for item in task_of(path, tokenizer, items=10, seed=1).items]
    other = [int(item.ctx) for item in task_of(path, tokenizer, items=10, seed=2).items]
    assert chosen == again != other
    assert sampled([3, 1, 2], 3, 0) == [3, 1, 2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: expected a JSON object"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"ctx": "a", "label": 0}', "line 2: expected a field 'endings'; got ctx, label"),
        ('{"ctx": 1, "endings": ["a", "b"], "label": 0}', "line 2: ctx is int"),
        ('{"ctx": "a", "endings": "ab", "label": 0}', "line 2: endings are no list"),
        ('{"ctx": "a", "endings": ["a", ""], "label": 0}', "line 2: endings are no list"),
        ('{"ctx": "a", "endings": ["a"], "label": 0}', "line 2: expected two endings"),
        ('{"ctx": "a", "endings": ["a", "a"], "label": 0}', "line 2: one of the endings"),
        ('{"ctx": "a", "endings": ["a", "b"], "label": 2}', "label from 0 to 1, got 2"),
        ('{"ctx": "a", "endings": ["a", "b"], "label": ""}', "label from 0 to 1, got ''"),
        ('{"ctx": "a", "endings": ["a", "b"], "label": true}', "label from 0 to 1, got True"),
        ('{"ctx": "a", "endings": ["a", "b"], "label": -1}', "label from 0 to 1, got -1"),
    ],
    ids=["not JSON", "no object", "field missing", "ctx a number", "endings a text", "empty ending",
         "one ending", "ending twice", "label too large", "label empty", "label a boolean",
         "label negative"],
)  # fmt: skip
def test_a_line_that_is_no_item_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{line}\n")
    with pytest.raises(InputError, match=said):
        read_items(str(path))


def test_a_file_without_items_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_items(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="is a folder"):
        read_items(str(tmp_path))
    (tmp_path / "x.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match="is empty"):
        read_items(str(tmp_path / "x.jsonl"))
    (tmp_path / "x.jsonl").write_bytes(b'{"ctx": "\xff"}')
    with pytest.raises(InputError, match="not UTF-8"):
        read_items(str(tmp_path / "x.jsonl"))


@pytest.fixture(scope="module")
def pydoc() -> str:
    return joined(documents_of("pydoc"))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_made_items_are_true_and_fair(pydoc: str) -> None:
    start = 100_000
    items = made_from(pydoc, items=80, seed=3, seen=pydoc[:start])
    rest = flat(pydoc[start:])
    assert len(items) == 80
    end = 0
    for item in items:
        true = item.endings[item.label]
        words = {len(ending.split()) for ending in item.endings}
        assert len(item.endings) == len(set(item.endings)) == 4
        assert len(words) == 1 and 8 <= words.pop() <= 15
        assert 60 <= len(item.ctx.split()) <= 100
        sizes = [len(ending) / len(true) for ending in item.endings]
        assert min(sizes) > 0.8 and max(sizes) < 1.25
        # the true one follows the context, all are of the text, none is told by the context
        assert all(ending in rest and ending not in item.ctx for ending in item.endings)
        assert not item.ctx.endswith((".", "!", "?"))
        # in the order of the text, without a word in common
        begin = rest.index(f"{flat(item.ctx)} {true}", end)
        end = begin + len(flat(item.ctx)) + 1 + len(true)
    # labels are drawn: each about a quarter
    counts = np.bincount([item.label for item in items], minlength=4)
    assert counts.min() >= 8


def test_a_paragraph_that_was_seen_makes_no_item(pydoc: str) -> None:
    text = pydoc[:60_000]
    once = _count(text)
    assert once > 10
    # calibration has seen the first copy; the second is no news
    assert _count(text + "\n\n" + text) == once
    with pytest.raises(InputError, match="has 0 words of prose"):
        made_from(text + "\n\n" + text, items=1, seed=0, seen=text)


def _count(text: str) -> int:
    """How many items a text gives."""
    return len(made_from(text, items=10**6, seed=0))


def test_made_items_are_a_function_of_text_and_seed(pydoc: str) -> None:
    text = pydoc[:150_000]
    first = made_from(text, items=20, seed=0)
    assert made_from(text, items=20, seed=0) == first
    assert made_from(text, items=20, seed=1) != first


def test_made_items_are_the_same_on_every_machine() -> None:
    """Words name their place: 180 to a paragraph of five."""
    letters = "abcdefghij"
    words = [f"{letters[i // 100]}{letters[i // 10 % 10]}{letters[i % 10]}" for i in range(900)]
    text = "\n\n".join(" ".join(words[i : i + 180]) + "." for i in range(0, 900, 180))
    found = []
    for item in made_from(text, items=3, seed=0):
        first = [words.index(ending.split()[0]) for ending in item.endings]
        found.append((words.index(item.ctx.split()[0]), len(item.ctx.split()), first, item.label))
    assert found == [
        (180, 60, [240, 72, 362, 541], 0),
        (360, 77, [805, 437, 774, 289], 1),
        (720, 71, [343, 791, 492, 370], 1),
    ]


def test_code_and_tables_are_no_prose() -> None:
    code = "\n\n".join(f"x_{i} = f(a[{i}], b={i}) + g({i}) # {i}\n" * 40 for i in range(30))
    with pytest.raises(InputError, match="has 0 words of prose"):
        made_from(code, items=1, seed=0)


def test_too_little_text_gives_what_there_is(pydoc: str) -> None:
    found = made_from(pydoc, items=500, seed=0, seen=pydoc[:450_000])
    assert 0 < len(found) < 500
    with pytest.raises(InputError, match=r"has \d+ words of prose .* set less of it aside"):
        made_from("Too short for an item. " * 3, items=5, seed=0)


def test_items_are_made_where_the_task_names_no_file(tokenizer: Any) -> None:
    task = task_of(None, tokenizer, items=12, seed=5)
    assert task.name == "multiple-choice" and len(task.items) == 12
    assert task.data.source == task.data.named_set == "pydoc"
    assert all(len(pairs) == 4 for pairs in task.pairs)


def test_no_item_is_made_of_what_calibration_has_seen(tokenizer: Any, pydoc: str) -> None:
    seen = pydoc[:100_000]
    task = task_of(None, tokenizer, items=40, seen=seen)
    words = flat(seen)
    assert not any(item.ctx.split("\n\n")[0] in words for item in task.items)
    assert any(item.ctx.split("\n\n")[0] in words for item in task_of(None, tokenizer).items)


def test_a_set_without_text_is_an_error() -> None:
    with pytest.raises(InputError, match="holds images: expected text"):
        documents_of("shapes")
    with pytest.raises(InputError, match="no such file or folder"):
        documents_of("nowhere.txt")
