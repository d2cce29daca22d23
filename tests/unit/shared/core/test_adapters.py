"""Paths of sampler weights, and what templates make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.adapters import Adapter, Naming, Template, check_templates, follows_newest

NAME, PATH = "{run_id}--{checkpoint}", "/adapters/{run_id}/{checkpoint}"
IDS = st.text("ab-_.:", min_size=1, max_size=6)


@pytest.mark.parametrize("path", ["tinker://r/sampler_weights/c", "tinker://r/c"])
def test_both_forms_of_a_path_are_one_adapter(path: str) -> None:
    assert Naming(NAME, PATH).adapter(path) == Adapter(path, "r--c", "/adapters/r/c")
    assert Naming("{run_id}", None).adapter(path) == Adapter(path, "r", None)


def test_a_run_named_as_the_sdk_does() -> None:
    adapter = Naming(NAME, PATH).adapter("tinker://gws-1_a:train:0/sampler_weights/000100")
    assert adapter is not None
    assert adapter.directory == "/adapters/gws-1_a:train:0/000100"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://r",
        "tinker://r/",
        "tinker:///c",
        "tinker://r/sampler_weights",
        "tinker://r/weights",
        "tinker://r/weights/c",
        "tinker://r/sampler_weights/c/d",
        "http://r/c",
        "tinker://../c",
        "tinker://r/..",
        "tinker://r/.hidden",
        "tinker://r/a..b",
        "tinker://r/a%2fb",
        "tinker://r/a b",
        "tinker://r/a\\b",
        "tinker://r/a\n",
        "tinker://r/\0",
        "tinker://r/{run_id}",
        "tinker://r/" + "c" * 300,
        "tinker://r/ü",
    ],
)
def test_anything_else_is_no_path(path: str) -> None:
    """No traversal, nothing that a file system, a URL or a template would read as more than a name."""
    assert Naming(NAME, PATH).adapter(path) is None


@given(IDS, IDS, IDS, IDS)
def test_a_name_stands_for_one_path(run: str, checkpoint: str, other_run: str, other_checkpoint: str) -> None:
    """A name in use for another checkpoint would be taken for loaded, and the wrong weights sampled."""
    naming = Naming("x-{run_id}-{checkpoint}.", None)
    adapters = [
        naming.adapter(f"tinker://{one}/{two}") for one, two in ((run, checkpoint), (other_run, other_checkpoint))
    ]
    if (run, checkpoint) != (other_run, other_checkpoint) and None not in adapters:
        assert adapters[0].name != adapters[1].name  # type: ignore[union-attr]


def test_a_field_may_stand_twice_and_braces_may_be_text() -> None:
    template = Template("{{{run_id}}}/{checkpoint}/{run_id}")
    assert template.fill("r", "c") == "{r}/c/r"
    assert template.names_one("{r}/c/r")


def test_ids_are_not_templates() -> None:
    assert Template("{run_id}/{checkpoint}").fill("{checkpoint}", "c") == "{checkpoint}/c"


@pytest.mark.parametrize(
    ("name", "path"),
    [("{run_id}", None), (NAME, None), ("lora/{checkpoint}@{run_id}", PATH), (NAME, "org/{run_id}-{checkpoint}")],
)
def test_templates_that_are_allowed(name: str, path: str | None) -> None:
    check_templates(name, path)
    Naming(name, path)


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("{checkpoint}", None, "--lora-name: .* {run_id} is needed"),
        ("", None, "--lora-name"),
        ("{run_id", None, "--lora-name: .* not a template"),
        ("{run_id}{checkpoint}", None, "between two fields"),
        ("{run_id!r}", None, "not a template"),
        ("{run_id:>9}", None, "not a template"),
        ("{run_id.x}", None, "not a template"),
        ("{run_id[0]}", None, "not a template"),
        ("{}{run_id}", None, "not a template"),
        ("{run_id}\n", None, "printable"),
        ("{run_id}", PATH, "--lora-name: .* both"),
        (NAME, "/adapters/{run_id}", "--lora-path: .* both"),
        (NAME, "/adapters", "--lora-path: .* both"),
        (NAME, "/adapters/{run}/{checkpoint}", "--lora-path: .* not a template"),
    ],
)
def test_templates_that_are_not(name: str, path: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_templates(name, path)


@pytest.mark.parametrize(("name", "follows"), [("{run_id}", True), (NAME, False)])
def test_a_name_without_the_checkpoint_follows_the_newest_weights(name: str, follows: bool) -> None:
    assert follows_newest(name) is follows
