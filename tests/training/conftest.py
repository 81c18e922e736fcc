"""A pair that is trained in a second or two, and what it came to without an interruption."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import AutoTokenizer

from quantkit.jobs import PairSpec, TrainJob
from quantkit.training.corpus import Corpus, prepare_corpus
from quantkit.training.loop import ArmTraining
from quantkit.training.measure import Gauge

PAIR = """\
schema = "quantkit.pair/1"
name = "tiny"
arms = [{arms}]
seeds = [{seeds}]
[sizes]
layers = 1
width = 96
heads = 6
vocabulary = 400
context = 32
[training]
steps = 24
batch = 4
warmup_steps = 4
autocast = "none"
{training}
[records]
checkpoint_every = 8
curves_every = 4
measure_every = 12
measure_rows = 6
measure_items = 0
measure_bits = [4]
[data]
held_out = 0.2
[[text]]
source = "{text}"
"""


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short texts."""
    folder = tmp_path_factory.mktemp("prose") / "text"
    folder.mkdir()
    for number, text in enumerate(list(pydoc_data.topics.topics.values())[:24]):
        (folder / f"{number:02}.txt").write_text(str(text)[:2000], encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def write_pair(prose: Path) -> Callable[..., Path]:
    """Writes PAIR.toml: (folder, arms, seeds, further lines of [training], changed lines)."""

    def write(
        folder: Path,
        *,
        arms: tuple[str, ...] = ("baseline", "diff"),
        seeds: str = "0",
        training: str = "",
        changed: dict[str, str] | None = None,
    ) -> Path:
        quoted = ", ".join(f'"{arm}"' for arm in arms)
        text = PAIR.format(arms=quoted, seeds=seeds, training=training, text=prose)
        for before, after in (changed or {}).items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        path = folder / "tiny.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, write_pair: Callable[..., Path]) -> Path:
    """The folder of a finished run that nobody interrupted."""
    from quantkit.pipelines import run_train

    folder = tmp_path_factory.mktemp("whole")
    pair = PairSpec.read(write_pair(folder))
    return run_train(TrainJob(pair=pair, out=str(folder / "out")))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, write_pair: Callable[..., Path]) -> Any:
    """Reads a pair of the sizes above, with the changes that `write_pair` takes."""

    def read(**changes: Any) -> PairSpec:
        return PairSpec.read(write_pair(tmp_path_factory.mktemp("pair"), **changes))

    return read


@pytest.fixture(scope="session")
def short(tiny: Any) -> Any:
    """The tiny pair, 4 steps, a checkpoint after every second: (arms, changes of [training])."""

    def read(arms: tuple[str, ...] = ("baseline", "diff"), **training: Any) -> PairSpec:
        pair: PairSpec = tiny(arms=arms)
        values = {"steps": 4, "warmup_steps": 1} | training
        records = replace(pair.records, checkpoint_every=2, measure_every=100)
        return replace(pair, training=replace(pair.training, **values), records=records)

    return read


@pytest.fixture(scope="session")
def corpus_of(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Corpus:
    """The rows of the tiny pair, whichever its arms and steps."""
    folder = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(tiny(), folder, cache=folder / "cache")


@pytest.fixture(scope="session")
def train_arm(corpus_of: Corpus, tiny: Any) -> Callable[..., ArmTraining]:
    """Trains one arm in a folder: (pair, arm, folder, seed, until); measured on one row."""
    pair = tiny()
    gauge = Gauge(
        replace(pair, records=replace(pair.records, measure_rows=1, measure_bits=())),
        corpus_of.held_out,
        AutoTokenizer.from_pretrained(corpus_of.tokenizer),
    )

    def train(
        pair: PairSpec, arm: str, folder: Path, *, seed: int = 0, until: int | None = None
    ) -> ArmTraining:
        """Trains; to `until`, as if it had been killed there."""
        folder.mkdir(exist_ok=True)
        training = ArmTraining(pair, arm, seed, corpus_of, folder, Accelerator(cpu=True))

        def stop(_what: str, done: int, _total: int) -> None:
            if done == until:
                raise KeyboardInterrupt

        try:
            training.run(gauge, lambda: None, stop)
        except KeyboardInterrupt:
            assert until is not None
        return training

    return train
