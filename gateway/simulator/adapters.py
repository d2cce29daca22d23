"""The LoRA adapters of the simulated vLLM: loaded and unloaded at run time, with vLLM's own messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.simulator import ask as asking
from gateway.simulator.ask import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.simulator.config import LoraMode

# The file that marks the directory of an adapter, in PEFT's layout.
_CONFIG_FILE = "adapter_config.json"


class LoadedAdapters:
    """The adapters by name. `paths` maps each name to the path it was loaded from."""

    def __init__(self, base_models: Sequence[str], mode: LoraMode) -> None:
        self._base_models = base_models
        self._mode = mode
        self.paths: dict[str, str] = {}

        self.enabled = mode != "off"

    def load(self, document: Any) -> str:
        """Load an adapter and return vLLM's reply. Raises `Refused`."""
        name, path = _named(document), str(document.get("lora_path", ""))
        if name in self._base_models:
            raise Refused(400, f"The lora adapter '{name}' has the name of a base model.", "InvalidUserInput")
        if name in self.paths and not document.get("load_inplace"):
            raise Refused(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
                "InvalidUserInput",
            )
        if self._mode == "files" and not (Path(path) / _CONFIG_FILE).is_file():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        self.paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, document: Any) -> str:
        """Unload an adapter and return vLLM's reply. Raises `Refused`."""
        name = _named(document)
        if name not in self.paths:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.paths[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def name_in(body: bytes) -> str:
    """Return the adapter that a request names, for faults that match by model."""
    document = asking.parse(body)
    return str(document.get("lora_name", "")) if isinstance(document, dict) else ""


def _named(document: Any) -> str:
    if not isinstance(document, dict) or not document.get("lora_name"):
        raise Refused(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    return str(document["lora_name"])
