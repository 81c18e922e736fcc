"""The verbs' keywords are the jobs' fields, under the commands' names; what is refused, by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from typer.main import get_command

import quantkit
from quantkit.api import options
from quantkit.api.options import argument_of, job_of, taken
from quantkit.cli import app
from quantkit.errors import InputError
from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    DiagnoseJob,
    ExportJob,
    SensitivityJob,
    StatsJob,
    SweepJob,
    TrainJob,
)
from quantkit.results import Ranges

VERBS: dict[str, tuple[type[Any], type[Any]]] = {
    "stats": (StatsJob, options.StatsOptions),
    "calibrate": (CalibrateJob, options.CalibrateOptions),
    "sensitivity": (SensitivityJob, options.SensitivityOptions),
    "sweep": (SweepJob, options.SweepOptions),
    "export": (ExportJob, options.ExportOptions),
    "diagnose": (DiagnoseJob, options.DiagnoseOptions),
    "compare": (CompareJob, options.CompareOptions),
    "train": (TrainJob, options.TrainOptions),
}
PATHS = {"calib", "eval", "text", "tokenizer"}
RUNS = {"ranges", "keep", "from_run"}


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    found = inspect.signature(getattr(quantkit, verb)).parameters
    return {name: p for name, p in found.items() if p.kind is not p.VAR_KEYWORD}


def wider(field: str, kind: Any) -> Any:
    """What a field's type is as an argument: lists for tuples, one for a list of one, paths."""
    one: Any = str | os.PathLike[str]
    run = one | options.HasFolder
    text = run if field in RUNS else one if field in PATHS else str
    lists: dict[Any, Any] = {
        tuple[str, ...]: text | Sequence[text],  # type: ignore[valid-type]
        tuple[int, ...]: int | Sequence[int],
        tuple[float, ...]: float | Sequence[float],
        str: text,
    }
    for had, has in lists.items():
        if kind == had:
            return has
        if kind == had | None:
            return has | None
    return kind


@pytest.mark.parametrize("verb", VERBS)
def test_the_keywords_are_the_fields_of_the_job(verb: str) -> None:
    job, typed = VERBS[verb]
    own = {"models", "model", "progress", "name"} if verb == "stats" else set(parameters(verb))
    own |= {"data", "out"} if verb == "stats" else {"models"}
    fields = {f: kind for f, kind in get_type_hints(job).items() if f not in own}
    fields = {f: kind for f, kind in fields.items() if f in job.__dataclass_fields__}

    assert get_type_hints(typed) == {argument_of(f): wider(f, k) for f, k in fields.items()}


@pytest.mark.parametrize("verb", VERBS)
def test_the_keywords_are_the_options_of_the_command(verb: str) -> None:
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    shown = {"--config", "--json", "--quiet", "--top", "--dry-run", "--help"}  # how it is shown
    known = [{*p.opts} for p in command.params if p.param_type_name == "option"]
    known = [names for names in known if not names & shown]  # one option, with its other names
    words = {*get_type_hints(VERBS[verb][1]), *parameters(verb)}
    ours = {f"--{'from' if name == 'from_run' else name.replace('_', '-')}" for name in words}

    assert [names for names in known if not names & ours] == []
    extra = {"--model", "--models", "--progress", "--pair", "--float-graph", "--quantized-graph"}
    extra |= {"--name", "--tokenizer"} if verb == "stats" else set()
    extra |= {"--alone-samples"} if verb == "diagnose" else set()  # a number of the job alone
    assert ours - set().union(*known) <= extra


def test_a_default_is_said_by_the_job_alone() -> None:
    for verb in VERBS:
        defaults = {p.default for p in parameters(verb).values() if p.name != "progress"}
        assert defaults <= {inspect.Parameter.empty, None}, verb


