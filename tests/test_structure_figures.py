"""benchmarks/structure.py: imports, circles and chains, on sources small enough to count by hand."""

import ast
from pathlib import Path

import pytest

from benchmarks.structure import (
    branches_on_plans,
    circles,
    defined_again,
    imported,
    longest_chain,
    measure,
    room_graph,
)

GRAPH = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"f"}, "f": {"e"}}


def test_imports_are_of_modules_and_of_names_in_them() -> None:
    modules = {"p", "p.q", "p.q.r", "s"}
    source = "import json\nimport s\nfrom p.q import r, name\ndef f():\n    from p import q\n"
    assert imported("p.x", ast.parse(source), modules) == {"s", "p.q", "p.q.r"}


def test_circles_and_the_longest_chain() -> None:
    assert circles(GRAPH) == [["e", "f"]]
    assert longest_chain(GRAPH) == ["a", "b", "c", "d"]


def test_rooms_import_rooms() -> None:
    imports = {"p.x.one": {"p.y.two", "p.x.three"}, "p.x.three": {"s"}, "p.y.two": set(), "p.y.four": {"p.y.two"}}
    assert room_graph("p", imports) == {"p.x": {"p.y"}, "p.y": set()}


def test_names_defined_again_and_branches_on_plans() -> None:
    one = ast.parse("class A: ...\ndef _b(): ...\nif isinstance(p, JobPlan | C): ...\n")
    other = ast.parse("class A: ...\ndef _b(): ...\nmatch p:\n    case SessionPlan(): ...\n    case C(): ...\n")
    assert defined_again({"x": one, "y": other, "z": ast.parse("A = 1")}) == {"A": ["x", "y"]}
    assert (branches_on_plans(one), branches_on_plans(other)) == (1, 1)


@pytest.mark.skipif(not Path(__file__).parents[1].joinpath(".git").exists(), reason="no git checkout to measure")
def test_this_revision_is_measured() -> None:
    found = measure("HEAD")
    assert set(found["packages"]) == {"longshore", "shared", "workflows", "activities", "megatron_worker", "service"}
    assert sum(package["lines"] for package in found["packages"].values()) == found["all"]["lines"]
    assert found["all"]["module_circles"] == sum(package["room_circles"] for package in found["packages"].values()) == 0
