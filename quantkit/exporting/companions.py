"""What lies beside a graph, so that a folder is all a client needs.

* `config.json`, `generation_config.json`, the tokenizer and the preprocessor, as transformers reads
  them: `AutoConfig` and `AutoTokenizer` of versions 4 and 5, and optimum-onnx's loaders;
* in `export.json`, the entry by which `transformers.exporters.ExportedModel.from_pretrained` finds
  the graph and its own runner knows what comes out.

Nothing here depends on the machine or the day: paths and revisions are left out.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
from torch.utils import _pytree

from quantkit.errors import InputError
from quantkit.exporting.graphs import load_graph
from quantkit.models import LoadedModel
from quantkit.results import Component, ComponentMetadata

_OF_PREPROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_LEFT_OUT: Final = (
    "_name_or_path",
    "name_or_path",
    "_model_name_or_path",
    "_commit_hash",
    "_from_model_config",
    "_attn_implementation",
    "is_local",
    "local_files_only",
    "quantization_config",
)
"""Where a file came from, how it was loaded, and how its checkpoint was quantized."""
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_FAST_TOKENIZER: Final = "PreTrainedTokenizerFast"
"""What transformers 4 and 5 both call a tokenizer that is all in tokenizer.json."""
_DTYPES: Final = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def save_companions(loaded: LoadedModel, folder: Path) -> tuple[str, ...]:
    """Writes what the model has of config, generation config, tokenizer and preprocessor.

    Each file is written aside and moved. What a model lacks is left out: a timm model has no
    config, an encoder no generation config.

    Returns:
        The names of the files, sorted.

    Raises:
        InputError: the folder cannot be written to.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
            path = Path(aside)
            if callable(getattr(getattr(model, "config", None), "to_json_string", None)):
                _write_config(model, path)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)
            for name in _OF_PREPROCESSORS:
                if loaded.folder is not None and (loaded.folder / name).is_file():
                    shutil.copyfile(loaded.folder / name, path / name)
            for file in path.glob("*.json"):
                if file.name != "tokenizer.json":
                    _rewrite(file, _for_any_version if file.name == _TOKENIZER_CONFIG else _cleaned)
            names = sorted(file.name for file in path.iterdir())
            for name in names:
                os.replace(path / name, folder / name)
    except OSError as error:
        raise InputError(
            f"cannot write config and tokenizer to {folder}: {error.strerror or error}."
        ) from error
    return tuple(names)


def _write_config(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        # not its save_pretrained, which refuses the contradictions that some checkpoints carry
        text = generation.to_json_string(keys_to_pop=["compile_config"])
        (folder / "generation_config.json").write_text(text, encoding="utf-8")


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    plain = json.loads(file.read_text(encoding="utf-8"))
    text = json.dumps(change(plain), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _cleaned(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the data without what names a place, at any depth."""
    return {
        key: _cleaned(value) if isinstance(value, dict) else value
        for key, value in plain.items()
        if key not in _LEFT_OUT
    }


def _for_any_version(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer's config by names that transformers 4 knows, and 5 still reads."""
    found = _cleaned(plain)
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = _FAST_TOKENIZER
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    return found


def component(path: Path, architecture: str) -> Component:
    """Returns what transformers' `ExportedModel.from_pretrained` has to know of a graph.

    Its runner takes inputs by name, where `past_key_values.0.key` is
    `past_key_values={"0": {"key": ...}}`, and gives a dict in which a decoder's grown cache stands
    under `past_key_values` in that same form: what one call returns is what the next one takes.

    Args:
        architecture: Class of the model, e.g. `LlamaForCausalLM`.

    Raises:
        InputError: no such file.
    """
    graph = load_graph(path).graph
    inputs = [str(value.name) for value in graph.inputs if value.name not in graph.initializers]
    outputs = [str(value.name) for value in graph.outputs]
    floats = [value.dtype for value in graph.outputs if value.dtype in _DTYPES]
    return Component(
        file=path.name,
        metadata=ComponentMetadata(
            architecture=architecture,
            export_dtype=_DTYPES[floats[0]] if floats and floats[0] is not None else "float32",
            kwargs={name: {} for name in dict.fromkeys(each.split(".")[0] for each in inputs)},
            out_spec=_pytree.treespec_dumps(_pytree.tree_structure(_nested(outputs))),
        ),
    )


def _nested(names: Sequence[str]) -> dict[str, Any]:
    """Returns the outputs in dicts, whose leaves are in the order of the graph's.

    Flat, by their full names, where dots mean something else.
    """
    flat: dict[str, Any] = dict(zip(names, range(len(names)), strict=True))
    found: dict[str, Any] = {}
    for name, index in flat.items():
        *path, last = _renamed(name).split(".")
        place: Any = found
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                return flat
        place[last] = index
    return found if _pytree.tree_leaves(found) == list(flat.values()) else flat


def _renamed(name: str) -> str:
    head, dot, rest = name.partition(".")
    return f"past_key_values.{rest}" if dot and head == "present" else name
