"""`tinker://<run>/sampler_weights/<checkpoint>` to an upstream's adapter: its name there, and where its files lie.

An adapter is immutable: another checkpoint is another name and another directory. vLLM keeps what it has loaded under a
name whatever becomes of the files, and a name that stands for two checkpoints would serve one for the other. So of two
paths that a template makes the same name of, both are refused.

Run and checkpoint come from clients. Only characters that mean nothing to a file system, a URL or a template may occur
in them, and neither may begin with a dot.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Final

RUN: Final = "run_id"
CHECKPOINT: Final = "checkpoint"
FIELDS: Final = (RUN, CHECKPOINT)

# Colons: the SDK's model ids are SESSION:train:N.
_ID: Final = r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,254}"
_PATH: Final = re.compile(rf"tinker://({_ID})(?:/sampler_weights)?/({_ID})")
# What stands where a checkpoint may: a path that ends there is cut off.
_KINDS: Final = frozenset({"weights", "sampler_weights", "external_weights"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """`path`: the client's name for it; `name`: the upstreams'.

    `directory`: where they load it from; None: it is not for the gateway to load.
    """

    path: str
    name: str
    directory: str | None


class Template:
    """Text with `{run_id}` and `{checkpoint}` in it."""

    def __init__(self, text: str) -> None:
        """Parse a template. Raises `ValueError` for anything but these two fields, plain."""
        self.text = text
        self._pieces: list[tuple[str, str | None]] = []
        for literal, field, spec, conversion in string.Formatter().parse(text):
            if field is not None and (field not in FIELDS or spec or conversion):
                raise ValueError(f"{{{field}}} is no field")
            self._pieces.append((literal, field))
        self._unique = re.compile(self._pattern(r".+")), re.compile(self._pattern(r".+?"))

    @property
    def fields(self) -> set[str]:
        return {field for _, field in self._pieces if field is not None}

    def fill(self, run_id: str, checkpoint: str) -> str:
        values = {RUN: run_id, CHECKPOINT: checkpoint}
        return "".join(literal + (values[field] if field else "") for literal, field in self._pieces)

    def names_one(self, name: str) -> bool:
        """Return whether only one run and checkpoint give this name: greedy and reluctant matching agree on it."""
        greedy, reluctant = (pattern.fullmatch(name) for pattern in self._unique)
        return greedy is not None and reluctant is not None and greedy.groupdict() == reluctant.groupdict()

    def _pattern(self, anything: str) -> str:
        seen: set[str] = set()
        parts: list[str] = []
        for literal, field in self._pieces:
            parts.append(re.escape(literal))
            if field is not None:
                parts.append(f"(?P={field})" if field in seen else f"(?P<{field}>{anything})")
                seen.add(field)
        return "".join(parts)


class Naming:
    """The two names that templates make of a path."""

    def __init__(self, name_template: str, path_template: str | None) -> None:
        """Parse both templates. Raises `ValueError` where `check_templates` does."""
        self._name = Template(name_template)
        self._path = Template(path_template) if path_template is not None else None

    @property
    def loads(self) -> bool:
        """Return whether adapters are loaded on demand."""
        return self._path is not None

    def adapter(self, path: str) -> Adapter | None:
        """Return the adapter of a path of sampler weights; None for another path, or if two paths share the name."""
        match = _PATH.fullmatch(path)
        if match is None or match[2] in _KINDS or ".." in path:
            return None
        name = self._name.fill(match[1], match[2])
        if not self._name.names_one(name):
            return None
        return Adapter(path, name, self._path.fill(match[1], match[2]) if self._path is not None else None)


def check_templates(name_template: str, path_template: str | None) -> None:
    """Check both templates. Raises `ValueError` with a sentence that names the flag."""
    name = _checked("--lora-name", name_template)
    if RUN not in name.fields:
        raise ValueError(f"--lora-name: {name_template!r} is not allowed; the field {{run_id}} is needed")
    if path_template is None:
        return
    path = _checked("--lora-path", path_template)
    for flag, template in (("--lora-name", name), ("--lora-path", path)):
        if template.fields != set(FIELDS):
            raise ValueError(
                f"{flag}: {template.text!r} is not allowed; with --lora-path both {{run_id}} and {{checkpoint}} are"
                " needed, since an adapter that is loaded keeps its name for good"
            )


def follows_newest(name_template: str) -> bool:
    """Return whether all checkpoints of a run share a name, so that older samplers follow the newest weights."""
    return CHECKPOINT not in Template(name_template).fields


def _checked(flag: str, text: str) -> Template:
    allowed = "allowed are the fields {run_id} and {checkpoint}"
    try:
        template = Template(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a template; {allowed}") from None
    if re.search(r"\}\{", text):
        raise ValueError(f"{flag}: {text!r} is not allowed; something must stand between two fields")
    if not text.isprintable():
        raise ValueError(f"{flag}: {text!r} is not allowed; it must be printable")
    return template
