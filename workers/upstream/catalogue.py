"""Which models can be sampled from, under which name the upstream knows them, and how much context they have.

The upstreams' `/v1/models` says so: base models have `max_model_len`, adapters name their base model as `parent` and
have no length of their own. The `--lora-name` template makes an upstream's name of a `tinker://` path
(`shared/core/adapters.py`).

`AdapterBases` knows which base model an adapter belongs to, and so which of the upstreams that list it may be asked.
Two base models of one shape accept the same adapter, but only one of them is the model it was trained on. What a
training server reports about an adapter counts for more than the `parent` that upstreams list. If two upstreams list
different parents, the first on the list counts, so that all workers agree. Only names that upstreams list are used:
vLLM calls a model by `--served-model-name`, and others may not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from shared.core.adapters import Naming
from shared.core.errors import NotFound, Overloaded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shared.config import ModelName
    from shared.core.adapters import Adapter
    from shared.core.model import ModelRef
    from workers.upstream.upstream import Upstream


class _Card(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Listing(msgspec.Struct, frozen=True):
    data: list[_Card]


# Stands for an unknown context length: a known one is smaller.
_UNKNOWN_TOKENS: Final = 2**62
_decoder: Final = msgspec.json.Decoder(_Listing)


@dataclass(frozen=True, slots=True)
class Served:
    """One model of an upstream. `parent` is set for adapters."""

    name: str
    parent: str | None
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a sampling session samples from.

    `base_model` is the name offered to clients, which names their tokenizer. `adapter` is set for a `tinker://` path;
    an upstream may not have it yet, or may have lost it.
    """

    upstream_name: str
    base_model: str
    context_tokens: int | None
    adapter: Adapter | None = None


def decode_listing(body: bytes) -> list[Served]:
    """Return the models in a `/v1/models` reply. Raises `ValueError` for anything else."""
    try:
        cards = _decoder.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a /v1/models reply: {error}") from error
    return [Served(card.id, card.parent, card.max_model_len) for card in cards]


class Catalogue:
    """The models of all upstreams together. If several list a name, the smallest context counts."""

    def __init__(
        self, offered: Sequence[ModelName], lora_name_template: str, lora_path_template: str | None = None
    ) -> None:
        self._models = tuple(offered)
        self._offered = {model.name: model.upstream_name for model in offered}
        self._naming = Naming(lora_name_template, lora_path_template)
        self._served: dict[str, Served] = {}
        self._bases = self._list_bases()

    @property
    def known(self) -> bool:
        """Whether any upstream has listed its models yet."""
        return bool(self._served)

    def replace(self, served: Iterable[Served]) -> None:
        merged: dict[str, Served] = {}
        for model in served:
            before = merged.get(model.name)
            if before is None or _context_order(model) < _context_order(before):
                merged[model.name] = model
        self._served = merged
        self._bases = self._list_bases()

    def unlisted(self) -> tuple[str, ...]:
        """Return the values of `--model` whose model no upstream lists."""
        return tuple(model.flag for model in self._models if model.upstream_name not in self._served)

    def base_models(self) -> dict[str, int | None]:
        """Return offered name -> context length in tokens (None: unknown), in a stable order."""
        return self._bases

    def _list_bases(self) -> dict[str, int | None]:
        # Made when the listing changes: every sample looks into it, and there may be thousands of adapters.
        if self._offered:
            return {name: self._context_of(upstream) for name, upstream in self._offered.items()}
        return {name: model.context_tokens for name, model in sorted(self._served.items()) if model.parent is None}

    def resolve(self, model: ModelRef) -> Target:
        """Return where samples of this model go. Raises `NotFound` with the models that are offered."""
        if model.model_path:
            adapter = self.adapter(model.model_path)
            served = self._served.get(adapter.name)
            if served is None:
                raise NotFound(f"no upstream serves {model.model_path!r} (as model {adapter.name!r})")
            base = served.parent or served.name
            return Target(served.name, self._offered_name(base), self._context_of(base), adapter)
        name = model.base_model or ""
        if name not in self._bases:
            offered = ", ".join(self._bases) or "none yet: no upstream has answered /v1/models"
            raise NotFound(f"model {name!r} is not offered here; offered: {offered}")
        upstream_name = self._offered.get(name, name)
        return Target(upstream_name, name, self._context_of(upstream_name))

    def adapter(self, path: str) -> Adapter:
        """Return the adapter of a path. Raises `NotFound`, which quotes the path, if it cannot be one."""
        adapter = self._naming.adapter(path)
        if adapter is None:
            raise NotFound(f"there is no {path!r}; sampler weights are tinker://RUN/sampler_weights/CHECKPOINT")
        return adapter

    def of_base(self, target: Target, base: str) -> Target:
        """Return an adapter's target with `base` (an upstream's name) as its base model."""
        return replace(target, base_model=self._offered_name(base), context_tokens=self._context_of(base))

    def upstream_name(self, base_model: str) -> str:
        """Return the upstreams' name of a model that clients call `base_model`."""
        return self._offered.get(base_model, base_model)

    def awaited(self, adapter: Adapter) -> Target:
        """Return where samples of an adapter go that no upstream has now. Its context is assumed to be the smallest.

        Raises `Overloaded` while no upstream has listed its models.
        """
        if not self._bases:
            raise Overloaded("upstream", "no upstream answers yet; try again later")
        base = min(self._bases, key=lambda name: self._bases[name] or _UNKNOWN_TOKENS)
        return Target(adapter.name, base, self._bases[base], adapter)

    def _offered_name(self, upstream_name: str) -> str:
        for name, known_as in self._offered.items():
            if known_as == upstream_name:
                return name
        return upstream_name

    def _context_of(self, upstream_name: str) -> int | None:
        served = self._served.get(upstream_name)
        return served.context_tokens if served is not None else None