@pytest.mark.parametrize(
    ("given", "field", "wanted"),
    [
        pytest.param({"bits": [8, 4]}, "bits", (8, 4), id="a list"),
        pytest.param({"bits": 8}, "bits", (8,), id="a number for a list"),
        pytest.param({"bits": np.array([16, 3])[1]}, "bits", (3,), id="numpy's number"),
        pytest.param({"task": "icl"}, "tasks", ("icl",), id="a word for a list, renamed"),
        pytest.param({"eval": Path("a") / "b"}, "eval", "a/b", id="a path"),
        pytest.param({"calib": None}, "calib", None, id="nothing"),
    ],
)
def test_what_is_given_reaches_the_job(given: dict[str, Any], field: str, wanted: object) -> None:
    samples = {} if "task" not in given else {"calib": "pydoc"}
    job = job_of(SweepJob, "sweep", given | samples, models="m")

    assert job.models == ("m",)
    assert getattr(job, field) == wanted
    assert job.items == SweepJob(models=("m",)).items


def test_a_result_stands_for_its_folder(tmp_path: Path) -> None:
    class Found:
        folder: Path | None = tmp_path

    assert taken("ranges", [Found(), "b"], tuple[str, ...]) == (str(tmp_path), "b")
    Found.folder = None
    with pytest.raises(InputError, match=r"^ranges: expected a string or a path, got <"):
        taken("ranges", Found(), str)
    assert not hasattr(Ranges, "_folder")  # a result says it of itself alone


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a misspelt option": (
        lambda: quantkit.stats("m", seqlen=8),  # type: ignore[call-arg]
        r"^stats has no option 'seqlen'\. Did you mean 'seq_len'\? Available: ",
    ),
    "the field in the place of the option": (
        lambda: quantkit.stats("m", both_readings=True),  # type: ignore[call-arg]
        r"^stats has no option 'both_readings'\.",
    ),
    "a comma string": (
        lambda: quantkit.sweep("m", bits="16,8"),  # type: ignore[arg-type]
        r"^bits: expected a whole number, got '16,8'\.$",
    ),
    "a word for a number": (
        lambda: quantkit.export("m", samples="9"),  # type: ignore[arg-type]
        r"^samples: expected a whole number, got '9'\.$",
    ),
    "a truth for a number": (
        lambda: quantkit.diagnose("a.onnx", "b.onnx", samples=True),
        r"^samples: expected a whole number, got True\.$",
    ),
    "a number for a truth": (
        lambda: quantkit.stats("m", force=1),  # type: ignore[arg-type]
        r"^force: expected True or False, got 1\.$",
    ),
    "what the job refuses": (
        lambda: quantkit.compare("m", granularity="rows"),
        r"^--granularity does not take 'rows'\. Did you mean 'row'\?",
    ),
    "several models where one is taken": (
        lambda: quantkit.export(["a", "b"]),  # type: ignore[arg-type]
        r"^export takes one model, got \['a', 'b'\]\.$",
    ),
    "several models of stats": (
        lambda: quantkit.stats(["a", "b"]),  # type: ignore[arg-type]
        r"^stats takes one model.*For several",
    ),
    "a tokenizer beside a folder": (
        lambda: quantkit.stats("m", tokenizer=object()),
        r"^stats reads tokenizer and name for an nn\.Module alone",
    ),
    "no model and no run": (lambda: quantkit.calibrate(), "^calibrate takes a MODEL"),
    "no runs": (lambda: quantkit.report([]), "^report: no run was given"),
    "no such pair": (lambda: quantkit.train("none.toml"), "none.toml"),
    "an arm that the pair has not": (lambda: quantkit.train("pair", arm="dif"), "^--arm dif:"),
    "a device that there is not": (
        lambda: quantkit.train("pair", device="tpu"), "^--device does not take 'tpu'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_named(case: tuple[Callable[[], object], str], tmp_path: Path) -> None:
    call, said = case
    with pytest.raises(InputError, match=said):
        call()
    assert list(tmp_path.iterdir()) == []  # nothing is left of it
