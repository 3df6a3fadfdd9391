"""The names of metrics that the dashboard and the alert rules use."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "infra" / "observability"
_NAME = re.compile(r"\b(?:longshore|temporal|process)_\w+")


def expressions() -> dict[str, str]:
    """Every expression in PromQL, by the title of its panel or the name of its alert."""
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    asked = {f"{panel['title']} {at['refId']}": at["expr"] for panel in panels for at in panel.get("targets", [])}
    groups: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return asked | {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def names_of() -> set[str]:
    return {name for expression in expressions().values() for name in _NAME.findall(expression)}
