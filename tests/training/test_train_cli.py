"""`quantkit train` in process: what it says and writes, where it goes on, what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.pipelines.train import _alone
from quantkit.results import TrainedModel, TrainingResult, read_json
from quantkit.results.curves import read_curves
from quantkit.training.loop import CHECKPOINT, WEIGHTS, ArmTraining

Write = Callable[..., Path]
LOSS_LINE = re.compile(r"training (\S+), seed (\d+): step (\d+), loss \d+\.\d{3} \(\d+/24\)")
SHORT = {"steps = 24": "steps = 2", "warmup_steps = 4": "warmup_steps = 0"}


@pytest.fixture(autouse=True)
def quiet_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets these where they are not set; here they are undone after the test."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture
def own_interrupt() -> Iterator[None]:
    """Workers of pytest-xdist ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], prog_name="quantkit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: object) -> str:
    """Returns the one line of a command that ends with exit code 2."""
    code, out, err = invoke(*arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert err.splitlines()[-1] == lines[0]
    return lines[0]


def result_of(folder: Path) -> TrainingResult:
    return read_json(folder / "training.json", TrainingResult)


def is_finished(folder: Path) -> bool:
    return bool(json.loads((folder / "run.json").read_text())["finished"])


def same_weights(folder: Path, whole: Path) -> bool:
    names = ("baseline-seed0", "diff-seed0")
    return all(
        (folder / name / WEIGHTS).read_bytes() == (whole / name / WEIGHTS).read_bytes()
        for name in names
    )


@pytest.mark.kind(4, "train", "cli")
def test_ctrl_c_and_the_same_command_goes_on(
    write_pair: Write,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_interrupt: None,
) -> None:
    command = (write_pair(tmp_path), "--out", tmp_path / "out")
    note = ArmTraining._note

    def interrupted(self: ArmTraining, step: int, loss: float) -> None:
        note(self, step, loss)
        if (self.arm, step) == ("diff", 12):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ArmTraining, "_note", interrupted)
    code, out, err = invoke(*command)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1].startswith("interrupted: finished work is kept; the same command")
    models = result_of(tmp_path / "out").models
    done = {model.arm: (model.steps, model.finished) for model in models}
    assert done == {"baseline": (24, True), "diff": (8, False)}
    assert not is_finished(tmp_path / "out")

    monkeypatch.setattr(ArmTraining, "_note", note)
    code, out, err = invoke(*command)
    assert code == 0 and is_finished(tmp_path / "out")
    assert same_weights(tmp_path / "out", whole)
    told = [match.groups() for match in LOSS_LINE.finditer(err)]
    # the baseline was ready; the other one goes on behind its checkpoint at step 8
    assert told == [("diff", "0", step) for step in ("8", "12", "16", "20", "24")]


def test_arms_in_two_commands_that_share_a_folder(
    write_pair: Write, whole: Path, tmp_path: Path
) -> None:
    command = (write_pair(tmp_path), "--out", tmp_path / "out")
    code, _, err = invoke(*command, "--arm", "diff")
    assert code == 0 and err.endswith(f"done: {tmp_path / 'out'}\n")
    assert [(m.arm, m.finished) for m in result_of(tmp_path / "out").models] == [("diff", True)]
    assert not is_finished(tmp_path / "out")
    lines = [match.groups() for match in LOSS_LINE.finditer(err)]
    assert lines == [("diff", "0", str(step)) for step in range(4, 28, 4)]  # one line a point

    assert invoke(*command, "--arm", "baseline", "--quiet") == (0, "", "")
    assert is_finished(tmp_path / "out") and same_weights(tmp_path / "out", whole)
    found, expected = result_of(tmp_path / "out").models, result_of(whole).models
    assert [model.sha256 for model in found] == [model.sha256 for model in expected]
    assert [model.losses for model in found] == [model.losses for model in expected]
    assert [model.measurements for model in found] == [model.measurements for model in expected]

    # finished: nothing is computed again, also where an arm is named
    stamp = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    for more in ((), ("--arm", "diff")):
        code, _, err = invoke(*command, *more)
        assert (code, err) == (0, f"done: {tmp_path / 'out'}\n")
    assert stamp == {p: p.stat().st_mtime_ns for p in stamp}


