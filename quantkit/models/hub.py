"""Folders of the model hub: its cache first, then the network, which may be absent."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from quantkit.errors import InputError

_CONNECT_TIMEOUT_S: Final = 3.0
_HUB_TIMEOUT_S: Final = 10


def hub_folder(name: str) -> Path:
    """Returns the folder of a hub id: in the hub's cache, else downloaded after one short look.

    Raises:
        InputError: not in the cache, and the hub cannot be reached or does not have it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt"]
    try:
        folder = snapshot_download(name, allow_patterns=patterns, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes") or not _reachable():
            raise InputError(
                f"model {name!r} is not a local folder and not in the hub's cache, and the hub "
                "cannot be reached: check the path, or download it where there is a network."
            ) from None
        try:
            folder = snapshot_download(
                name, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S, max_workers=2
            )
        except (HfHubHTTPError, OSError, ValueError) as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"model {name!r} from the hub: {first[0]}") from error
    return Path(folder)


def _reachable() -> bool:
    from huggingface_hub.constants import ENDPOINT

    host = ENDPOINT.split("://", 1)[-1].split("/", 1)[0]
    name, _, port = host.partition(":")
    try:
        with socket.create_connection((name, int(port or 443)), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
