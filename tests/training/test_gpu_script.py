"""The prepared GPU run: larger pairs of the shipped recipe, time for each arm, and going on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from quantkit.jobs import PairSpec
from quantkit.training.arms import require_matched

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
MIB = 1 << 20
PYTHON = """\
#!{python}
# stands for python: "trains" an arm for TAKES_arm seconds, and notes what it found
import hashlib, os, signal, sys, time
from pathlib import Path

arguments = sys.argv[1:]
if arguments[0] == "-c":
    os.execv({python!r}, [{python!r}, *arguments])
said = " ".join(arguments[2:])
code = 0
if arguments[2] == "train":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, arm = (arguments[arguments.index(name) + 1] for name in ("--out", "--arm"))
    Path(out, "data").mkdir(exist_ok=True)
    Path(out, "data", "train.npy").write_text("rows")
    checkpoint = Path(out, arm + "-seed0", "checkpoint.pt")
    checkpoint.parent.mkdir(exist_ok=True)
    if checkpoint.exists():
        said += " " + hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    else:
        checkpoint.write_bytes(os.urandom(int(os.environ["SIZE"])))
    try:
        time.sleep(float(os.environ["TAKES_" + arm]))
    except KeyboardInterrupt:
        code = 130
with open(os.environ["LOG"], "a") as log:
    print(code, said, file=log)
sys.exit(code)
"""
TIMEOUT = """\
#!/bin/sh
# notes the seconds, and is the real one
echo "$3" >> "$SHARES"
exec {timeout} "$@"
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, list[str], list[int]]]:
    """Runs the script with a stand-in for python: (seconds, baseline_s, diff_s, bytes).

    Returns its exit code, the lines of the stand-in, and the seconds that each arm was given.
    """
    real = shutil.which("timeout")
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("python", PYTHON.format(python=sys.executable)),
        ("timeout", TIMEOUT.format(timeout=real)),
    ):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(
        seconds: int, *, baseline: float = 0, diff: float = 0, size: int = 9
    ) -> tuple[int, list[str], list[int]]:
        log, shares = tmp_path / "log", tmp_path / "shares"
        log.write_text("")
        shares.write_text("")
        environ = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LOG": str(log),
            "SHARES": str(shares),
            "SIZE": str(size),
            "TAKES_baseline": str(baseline),
            "TAKES_diff": str(diff),
        }
        command = ["bash", GPU / "pair.sh", GPU / "pair-9m.toml", tmp_path / "out", str(seconds)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
        given = [int(share) for share in shares.read_text().split()]
        assert given, done.stderr
        return done.returncode, log.read_text().splitlines(), given

    return run


def trained(arm: str, out: Path, *, code: int = 0) -> str:
    return f"{code} train {GPU / 'pair-9m.toml'} --arm {arm} --device cuda --out {out}"


@pytest.mark.parametrize(("name", "most"), [("pair-9m", 9_000_000), ("pair-30m", 30_000_000)])
def test_the_pairs_are_the_shipped_one_but_larger(name: str, most: int) -> None:
    pair, shipped = PairSpec.read(GPU / f"{name}.toml"), PairSpec.read("pair")
    assert pair.name == name
    assert (pair.data, pair.text, pair.arms) == (shipped.data, shipped.text, shipped.arms)
    lengths = ("steps", "batch", "warmup_steps")
    same = {length: getattr(shipped.training, length) for length in lengths}
    assert replace(pair.training, **same) == shipped.training
    assert pair.sizes.vocabulary == shipped.sizes.vocabulary
    counts = require_matched(pair).values()
    assert 0.85 * most < min(counts) and max(counts) <= most


def test_each_arm_has_half_of_the_seconds(
    run: Callable[..., tuple[int, list[str], list[int]]], tmp_path: Path
) -> None:
    code, lines, shares = run(6, baseline=100, diff=100)
    out = tmp_path / "out"
    assert code == 124
    assert lines == [
        trained("baseline", out, code=130),
        trained("diff", out, code=130),
        f"0 report {out} --out {out}",
    ]
    assert shares[0] == 3 and 1 <= shares[1] <= 3
    assert not (out / "data").exists()


def test_what_one_arm_leaves_is_the_others(
    run: Callable[..., tuple[int, list[str], list[int]]], tmp_path: Path
) -> None:
    code, lines, shares = run(100)
    assert code == 0 and [line.split()[0] for line in lines] == ["0", "0", "0"]
    assert shares[0] == 50 and 60 < shares[1] <= 100


def test_parts_are_of_16_mib_and_are_joined_again(
    run: Callable[..., tuple[int, list[str], list[int]]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(100, size=40 * MIB)[0] == 0
    sizes = {p.relative_to(out).as_posix(): p.stat().st_size for p in out.rglob("*") if p.is_file()}
    assert sizes == {
        f"{arm}-seed0/checkpoint.pt.part-0{part}": size * MIB
        for arm in ("baseline", "diff")
        for part, size in ((0, 16), (1, 16), (2, 8))
    }
    digests = {
        arm: sha256(
            b"".join(path.read_bytes() for path in sorted((out / f"{arm}-seed0").iterdir()))
        ).hexdigest()
        for arm in ("baseline", "diff")
    }

    # a run that was killed while it joined: the file is whole, not all of its parts are gone
    whole = out / "diff-seed0" / "checkpoint.pt"
    whole.write_bytes(b"".join(path.read_bytes() for path in sorted(whole.parent.iterdir())))
    (out / "diff-seed0" / "checkpoint.pt.part-01").unlink()
    code, lines, _ = run(100)
    assert code == 0
    assert lines[:2] == [f"{trained(arm, out)} {digests[arm]}" for arm in ("baseline", "diff")]
    left = sorted(path.name for path in (out / "diff-seed0").iterdir())
    assert left == [f"checkpoint.pt.part-0{part}" for part in range(3)]