def test_what_is_written(whole: Path) -> None:
    plain = json.loads((whole / "training.json").read_text())
    assert next(iter(plain)) == "schema" and plain["schema"] == "quantkit.training/1"
    result = result_of(whole)
    assert result.pair["sizes.width"] == "96" and result.pair["arms"] == "baseline, diff"
    assert result.processes == 1 and {"torch", "transformers"} <= result.environment.keys()
    assert result.corpus.rows == result.corpus.text_rows > 0
    for model in result.models:
        assert model.tokens == 24 * 4 * 32 and model.seconds > 0
        assert model.tokens_per_second == pytest.approx(model.tokens / model.seconds)
        assert [point.step for point in model.losses] == [4, 8, 12, 16, 20, 24]
        assert [measured.step for measured in model.measurements] == [0, 12, 24]
        assert [measured.tokens for measured in model.measurements] == [0, 1536, 3072]
        assert model.measurements[0].loss == pytest.approx(5.99, abs=0.2)  # ln 400
        assert all(measured.quantized_loss.keys() for measured in model.measurements)
        folder = whole / model.folder
        assert read_json(folder / "model.json", TrainedModel) == model
        curves = read_curves(folder / "curves.jsonl")
        assert [line.step for line in curves.steps] == [4, 8, 12, 16, 20, 24]
        assert curves.header.name == f"{model.arm}-0"
        for name in ("config.json", "tokenizer.json", WEIGHTS):
            assert (folder / name).stat().st_mode == (folder / "model.json").stat().st_mode
    one, other = (read_json(whole / m.folder / "model.json", TrainedModel) for m in result.models)
    assert one.parameters != other.parameters and one.sha256 != other.sha256
    assert not list(whole.rglob(".*"))


def test_the_result_is_shown_and_reported(whole: Path) -> None:
    code, out, err = invoke(whole.parent / "tiny.toml", "--out", whole)
    assert (code, err) == (0, f"done: {whole}\n")
    assert "baseline" in out and "diff" in out
    assert invoke(whole.parent / "tiny.toml", "--out", whole, "--quiet") == (0, "", "")
    code, out, err = invoke(whole.parent / "tiny.toml", "--out", whole, "--json", "--quiet")
    assert (code, err) == (0, "") and json.loads(out)["name"] == "tiny"


def test_quantkit_report_takes_the_folder(whole: Path, tmp_path: Path) -> None:
    arguments = ["report", str(whole), "--out", str(tmp_path / "report")]
    result = CliRunner().invoke(app, arguments, prog_name="quantkit")
    assert result.exit_code == 0, result.output
    for name in ("report.html", "report.md"):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert "baseline" in text and "diff" in text and "oss" in text


