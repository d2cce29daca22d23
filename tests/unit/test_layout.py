"""The rooms and their direction: who may import whom, what stays pure, and what must not be in any committed file."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
DISTRIBUTION: Final = "tinker-sampling-gateway"
ROOMS: Final = ("gateway", "workers", "shared")

_CORE: Final = ("shared.core",)
_ALL_OF_SHARED: Final = ("shared",)
# What the options of a command are made of.
_OPTIONS: Final = ("gateway.settings.quantities", "gateway.settings.option_values")
# Room -> what its modules may import of ours, types included: itself, the rooms named here and what is in them. A room
# is a folder; the most specific entry counts. A name ending in ".*" allows a room's own modules and not its sub-rooms.
MAY_IMPORT: Final[dict[str, tuple[str, ...]]] = {
    "gateway": ("gateway.settings", "gateway.supervision", "gateway.machine", *_ALL_OF_SHARED),
    "gateway.settings": ("shared.redis.address", "shared.*", *_CORE),
    "gateway.machine": _CORE,
    "gateway.admin": (
        "gateway.settings",
        "gateway.machine",
        "shared.http",
        "shared.store",
        "shared.wire.sdk.calls",
        "shared.*",
        *_CORE,
    ),
    "gateway.supervision": (
        "gateway.admin",
        "gateway.settings",
        "gateway.machine",
        "shared.store",
        "shared.*",
        *_CORE,
    ),
    "gateway.commands": (
        "gateway.supervision",
        "gateway.settings",
        "gateway.machine",
        "shared.store",
        "shared.*",
        *_CORE,
    ),
    "gateway.simulator": ("gateway.machine", *_OPTIONS, "shared.clock", *_CORE),
    "gateway.bench": (
        "gateway.bench",
        "gateway.simulator",
        "gateway.machine",
        *_OPTIONS,
        "shared.clock",
        "shared.system_error",
        "shared.wire.sdk.result",
        *_CORE,
    ),
    "workers": ("workers", *_ALL_OF_SHARED),
    "workers.api": ("workers.samples", "workers.passing", "workers.parts", *_ALL_OF_SHARED),
    "workers.samples": ("workers.upstream.*", "workers.upstream.client.port", *_ALL_OF_SHARED),
    "workers.passing": ("workers.upstream.*", "workers.upstream.client.port", *_ALL_OF_SHARED),
    "workers.upstream": ("workers.upstream.client", *_ALL_OF_SHARED),
    "workers.upstream.client": _ALL_OF_SHARED,
    "workers.duties": ("workers.samples", "workers.parts", *_ALL_OF_SHARED),
    "shared": ("shared.*", *_CORE),
    "shared.core": (),
    "shared.wire": _CORE,
    "shared.wire.sdk": ("shared.wire.*", *_CORE),
    "shared.wire.vllm": ("shared.wire.*", *_CORE),
    "shared.loop": (),
    "shared.http": ("shared.loop", "shared.config", *_CORE),
    "shared.redis": ("shared.core.errors", "shared.clock", "shared.system_error"),
    "shared.store": ("shared.redis", "shared.clock", *_CORE),
}
# Module of ours -> the only ones that may import it.
ONLY_IMPORTED_BY: Final = {
    "gateway.cli": {"gateway.__main__"},
    "workers.worker": {"workers.entry"},
}
# Pure parts of `shared`: they decide or translate.
PURE: Final = ("shared.core", "shared.wire")
# What a codec may use besides the standard library; none of it opens anything.
WIRE_LIBRARIES: Final = {"msgspec", "orjson", "numpy", "simdjson", "google"}
# Modules of the standard library that do I/O or wait, and those that hand out time and randomness: these come in as
# arguments.
IMPURE: Final = frozenset(
    "asyncio concurrent ctypes fcntl ftplib glob http imaplib io logging mmap multiprocessing os pathlib random"
    " resource secrets select selectors shutil signal smtplib socket socketserver ssl subprocess sys tempfile"
    " threading time urllib webbrowser".split()
)
GRAB_BAGS: Final = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})


def modules(room: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every hand-written module of a room or a part of one."""
    for path in sorted((ROOT / room.replace(".", "/")).rglob("*.py")):
        if not path.stem.endswith("_pb2"):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(tree: ast.Module) -> set[str]:
    """Dotted names of all that is imported, anywhere in the module. `from a import b` counts as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import on line {node.lineno}"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@cache
def all_modules() -> list[tuple[str, Path]]:
    return [module for room in ROOMS for module in modules(room)]


def pure_modules() -> list[tuple[str, Path]]:
    return [module for part in PURE for module in modules(part)]


def test_rooms_are_found() -> None:
    """The tests below would pass on an empty list."""
    for room in (*ROOMS, *MAY_IMPORT):
        assert len(list(modules(room))) > 1, room


def room_of(name: str, path: Path) -> str:
    """The room that a module is in: its folder, or the nearest one above that has rules."""
    room = name if path.name == "__init__.py" else name.rpartition(".")[0]
    room = room.removesuffix(".__init__")
    while room not in MAY_IMPORT:
        room = room.rpartition(".")[0]
    return room


def is_allowed(target: str, room: str) -> bool:
    return any(
        target.rpartition(".")[0] == entry.removesuffix(".*")
        if entry.endswith(".*")
        else target == entry or target.startswith(entry + ".")
        for entry in (f"{room}.*", *MAY_IMPORT[room])
    )


@cache
def own_imports(tree: ast.Module) -> set[str]:
    """The modules of ours that are imported, anywhere in the module, for types too."""
    known = {name.removesuffix(".__init__") for name, _ in all_modules()}
    found = {name if name in known else name.rpartition(".")[0] for name in imports_of(tree)}
    return found & known


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_its_rule_allows(room: str) -> None:
    forbidden = [
        f"{name} imports {target}"
        for name, path in modules(room)
        if room_of(name, path) == room
        for target in sorted(own_imports(tree_of(path)))
        if not is_allowed(target, room)
    ]
    assert not forbidden


@pytest.mark.parametrize("module", ONLY_IMPORTED_BY)
def test_a_module_has_only_these_importers(module: str) -> None:
    importers = {name for name, path in all_modules() if module in own_imports(tree_of(path))}
    assert importers == ONLY_IMPORTED_BY[module]


def test_no_two_modules_import_each_other_even_by_way_of_others() -> None:
    """Imports for types count: what cannot be read alone is one module in two files."""
    graph = {name.removesuffix(".__init__"): own_imports(tree_of(path)) for name, path in all_modules()}
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("part", PURE)
def test_pure_parts_import_no_io(part: str) -> None:
    # Values are msgspec structs everywhere: it does no I/O.
    libraries = WIRE_LIBRARIES if part == "shared.wire" else {"msgspec"}
    allowed = (set(sys.stdlib_module_names) - IMPURE) | libraries | {"shared"}
    impure = [
        f"{name} imports {imported}"
        for name, path in modules(part)
        for imported in imports_of(tree_of(path))
        if imported.split(".")[0] not in allowed
    ]
    assert not impure


def test_pure_parts_contain_no_async() -> None:
    asynchronous = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    found = [
        f"{name}:{node.lineno}"
        for name, path in pure_modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, asynchronous)
    ]
    assert not found


def test_no_module_is_a_grab_bag() -> None:
    assert not [name for name, _ in all_modules() if GRAB_BAGS.intersection(name.split("."))]


MOST_LINES: Final = 400


def test_no_module_is_too_long() -> None:
    assert not [name for name, path in all_modules() if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES]


@pytest.mark.parametrize("room", ROOMS)
def test_unit_tests_mirror_the_rooms(room: str) -> None:
    """A file of unit tests is in the folder of the room that it tests."""
    tests = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(tests) for path in (tests / room).rglob("test_*.py")}
    assert not [folder for folder in folders if not list((ROOT / folder).glob("*.py"))]


def names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def test_no_base_http_middleware() -> None:
    """B17: it hides that a client has gone away. Starlette's `app.middleware` decorator makes one, too."""
    forbidden = {"BaseHTTPMiddleware", "middleware"}
    found = [f"{name} uses {word}" for name, path in all_modules() for word in forbidden & set(names_in(tree_of(path)))]
    assert not found