def _context_order(model: Served) -> int:
    return model.context_tokens if model.context_tokens is not None else _UNKNOWN_TOKENS


# How many adapters' base models are remembered. An adapter that was lost everywhere is loaded where it was before.
_REMEMBERED_MAX: Final = 10_000


class AdapterBases:
    """Knows the base models of adapters, both by the upstreams' names."""

    def __init__(self) -> None:
        self._serving: Mapping[str, Collection[Upstream]] = {}
        # Adapter -> upstream, in the order of the list -> the parent, if that upstream lists the parent, too.
        self._parents: dict[str, dict[Upstream, str]] = {}
        self._reported: dict[str, str] = {}
        self._found: dict[str, str] = {}

    def learn(
        self,
        upstreams: Iterable[Upstream],
        served: Mapping[Upstream, Collection[Served]],
        serving: Mapping[str, Collection[Upstream]],
    ) -> None:
        """Take over new listings: `served` by upstream, `serving` by name."""
        self._serving = serving
        self._parents = {}
        for upstream in upstreams:
            for model in served.get(upstream, ()):
                if model.parent is not None and upstream in serving.get(model.parent, ()):
                    self._parents.setdefault(model.name, {})[upstream] = model.parent

    def report(self, adapter: str, base: str) -> None:
        """Note what a training server reports about an adapter."""
        if base in self._serving:
            _remember(self._reported, adapter, base)

    def of(self, adapter: str) -> str | None:
        """Return the base model of an adapter, or None while it is unknown."""
        reported = self._reported.get(adapter)
        if reported in self._serving:
            return reported
        for parent in self._parents.get(adapter, {}).values():
            _remember(self._found, adapter, parent)
            return parent
        found = self._found.get(adapter)
        return found if found in self._serving else None

    def are_right(self, adapter: str, upstream: Upstream) -> bool:
        """Return whether the adapter that this upstream lists has the right base model, as far as both are known."""
        parent = self._parents.get(adapter, {}).get(upstream)
        base = self.of(adapter) if parent is not None else None
        # A model may have several names; the upstream lists them all.
        return base is None or base == parent or upstream in self._serving.get(base, ())

    def narrows(self, model_name: str) -> bool:
        """Return whether `narrow` may leave out an upstream, and may leave out others later without `learn`."""
        return model_name in self._parents

    def narrow(self, model_name: str, serving: Collection[Upstream]) -> list[Upstream]:
        """Return those of `serving`, which all list `model_name`, that may be asked for it."""
        if not self.narrows(model_name):
            return list(serving)
        return [upstream for upstream in serving if self.are_right(model_name, upstream)]


def _remember(memory: dict[str, str], adapter: str, base: str) -> None:
    memory[adapter] = base
    if len(memory) > _REMEMBERED_MAX:
        del memory[next(iter(memory))]