def test_another_pair_in_the_same_folder(write_pair: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke(write_pair(tmp_path, changed=SHORT), "--out", out, "--quiet")[0] == 0
    (out / "notes.txt").write_text("mine")
    wider = {"width = 96": "width = 108", "vocabulary = 400": "vocabulary = 420"}
    other = write_pair(tmp_path, changed=SHORT | wider)
    assert "holds another run (train, config" in refused(other, "--out", out)
    assert len(result_of(out).models) == 2  # nothing was touched

    said = refused(other, "--out", out, "--force", "--arm", "diff")
    assert "--force with --arm would also remove the arms that are not named" in said
    assert len(result_of(out).models) == 2

    wider['arms = ["baseline", "diff"]'] = 'arms = ["diff"]'
    other = write_pair(tmp_path, changed=SHORT | wider)
    code, _, err = invoke(other, "--out", out, "--force")
    assert code == 0, err
    result = result_of(out)
    assert result.pair["sizes.width"] == "108" and result.corpus.vocabulary == 420
    assert [model.arm for model in result.models] == ["diff"]
    assert not (out / "baseline-seed0").exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_a_loss_that_is_no_number(write_pair: Write, tmp_path: Path) -> None:
    wild = {"checkpoint_every = 8": "checkpoint_every = 1", "warmup_steps = 4": "warmup_steps = 0"}
    path = write_pair(tmp_path, training="learning_rate = 1e12", changed=wild)
    said = refused(path, "--out", tmp_path / "out")
    what = re.search(
        r"training baseline, seed 0: at step (\d+) the (loss is|gradient has a norm of) (nan|inf)",
        said,
    )
    assert "lower learning_rate" in said
    model = result_of(tmp_path / "out").models[0]
    assert (tmp_path / "out" / "baseline-seed0" / CHECKPOINT).is_file()
    assert what and not model.finished and int(what[1]) == model.steps + 1
    assert refused(path, "--out", tmp_path / "out") == said  # from the checkpoint: the same


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The finished run in a folder of its own, which does not say that it is finished."""
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out" / "training.json").unlink()
    for checkpoint in (tmp_path / "out").glob(f"*/{CHECKPOINT}"):
        checkpoint.unlink()
    return tmp_path / "out"


def test_a_finished_arm_is_not_trained_again_without_its_checkpoint(
    write_pair: Write, whole: Path, copy: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in copy.glob("*-seed0/*")}
    for arm in ("diff", "baseline"):
        code, _, err = invoke(write_pair(tmp_path), "--out", copy, "--arm", arm)
        assert code == 0 and not LOSS_LINE.search(err), err
    assert {path: path.read_bytes() for path in copy.glob("*-seed0/*")} == before
    assert result_of(copy).models == result_of(whole).models
    assert is_finished(copy)


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_an_arm_whose_weights_are_not_its_own_is_trained(
    damage: str, write_pair: Write, whole: Path, copy: Path, tmp_path: Path
) -> None:
    weights = copy / "diff-seed0" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-2] + b"\x12\x34")
    if damage == "gone":
        weights.unlink()
    code, _, err = invoke(write_pair(tmp_path), "--out", copy)
    assert code == 0, err
    assert {match[1] for match in LOSS_LINE.finditer(err)} == {"diff"}
    assert same_weights(copy, whole) and is_finished(copy)


@pytest.mark.kind(9, "train")
def test_a_torn_checkpoint_is_one_line(write_pair: Write, tmp_path: Path) -> None:
    command = (write_pair(tmp_path, changed=SHORT), "--out", tmp_path / "out")
    assert invoke(*command, "--arm", "diff", "--quiet")[0] == 0
    (tmp_path / "out" / "diff-seed0" / CHECKPOINT).write_bytes(b"PK torn")
    assert invoke(*command, "--arm", "diff", "--quiet")[0] == 0  # it is finished
    (tmp_path / "out" / "diff-seed0" / WEIGHTS).unlink()
    assert "Remove it to begin this arm anew" in refused(*command, "--arm", "diff")


@pytest.mark.parametrize(
    ("changed", "arguments", "said"),
    [
        pytest.param({"batch = 4": "batch = 0"}, (), "[training] batch: a whole", id="batch 0"),
        pytest.param({"heads = 6": "heads = 3"}, (), "heads: an even number", id="odd heads"),
        pytest.param({"steps = 24": "stesp = 24"}, (), "Did you mean 'steps'", id="field"),
        pytest.param({}, ("--arm", "dif"), "--arm dif: the pair tiny has baseline", id="arm"),
        pytest.param({}, ("--arm", "diff-v2"), "--arm diff-v2: the pair", id="arm of no use"),
        pytest.param({}, ("--device", "gpu"), "device", id="device"),
        pytest.param({"width = 96": "width = 12"}, (), "parameters and baseline", id="unmatched"),
        pytest.param({"context = 32": "context = 20000"}, (), "no row of 20000", id="long rows"),
    ],
)
def test_what_is_refused(
    changed: dict[str, str],
    arguments: tuple[str, ...],
    said: str,
    write_pair: Write,
    tmp_path: Path,
) -> None:
    path = write_pair(tmp_path, changed=changed)
    assert said in refused(path, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out" / "training.json").exists()


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_text_that_is_none_leaves_no_folder(
    what: str, write_pair: Write, prose: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    if what == "empty":
        text.write_text("")
    said = refused(write_pair(tmp_path, changed={str(prose): str(text)}), "--out", tmp_path / "out")
    assert "text.txt" in said
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "Recipes that ship: pair, seeds" in refused(tmp_path / "non.toml")


def test_one_process_makes_the_rows_of_a_folder(tmp_path: Path) -> None:
    came = threading.Event()

    def wait() -> None:
        with _alone(tmp_path):
            came.set()

    other = threading.Thread(target=wait)
    with _alone(tmp_path):
        other.start()
        assert not came.wait(0.2)
    assert came.wait(20)
    other.join()
    assert not list(tmp_path.iterdir())