@pytest.mark.parametrize("room", ROOMS)
def test_room_has_one_owner(room: str) -> None:
    """Packages with such general names are overwritten without a word by any distribution that has them too."""
    assert set(packages_distributions().get(room, ())) <= {DISTRIBUTION}
    spec = importlib.util.find_spec(room)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).parent == ROOT / room


def test_wheel_holds_the_rooms_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(ROOMS)
    assert project["project"]["name"] == DISTRIBUTION


def imported_at_once(tree: ast.Module) -> set[str]:
    """Packages without which the module cannot be imported; those within a `try` or a function are not among them."""
    plain: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for name in imports_of(ast.Module(plain, []))}


def test_what_some_pythons_lack_is_not_needed() -> None:
    """A dependency with a condition, like one without a wheel for every Python, is missing where that does not hold."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    conditional = [line for line in project["project"]["dependencies"] if ";" in line]
    distributions = {re.split(r"[^\w.-]", line)[0] for line in conditional}
    assert distributions, "there is nothing to check: this test can go"
    packages = {package for package, of in packages_distributions().items() if distributions & set(of)}
    found = [
        f"{name} needs {packages & used}"
        for name, path in all_modules()
        if packages & (used := imported_at_once(tree_of(path)))
    ]
    assert not found


@pytest.mark.parametrize("code", ["import a.b", "from a import b", "from a.b import c"])
def test_an_import_without_condition_is_found(code: str) -> None:
    assert imported_at_once(ast.parse(code)) == {"a"}
    assert not imported_at_once(ast.parse(f"try:\n    {code}\nexcept ImportError:\n    pass"))


def committed_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


# Absolute paths of somebody's machine; a path below another folder (`deploy/home/x`) is none.
MACHINE_PATH: Final = re.compile(rb"(?<![\w.$})>-])/(?:home|root|Users|work|tmp|private)/\w")
# Hosts that packages or images come from: which ones is the machine's configuration.
REGISTRY_HOST: Final = re.compile(
    rb"pypi\W?org|python\W?hosted|(?:index|extra-index)-url\b|\b(?:docker|ghcr|quay|gcr)\.io\b|registry\.\w+\.\w+"
)


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY_HOST], ids=["machine path", "registry host"])
def test_committed_files_name_no(pattern: re.Pattern[bytes]) -> None:
    this = Path(__file__).resolve()
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode(errors='replace')}"
        for path in committed_files()
        if path.resolve() != this
        for match in [pattern.search(path.read_bytes())]
        if match is not None
    ]
    assert not found


@pytest.mark.parametrize("text", [b"see /home/someone/x", b'"/tmp/x"', b"(/root/a"])
def test_machine_path_is_recognised(text: bytes) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", [b"deploy/home/x", b"$HOME/tmp/x", b"/api/v1/work/x"])
def test_path_below_another_is_no_machine_path(text: bytes) -> None:
    assert not MACHINE_PATH.search(text)


# -- what is never done with bytes that came from outside --------------------------------------------------------

# These make code or objects of bytes.
EVALUATING: Final = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "code", "codeop"})
EVALUATORS: Final = frozenset({"eval", "exec", "compile", "__import__"})


def names_called(tree: ast.Module) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


@pytest.mark.parametrize("room", ROOMS)
def test_bytes_are_never_evaluated(room: str) -> None:
    for name, path in modules(room):
        tree = tree_of(path)
        assert not {found.partition(".")[0] for found in imports_of(tree)} & EVALUATING, name
        assert not names_called(tree) & EVALUATORS, name


@pytest.mark.parametrize("code", ["import pickle", "from yaml import load", "eval(x)", "exec(x)"])
def test_evaluation_is_found(code: str) -> None:
    tree = ast.parse(code)
    assert {found.partition(".")[0] for found in imports_of(tree)} & EVALUATING or names_called(tree) & EVALUATORS


@pytest.mark.parametrize("name", ["run", "dev", "audit"])
def test_every_locked_dependency_has_its_hashes(name: str) -> None:
    entries = re.split(r"^(?=\S+==)", (ROOT / "requirements" / f"{name}.lock").read_text(), flags=re.MULTILINE)[1:]
    assert entries
    assert all("--hash=sha256:" in entry for entry in entries)
