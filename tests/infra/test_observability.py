"""The alert rules and the dashboard's queries, by Prometheus' own tool."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.infra.observability import FOLDER, expressions


def promtool(*arguments: str | Path) -> None:
    if (program := shutil.which("promtool")) is None:
        pytest.skip("no promtool: Debian's package `prometheus` has it")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    promtool("check", "rules", FOLDER / "alerts.yaml")
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yaml"))


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load(Path(__file__).with_name("alerts_test.yaml").read_text())["tests"]
    fired: dict[str, set[bool]] = {}
    for each in (each for test in tests for each in test["alert_rule_test"]):
        fired.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert fired == {rule["alert"]: {True, False} for rule in rules}


def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As expressions of rules: `promtool` reads those."""
    rules = [{"record": "a:query", "expr": each.replace("$window", "5m")} for each in expressions().values()]
    assert len(rules) > 30
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")
