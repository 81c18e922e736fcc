"""Tasks given what they cannot score: figures that are no numbers, files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from quantkit.calib_sets import TokenBatch
from quantkit.errors import InputError
from quantkit.jobs.tasks import (
    IclSpec,
    ImageClassificationSpec,
    MultipleChoiceSpec,
    NeedlesSpec,
)
from quantkit.models import LoadedModel
from quantkit.tasks.choice_items import read_items
from quantkit.tasks.icl import Icl
from quantkit.tasks.image_classification import ImageClassification
from quantkit.tasks.multiple_choice import MultipleChoice
from quantkit.tasks.needles import Needles

ITEM = {"ctx": "The cat sat on", "endings": ["the mat", "a dog"], "label": 0}


def only_nan(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
    """A broken model, as a task sees it."""
    rows, columns = batch.input_ids.shape
    return torch.full((rows, columns if positions is None else len(positions), 257), torch.nan)


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: Needles.of(NeedlesSpec(), t, samples=2), id="needles"),
        pytest.param(lambda t: Icl.of(IclSpec(shots=4), t, samples=2), id="icl"),
    ],
)
def test_nan_is_no_wrong_answer_of_text(make: Any, tokenizer: Any) -> None:
    task = make(tokenizer)
    for batch in task.batches:
        # a sweep refuses rows that are not finite; a 0 would be "at chance"
        assert not np.isfinite(task.run(only_nan, batch)).any()


@pytest.mark.kind(2, "sweep")
def test_nan_is_no_wrong_answer_of_images(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "cat" / "0.png")
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        image_size=16, patch_size=8, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    )  # fmt: skip
    model: Any = ViTForImageClassification(config)
    loaded = LoadedModel(name="vit", source="vit", model=model.eval(), tokenizer=None, sha256="")
    task = ImageClassification.of(
        ImageClassificationSpec(source=str(tmp_path)), loaded, images=1, batch_size=1
    )
    rows = task.run(lambda images: torch.full((len(images), 2), torch.nan), [0])
    assert not np.isfinite(rows).any()


def test_half_a_surrogate_pair_is_refused_by_line(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(ITEM | {"ctx": "a\ud800"}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"items\.jsonl, line 1"):
        MultipleChoice.of(MultipleChoiceSpec(source=str(path)), tokenizer, text_source="")


def test_nesting_without_end_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(InputError, match=r"items\.jsonl, line 1"):
        read_items(str(path))


def test_a_byte_order_mark_is_no_part_of_the_first_item(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(ITEM) + "\n", encoding="utf-8-sig")
    assert [item.ctx for item in read_items(str(path))] == [ITEM["ctx"]]
