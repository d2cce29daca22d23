"""Which base model an adapter belongs to, and so which of the upstreams that list it are meant.

Two base models of one shape take the same adapter, and only one of them answers as it was trained to. What was told of
an adapter (a training server knows) counts for more than what upstreams list as its `parent`; of two upstreams with
another parent each, the first on the list counts, so that every worker finds the same.

Only names that upstreams list say anything: vLLM calls a model by `--served-model-name`, others may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from workers.models import Served
    from workers.upstreams import Upstream

# Of adapters, the base models that are remembered; an adapter that was lost everywhere is loaded where it was.
_REMEMBERED_MAX: Final = 10_000


class AdapterBases:
    """Adapters and base models by the upstreams' names."""

    def __init__(self) -> None:
        self._serving: Mapping[str, Collection[Upstream]] = {}
        # Adapter -> upstream, in the order of the list -> the parent, where that upstream lists it too.
        self._parents: dict[str, dict[Upstream, str]] = {}
        self._told: dict[str, str] = {}
        self._found: dict[str, str] = {}

    def learn(
        self,
        upstreams: Iterable[Upstream],
        served: Mapping[Upstream, Collection[Served]],
        serving: Mapping[str, Collection[Upstream]],
    ) -> None:
        """`served`: what each of the upstreams lists, `serving`: who lists a name."""
        self._serving = serving
        self._parents = {}
        for upstream in upstreams:
            for model in served.get(upstream, ()):
                if model.parent is not None and upstream in serving.get(model.parent, ()):
                    self._parents.setdefault(model.name, {})[upstream] = model.parent

    def tell(self, adapter: str, base: str) -> None:
        """Somebody who knows says so."""
        if base in self._serving:
            _remember(self._told, adapter, base)

    def of(self, adapter: str) -> str | None:
        """The base model of an adapter; None while it is not known."""
        told = self._told.get(adapter)
        if told in self._serving:
            return told
        for parent in self._parents.get(adapter, {}).values():
            _remember(self._found, adapter, parent)
            return parent
        found = self._found.get(adapter)
        return found if found in self._serving else None

    def are_met(self, adapter: str, upstream: Upstream) -> bool:
        """Whether the adapter that this upstream lists is of the right base model, as far as both are known."""
        parent = self._parents.get(adapter, {}).get(upstream)
        base = self.of(adapter) if parent is not None else None
        # One model may have several names: then the upstream lists them all.
        return base is None or base == parent or upstream in self._serving.get(base, ())

    def narrows(self, model_name: str) -> bool:
        """Whether `narrow` may leave out any, and others at another time, without `learn`."""
        return model_name in self._parents

    def narrow(self, model_name: str, serving: Collection[Upstream]) -> list[Upstream]:
        """Those of `serving`, who all list `model_name`, that may be asked for it."""
        if not self.narrows(model_name):
            return list(serving)
        return [upstream for upstream in serving if self.are_met(model_name, upstream)]


def _remember(memory: dict[str, str], adapter: str, base: str) -> None:
    memory[adapter] = base
    if len(memory) > _REMEMBERED_MAX:
        del memory[next(iter(memory))]
