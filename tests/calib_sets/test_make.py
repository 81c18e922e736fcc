"""Making sets, and what `verify` says once something changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quantkit.calib_sets.check import verified
from quantkit.calib_sets.find import named_set
from quantkit.calib_sets.make import SetRequest, make_set
from quantkit.errors import InputError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(source: str, name: str = "mine", **options: Any) -> tuple[Any, list[str]]:
    """Returns the manifest of a new set and its documents."""
    make_set(SetRequest(name=name, source=source, **options))
    found = named_set(name)
    return found.manifest, list(verified(found)[0].documents)


def texts(count: int = 6) -> dict[str, str]:
    Path("texts").mkdir()
    documents = {f"{index}.txt": f"document {index}\n" for index in range(count)}
    for name, text in documents.items():
        Path("texts", name).write_text(text)
    return documents


def sha(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def test_a_text_file_is_cut_into_blocks() -> None:
    Path("a.txt").write_bytes("naïve\r\ntext".encode())

    manifest, documents = made("a.txt", licence="CC0-1.0", description="Mine.")

    assert documents == ["naïve\ntext"]
    assert (manifest.kind, manifest.cut, manifest.samples) == ("text", "blocks", 1)
    assert (manifest.licence, manifest.description) == ("CC0-1.0", "Mine.")
    assert manifest.sha256 == sha("naïve\ntext")
    assert manifest.files == {"../../a.txt": sha("naïve\r\ntext")}
    assert manifest.bytes == len("naïve\ntext".encode())


def test_a_folder_of_texts_is_one_sample_a_document() -> None:
    documents = texts()

    manifest, found = made("texts/")

    assert found == list(documents.values())
    assert (manifest.cut, manifest.samples, manifest.drawn) == ("documents", 6, False)
    assert manifest.files == {f"../../texts/{n}": sha(text) for n, text in documents.items()}
    assert manifest.sha256 == sha("\0".join(documents.values()))


def test_a_draw_depends_on_its_seed_alone() -> None:
    documents = texts(20)

    _, one = made("texts", "a", samples=5, seed=1)
    _, again = made("texts", "b", samples=5, seed=1)
    _, other = made("texts", "c", samples=5, seed=2)
    _, more = made("texts", "d", samples=8, seed=1)

    assert one == again != other
    assert len(set(one)) == 5 and set(one) < set(documents.values())
    assert more[:5] == one
    order = sorted(range(20), key=lambda index: sha(f"1 {index}"))
    names = sorted(documents)
    assert one == [documents[names[index]] for index in order[:5]]


def test_more_than_there_are() -> None:
    texts()

    with pytest.raises(InputError, match="holds 6 samples: expected 7"):
        made("texts", samples=7)
    assert not Path("calib").exists()


def test_a_jsonl_by_its_field() -> None:
    Path("a.jsonl").write_text('{"body": "one", "text": "no"}\n{"body": "two"}\n')

    manifest, documents = made("a.jsonl#body")

    assert documents == ["one", "two"]
    assert (manifest.source.field, manifest.cut) == ("body", "documents")


def test_an_absolute_path_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")

    manifest, _ = made(str(path))

    assert manifest.source.names == (str(path),)
    assert manifest.files == {str(path): sha("text")}


def test_a_relative_path_goes_with_the_folders(tmp_path: Path, monkeypatch: Any) -> None:
    texts()
    made("texts", samples=2)
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-moved")
    monkeypatch.chdir(tmp_path.parent / f"{tmp_path.name}-moved")

    assert len(verified(named_set("mine"))[0].documents) == 2


def test_modules_and_packages() -> None:
    import bisect

    code, documents = made("module:bisect", "code")
    assert documents == [Path(bisect.__file__).read_text()]
    assert (code.cut, list(code.python.values())) == ("blocks", [code.sha256])

    package, documents = made("package:numpy/__init__.py", "package")
    assert documents == [Path(np.__file__).read_text()]
    assert (package.cut, package.python) == ("blocks", {})
    assert list(package.files) == ["numpy/__init__.py"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("module:no_such_module", "no module 'no_such_module'"),
        ("module:ast#nothing", "ast.nothing is NoneType"),
        ("module:sys", "no source code"),
        ("package:no_such_package/x", "no package 'no_such_package'"),
        ("package:numpy/no/such", "no such file or folder"),
        ("generator:retrieva", "Did you mean 'retrieval'"),
        ("generator:retrieval?needle=4", "no parameter 'needle'. Did you mean 'needles'"),
        ("generator:shapes?size=4", "no parameter 'size'. It takes none"),
        ("generator:retrieval?needles=0", "1 to 75 needles"),
        ("nowhere", "nowhere: no such file or folder"),
        ("", "the source is empty"),
        ("empty.txt", "is empty: expected text"),
        ("empty", "holds no file of text"),
        ("bad.txt", "is not UTF-8"),
        ("bad.npz", "cannot be read as numpy arrays"),
        ("nan.npz", r"x holds 1 NaN or inf"),
        ("words.npz", "words holds <U3"),
        ("zero.png", r"zero\.png is empty \(0 bytes\)"),
        ("broken.png", r"broken\.png cannot be read"),
        ("norows.npy", "holds no sample"),
    ],
)
def test_a_source_that_cannot_be_used(source: str, said: str) -> None:
    Path("empty").mkdir()
    Path("empty.txt").write_text(" \n")
    Path("bad.txt").write_bytes(b"a\xff")
    Path("bad.npz").write_bytes(b"PK\x03\x04 no zip")
    np.savez("nan.npz", x=np.array([1.0, np.nan]))
    np.savez("words.npz", words=np.array(["abc"]))
    np.save("norows.npy", np.zeros((0, 3)))
    Path("zero.png").write_bytes(b"")
    Path("broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")

    with pytest.raises(InputError, match=said) as error:
        made(source)

    assert "\n" not in str(error.value)
    assert not Path("calib").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "txt"}, "Did you mean 'text'"),
        ({"samples": 0}, "--samples takes 1 or more"),
        ({"seed": -1}, "--seed and --vocab-size"),
        ({"name": "A b"}, "expected a name"),
        ({"name": "pydoc"}, "pydoc is the name of a shipped set"),
        ({"vocab_size": 4}, "has no tokens"),
        ({"kind": "images"}, r"image \S*a\.txt cannot be read"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    Path("a.txt").write_text("text")

    with pytest.raises(InputError, match=said):
        make_set(SetRequest(**{"name": "mine", "source": "a.txt"} | options))


def test_nothing_is_overwritten_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("first")
    Path("b.txt").write_text("second")
    made("a.txt")

    with pytest.raises(InputError, match=r"calib/mine is there already.*--force"):
        made("b.txt")
    with pytest.raises(InputError, match="nowhere"):
        made("nowhere", force=True)
    assert verified(named_set("mine"))[0].documents == ("first",)
    # something breaks while the new one is written
    with monkeypatch.context() as patched:
        patched.setattr("quantkit.calib_sets.make.manifest_text", lambda _m: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made("b.txt", force=True)
    assert [path.name for path in Path("calib").iterdir()] == ["mine"]
    assert verified(named_set("mine"))[0].documents == ("first",)


def test_force_replaces_all_of_it() -> None:
    Path("a.txt").write_text("first")
    Path("b.txt").write_text("second")
    made("a.txt", copy=True)

    _, documents = made("b.txt", force=True)

    assert documents == ["second"]
    assert [path.name for path in Path("calib").iterdir()] == ["mine"]
    assert [path.name for path in Path("calib/mine").iterdir()] == ["manifest.toml"]


@pytest.mark.parametrize("source", ["texts", "module:bisect", "generator:retrieval?sentences=3"])
def test_a_copy_needs_its_source_no_more(source: str) -> None:
    texts()
    original, documents = made(source, "original", samples=None if "module" in source else 4)

    copied, same = made(source, "copy", samples=None if "module" in source else 4, copy=True)
    shutil.rmtree("texts")

    assert same == documents == list(verified(named_set("copy"))[0].documents)
    assert (copied.sha256, copied.cut) == (original.sha256, original.cut)
    assert copied.copied_from.startswith(source)
    assert list(copied.files) == ["samples.jsonl"]
    rows = [json.loads(line) for line in Path("calib/copy/samples.jsonl").read_text().splitlines()]
    assert rows == [{"text": text} for text in documents]


def test_a_copy_of_images_keeps_their_folders() -> None:
    for name in ("a/1.png", "b/1.png", "b/2.png"):
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (len(name), 2, 3)).save(Path("photos", name))

    drawn, _ = made("photos", "drawn", samples=2)
    copied, _ = made("photos", "copy", copy=True)
    shutil.rmtree("photos")

    assert (drawn.kind, drawn.samples, len(drawn.files), drawn.drawn) == ("images", 2, 2, True)
    assert sorted(copied.files) == ["files/a/1.png", "files/b/1.png", "files/b/2.png"]
    verified(named_set("copy"))
    with pytest.raises(InputError, match="photos"):
        verified(named_set("drawn"))


def test_a_source_inside_the_set_is_not_lost() -> None:
    Path("calib/mine").mkdir(parents=True)
    Path("calib/mine/a.txt").write_text("precious")

    with pytest.raises(InputError, match="lies in the folder of the set"):
        made("calib/mine/a.txt", force=True)
    assert Path("calib/mine/a.txt").read_text() == "precious"
    _, documents = made("calib/mine/a.txt", force=True, copy=True)
    assert documents == ["precious"]


def change(path: str, text: str | None) -> None:
    Path(path).unlink() if text is None else Path(path).write_text(text)


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("texts/3.txt", "other", r"mine: \S*texts/3\.txt changed"),
        ("texts/3.txt", None, r"mine: \S*texts/3\.txt is missing"),
        ("texts/new.txt", "new", r"mine: \S*texts/new\.txt was added"),
    ],
)
@pytest.mark.parametrize("samples", [None, 2])
def test_what_changed_is_named(path: str, text: str | None, said: str, samples: int | None) -> None:
    texts()
    made("texts", samples=samples)

    change(path, text)

    with pytest.raises(InputError, match=said) as error:
        verified(named_set("mine"))
    assert str(error.value).count(".txt") == 1


def test_many_changes_are_counted() -> None:
    texts(9)
    made("texts")
    for index in range(9):
        change(f"texts/{index}.txt", "other")

    with pytest.raises(InputError, match=r"0\.txt changed, .*2\.txt changed and 6 more"):
        verified(named_set("mine"))


@pytest.mark.kind(8, "calib_sets")
def test_a_manifest_whose_hashes_do_not_fit_together() -> None:
    texts()
    manifest, _ = made("texts")
    path = Path("calib/mine/manifest.toml")
    path.write_text(path.read_text().replace(manifest.sha256, "1" * 64))

    with pytest.raises(InputError, match="other content than its manifest says"):
        verified(named_set("mine"))


class FakeDatasets(types.ModuleType):
    """Stands in for the package `datasets`: knows one set, and remembers what was asked for."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.rows: Any = ["first", "second", "third"]
        self.asked: Any = None

    def load_dataset(self, name: str, config: str | None = None, *, split: str) -> Any:
        self.asked = (name, config, split)
        if name != "org/set":
            raise ConnectionError(f"Couldn't reach {name!r} on the hub\nsecond line")
        return FakeRows(self.rows)


