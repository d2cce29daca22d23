"""Alert rules and the Grafana dashboard ask for what the gateway exposes; the runbook has a section for every alert."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import metrics
from tests.gateway_views import VIEW

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
RULES: Final = DEPLOY / "prometheus" / "rules.yaml"
OPERATIONS: Final = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
# `instance` and `job` are given by Prometheus.
GIVEN: Final = {"instance", "job"}
FAMILIES: Final = list(text_string_to_metric_families(metrics.exposition(VIEW).decode()))
SERIES: Final = {sample.name: set(sample.labels) for family in FAMILIES for sample in family.samples}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana" / "gateway.json").read_text(encoding="utf-8"))[
        "panels"
    ]
    return found


EXPRESSIONS: Final = [rule["expr"] for rule in rules()] + [
    target["expr"] for panel in panels() for target in panel["targets"]
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_series_and_labels_that_exist(expression: str) -> None:
    named = set(re.findall(r"\b(?:gateway_\w+|up)\b", expression))
    assert named
    assert named <= {*SERIES, "up"}
    labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    labels |= set(re.findall(r"(\w+)=~?\"", expression))
    available = GIVEN.union(*(SERIES.get(name, set()) for name in named))
    assert labels <= available
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_tells_what_is_wrong_and_the_runbook_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    found = re.search(rf"^### {rule['alert']}\n(.*?)(?=^##|\Z)", OPERATIONS, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/operations.md has no section ### {rule['alert']}"
    assert "**Do:**" in found[1]


def test_the_runbook_has_no_alert_that_is_not_there() -> None:
    assert set(re.findall(r"^### (Gateway\w+)$", OPERATIONS, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_labels_of_a_summary_survive_the_expression() -> None:
    for rule in rules():
        wanted = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        aggregated = re.findall(r"by \(([^)]*)\)", rule["expr"])
        kept = set(re.split(r",\s*", aggregated[0])) if aggregated else GIVEN.union(*SERIES.values())
        assert wanted <= kept, rule["alert"]


@pytest.mark.parametrize(("kind", "name"), [("rules", "rules.yaml"), ("config", "prometheus.yaml")])
def test_prometheus_takes_the_file(kind: str, name: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    arguments = [promtool, "check", kind, str(DEPLOY / "prometheus" / name)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr + found.stdout


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in panels()]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())


def test_what_is_mounted_is_there() -> None:
    """Of the compose file: a path that does not exist becomes an empty directory, and nobody is warned."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = [mount for service in services.values() for mount in service.get("volumes", ()) if mount.startswith("./")]
    assert mounts
    for mount in mounts:
        assert (DEPLOY / mount.partition(":")[0]).exists(), mount
    datasource = DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml"
    uid = yaml.safe_load(datasource.read_text(encoding="utf-8"))["datasources"][0]["uid"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {uid}
