"""Jobs: checked when made, hashed by configuration, named for their models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    ExportJob,
    StatsJob,
    SweepJob,
    config_hash,
    default_out,
)


def test_the_hash_is_of_the_configuration_alone() -> None:
    job = StatsJob(models=("m",))
    assert config_hash(job) == config_hash(StatsJob(models=("m",), out="elsewhere", force=True))
    for change in ({"models": ("n",)}, {"seq_len": 64}, {"bos": "never"}, {"count_masked": True}):
        assert config_hash(dataclasses.replace(job, **change)) != config_hash(job)
    assert config_hash(job) != config_hash(CalibrateJob(model="m", samples=64))


def test_default_out_names_the_models() -> None:
    job = SweepJob(models=("./a/base/", "org/di ff"))
    assert default_out("sweep", job) == Path(f"reports/sweep-base-di-ff-{config_hash(job)}")
    assert default_out("stats", StatsJob(models=("m",), out="x/y")) == Path("x/y")
    odd = default_out("stats", StatsJob(models=("/..",)))
    assert odd.parent == Path("reports")
    assert odd.name.startswith("stats-model-")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: StatsJob(models=("m",), seq_len=1), "--seq-len", id="seq-len"),
        pytest.param(lambda: StatsJob(models=("m",), samples=0), "--samples", id="samples"),
        pytest.param(lambda: StatsJob(models=("m",), batch_size=-1), "--batch-size", id="batch"),
        pytest.param(lambda: StatsJob(models=("m",), dtype="float3"), "'float32'", id="dtype"),
        pytest.param(lambda: StatsJob(models=("m",), bos="alway"), "'always'", id="bos"),
        pytest.param(lambda: CalibrateJob(model="m", method="minmx"), "'minmax'", id="method"),
        pytest.param(lambda: SweepJob(models=()), "no model", id="models"),
        pytest.param(lambda: SweepJob(models=("m", "m")), "twice", id="twice"),
        pytest.param(lambda: SweepJob(models=("m",), bits=(17,)), "--bits", id="bits"),
        pytest.param(lambda: SweepJob(models=("m",), bits=()), "--bits", id="no bits"),
        pytest.param(lambda: SweepJob(models=("m",), granularity=("heads",)), "'head'", id="gran"),
        pytest.param(lambda: ExportJob(model="m", recipe="w8b8"), "Did you mean", id="recipe"),
        pytest.param(lambda: ExportJob(model="m", attention_bits=5), "--attention-bits", id="ab"),
        pytest.param(lambda: ExportJob(model="m", opset=13), "--opset", id="opset"),
        pytest.param(
            lambda: ExportJob(model="m", recipe="logits4", attention_bits=8), "already", id="both"
        ),
        pytest.param(lambda: CompareJob(models=("m",), eval_samples=0), "--eval", id="eval"),
        pytest.param(
            lambda: ExportJob(model="m", recipe="logits6:asymmetric"), "symmetric", id="dynamic"
        ),
        pytest.param(lambda: ExportJob(model="m", dtype="bfloat16"), "float32", id="dtype"),
        pytest.param(lambda: StatsJob(models=("m",), device="cuda"), "--device", id="device"),
    ],
)
def test_a_wrong_job_is_not_made(make: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()  # type: ignore[operator]


def test_attention_bits_enter_the_recipe() -> None:
    assert str(ExportJob(model="m").full_recipe) == "w8a8"
    eight = ExportJob(model="m", attention_bits=8)
    assert str(eight.full_recipe) == "w8a8+logits8:head:static"
    static = ExportJob(model="m", recipe="logits6:tensor:static")
    assert str(static.full_recipe) == "logits6:tensor:static"