class FakeRows:
    column_names = ("body", "id")

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __getitem__(self, column: str) -> list[Any]:
        assert column == "body"
        return self.rows


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> FakeDatasets:
    module = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_data_set_by_its_id(datasets: FakeDatasets) -> None:
    manifest, documents = made("datasets:org/set:small/train#body", copy=True)

    assert documents == ["first", "second", "third"]
    assert datasets.asked == ("org/set", "small", "train")
    assert manifest.copied_from == "datasets:org/set:small/train#body"

    linked, _ = made("datasets:org/set/train#body", "linked")
    assert datasets.asked == ("org/set", None, "train")
    assert linked.source.split == "train"
    datasets.rows = ["first", "other", "third"]
    with pytest.raises(InputError, match="datasets:org/set/train#body holds other content"):
        verified(named_set("linked"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("datasets:org/none/train#body", "cannot be loaded: Couldn't reach 'org/none' on the hub$"),
        ("datasets:org/set/train", "no column 'text'; expected one of body, id"),
    ],
)
def test_a_data_set_that_cannot_be_had(datasets: FakeDatasets, source: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        made(source)


def test_a_column_that_holds_no_text(datasets: FakeDatasets) -> None:
    datasets.rows = ["a", None]

    with pytest.raises(InputError, match="row 1 holds NoneType"):
        made("datasets:org/set/train#body")


def test_the_package_datasets_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(InputError, match="pip install datasets"):
        made("datasets:org/set/train#body")


def test_listing_and_verifying_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from quantkit.calib_sets.find import all_sets\n"
        "from quantkit.calib_sets.check import verified\n"
        "import quantkit.calib_sets.make\n"
        "for found in all_sets(): verified(found)\n"
        "print('torch' in sys.modules, len(all_sets()))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )

    assert done.stdout.split() == ["False", "5"]
