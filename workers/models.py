"""Which models can be sampled from, under which name the upstream knows them, and how much context they have.

Learned from the upstreams' `/v1/models`: base models have `max_model_len`, adapters name their base as `parent` and
leave the length to it. A `tinker://` path becomes an upstream name by the `--lora-name` template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from shared.core.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shared.config import ModelName
    from shared.core.model import ModelRef

_PATH: Final = re.compile(r"tinker://([^/]+)(?:/sampler_weights)?/([^/]+)")


class _Card(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Listing(msgspec.Struct, frozen=True):
    data: list[_Card]


_decoder: Final = msgspec.json.Decoder(_Listing)


@dataclass(frozen=True, slots=True)
class Served:
    """One model of an upstream. `parent` is set for adapters."""

    name: str
    parent: str | None
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """What a sampling session samples from. `base_model` is the name offered to clients (their tokenizer's)."""

    upstream_name: str
    base_model: str
    context_tokens: int | None


def decode_listing(body: bytes) -> list[Served]:
    """The models in a `/v1/models` reply. Raises `ValueError` when it is none."""
    try:
        cards = _decoder.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a /v1/models reply: {error}") from error
    return [Served(card.id, card.parent, card.max_model_len) for card in cards]


class Catalogue:
    """The models of all upstreams together; of equal names the smallest context counts."""

    def __init__(self, offered: Sequence[ModelName], lora_name_template: str) -> None:
        self._offered = {model.name: model.upstream_name for model in offered}
        self._template = lora_name_template
        self._served: dict[str, Served] = {}
        self._bases = self._list_bases()

    @property
    def known(self) -> bool:
        """False until an upstream has told its models."""
        return bool(self._served)

    def replace(self, served: Iterable[Served]) -> None:
        merged: dict[str, Served] = {}
        for model in served:
            before = merged.get(model.name)
            if before is None or _context_order(model) < _context_order(before):
                merged[model.name] = model
        self._served = merged
        self._bases = self._list_bases()

    def base_models(self) -> dict[str, int | None]:
        """Offered name -> context length in tokens (None: unknown), in a stable order."""
        return self._bases

    def _list_bases(self) -> dict[str, int | None]:
        """Made when the listing changes: every sample looks into it, and adapters may be thousands."""
        if self._offered:
            return {name: self._context_of(upstream) for name, upstream in self._offered.items()}
        return {name: model.context_tokens for name, model in sorted(self._served.items()) if model.parent is None}

    def resolve(self, model: ModelRef) -> Target:
        """Where samples of this model go. Raises `NotFound` with what is offered."""
        return self._resolve_path(model.model_path) if model.model_path else self._resolve_base(model.name)

    def _resolve_base(self, name: str) -> Target:
        if name not in self.base_models():
            offered = ", ".join(self.base_models()) or "none yet: no upstream has answered /v1/models"
            raise NotFound(f"model {name!r} is not offered here; offered: {offered}")
        upstream_name = self._offered.get(name, name)
        return Target(upstream_name, name, self._context_of(upstream_name))

    def _resolve_path(self, path: str) -> Target:
        name = adapter_name(path, self._template)
        served = self._served.get(name) if name is not None else None
        if served is None:
            raise NotFound(f"no upstream serves {path!r}" + (f" (as model {name!r})" if name else ""))
        base = served.parent or served.name
        return Target(served.name, self._offered_name(base), self._context_of(base))

    def _offered_name(self, upstream_name: str) -> str:
        for name, known_as in self._offered.items():
            if known_as == upstream_name:
                return name
        return upstream_name

    def _context_of(self, upstream_name: str) -> int | None:
        served = self._served.get(upstream_name)
        return served.context_tokens if served is not None else None


def adapter_name(path: str, template: str) -> str | None:
    """The upstream's name for `tinker://<run>/sampler_weights/<checkpoint>` or `tinker://<run>/<checkpoint>`."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    return template.replace("{run_id}", match[1]).replace("{checkpoint}", match[2])


def _context_order(model: Served) -> int:
    return model.context_tokens if model.context_tokens is not None else 2**62
