"""What each process of a test runs: `python worker.py FOLDER`, with RANK and WORLD_SIZE set.

Writes FOLDER/said-RANK.json, and at the first process the results of each case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError, ProbeError
from quantkit.models import LoadedModel
from quantkit.outliers import collect
from quantkit.processes import Processes, joined
from quantkit.results import write_json

LENGTHS = (20, 7, 16, 3, 20, 11, 5, 20, 9, 13)
NAN_TOKEN = 60
SEED = 4
NAN_SEQUENCE = 2
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "diffllama": (DiffLlamaForCausalLM, DiffLlamaConfig, {}),
    "nan": (LlamaForCausalLM, LlamaConfig, {}),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 1},
    ),
}
CASES = {
    # five batches; a rank without data; NaN in the second batch alone
    "llama": ("llama", LENGTHS, {}),
    "diffllama": ("diffllama", LENGTHS, {"rows": 8}),
    "one batch": ("llama", LENGTHS[:2], {}),
    "nan": ("nan", LENGTHS, {}),
    "mixtral": ("mixtral", LENGTHS, {"points": ("mlp_down_input",)}),
}


def make(kind: str) -> LoadedModel:
    """A tiny random model."""
    model_class, config_class, changes = KINDS[kind]
    torch.manual_seed(SEED)
    model = model_class(config_class(**SIZES | changes)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
        if kind == "nan":
            model.model.embed_tokens.weight[NAN_TOKEN] = torch.nan
    return LoadedModel(name=kind, source="test", model=model, tokenizer=None, sha256="0" * 64)


def rows(kind: str, lengths: tuple[int, ...]) -> TokenSlice:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(0, NAN_TOKEN, (length,), generator=generator) for length in lengths]
    if kind == "nan":
        ids[NAN_SEQUENCE][5] = NAN_TOKEN
    if kind == "mixtral":  # one token a sequence, and so few experts
        ids = [torch.full_like(row, int(row[0])) for row in ids]
    return TokenSlice(
        source="test", source_sha256="0" * 64, ids=tuple(ids), seq_len=20, skip=0, bos="never"
    )


def measured(case: str, processes: Processes) -> Any:
    """The statistics of one case; None at all processes but the first."""
    kind, lengths, options = CASES[case]
    return collect(make(kind), rows(kind, lengths), batch_size=2, processes=processes, **options)


def said(processes: Processes) -> dict[str, str]:
    """What each kind of failing shared work ends in, as this process sees it."""

    def only(rank: int, error: Exception) -> Any:
        def work() -> int:
            if processes.rank == rank:
                raise error
            return processes.rank

        return work

    class Unpicklable(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__("two arguments")

    last = processes.count - 1
    attempts = {
        "one": lambda: processes.everywhere(only(last, ProbeError("planted"))),
        "all": lambda: processes.everywhere(only(processes.rank, InputError("planted"))),
        "odd": lambda: processes.everywhere(only(last, Unpicklable(1, 2))),
        "first": lambda: processes.at_first(only(0, InputError("planted"))),
        "none": lambda: processes.everywhere(only(-1, InputError("planted"))),
        "told": lambda: processes.at_first(lambda: f"by {processes.rank}"),
        "gathered": lambda: list(processes.gather(processes.rank)),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            found[name] = repr(attempt())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined() as processes:
        (folder / f"said-{processes.rank}.json").write_text(json.dumps(said(processes)))
        for case in CASES:
            stats = measured(case, processes)
            assert (stats is None) == (processes.rank > 0)
            if stats is not None:
                write_json(folder / f"{case}.json", stats)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
