"""Padding that cannot be mapped and tensors without a batch dimension are said, not guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.probes import Activation, attach

BATCH, TOKENS, WIDTH = 2, 5, 8
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


class Model(nn.Module):
    """Runs its one linear on what `shape` makes of its input."""

    def __init__(self, shape: Any, name: str = "up") -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleDict({name: nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
        self.name = name

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Tensor:
        out: Tensor = self.layers[self.name][0](self.shape(x))
        return out


def seen(model: Model, mask: Tensor | None = MASK, **rest: Any) -> tuple[Activation, list[str]]:
    visits: list[Activation] = []
    with attach(model, {"linear_input": visits.append}) as attachment:
        for _ in range(2):
            model(torch.randn(BATCH, TOKENS, WIDTH), attention_mask=mask, **rest)
    return visits[0], attachment.notes


def test_a_flattened_batch_is_cut_into_its_sequences() -> None:
    visit, notes = seen(Model(lambda x: x.flatten(0, 1)))
    assert visit.tensor.shape == (BATCH, TOKENS, WIDTH)
    assert torch.equal(visit.real, MASK.bool())
    assert notes == []


def test_what_replaces_a_flattened_batch_has_its_shape() -> None:
    model = Model(lambda x: x.flatten(0, 1))
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with attach(model, {"linear_input": lambda visit: 2 * visit.tensor}):
        replaced = model(x)
    torch.testing.assert_close(replaced, model(2 * x))


def test_other_tokens_without_a_batch_are_one_sequence_and_said_once() -> None:
    visit, notes = seen(Model(lambda x: x.flatten(0, 1)[:7]), None)
    assert visit.tensor.shape == (1, 7, WIDTH) and bool(visit.real.all())
    (note,) = notes
    assert note.startswith("linear_input of layers.up.* ")
    assert "one sequence per forward" in note and "depend on the batch" in note


def test_all_tokens_of_an_expert_are_no_batch() -> None:
    """They are in the router's order."""
    visit, notes = seen(Model(lambda x: x.flatten(0, 1), "experts"), None)
    assert visit.tensor.shape == (1, BATCH * TOKENS, WIDTH) and len(notes) == 1


@pytest.mark.kind(1, "probes")
def test_padding_that_does_not_fit_is_said_once() -> None:
    visit, notes = seen(Model(lambda x: x[:, ::2]))
    assert bool(visit.real.all())
    (note,) = notes
    assert "linear_input of layers.up.*" in note and "than the padding mask" in note
    assert seen(Model(lambda x: x[:, ::2]), torch.ones_like(MASK))[1] == []


@pytest.mark.kind(1, "probes")
def test_images_of_tokens_take_a_mask_that_fits() -> None:
    shape = (BATCH, TOKENS, 1, WIDTH)
    visit, notes = seen(Model(lambda x: x.reshape(shape)))
    assert visit.tensor.shape == (BATCH, TOKENS, WIDTH) and notes == []
    assert torch.equal(visit.real, MASK.bool())
    _, notes = seen(Model(lambda x: x.unflatten(1, (1, TOKENS)).repeat(1, 3, 1, 1)))
    assert len(notes) == 1


@pytest.mark.kind(1, "probes")
def test_what_a_decoder_reads_of_its_encoder_has_the_encoders_padding() -> None:
    memory = torch.tensor([[1, 1, 0], [1, 1, 1]])
    visit, notes = seen(Model(lambda x: x[:, :3]), encoder_attention_mask=memory)
    assert torch.equal(visit.real, memory.bool()) and notes == []
