"""Measure the source's structure at a git revision: `python -m benchmarks.structure [REV ...]` (default: HEAD).

Prints one JSON object per revision: lines, files and functions of each package, its rooms (the modules and packages
directly below it) with the imports between them, import circles, the longest import chain, public classes and functions
that several modules define, branches on the kind of a job's plan, and the README's lines.
"""

import argparse
import ast
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import cache
from statistics import median
from typing import Any

PACKAGES = ("longshore", "shared", "workflows", "activities", "megatron_worker", "service")
_PLANS = {"JobPlan", "SessionPlan"}
Graph = Mapping[str, set[str]]  # a module or room, and those that it imports


def measure(revision: str) -> dict[str, Any]:
    """Measure one revision of this repository."""
    files = read_files(revision)
    sources = {_module(path): text for path, text in files.items() if path.endswith(".py")}
    trees = {name: ast.parse(text) for name, text in sources.items()}
    imports = {name: imported(name, tree, trees.keys()) for name, tree in trees.items()}
    chain = longest_chain(imports)
    return {
        "revision": _git("rev-parse", "--short=7", revision).decode().strip(),
        "packages": {name: package_figures(name, sources, trees, imports) for name in PACKAGES},
        "all": {
            "files": len(sources),
            "lines": sum(map(_num_lines, sources.values())),
            **function_figures(trees),
            "module_imports": sum(map(len, imports.values())),
            "module_circles": len(circles(imports)),
            "longest_chain_modules": len(chain),
            "longest_chain": chain,
            "public_names_defined_again": len(defined_again(trees)),
            "branches_on_plans": sum(map(branches_on_plans, trees.values())),
        },
        "readme_lines": _num_lines(files["README.md"]),
    }


def read_files(revision: str) -> dict[str, str]:
    """Read README.md and the packages' Python files at a revision, by path."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, "README.md", *PACKAGES))) as archive:
        members = [member for member in archive if member.name.endswith((".py", "README.md"))]
        opened = {member.name: archive.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in opened.items() if file is not None}


def imported(name: str, tree: ast.AST, modules: Any) -> set[str]:
    """Return the modules of ours that a module imports, wherever in it; the repository has absolute imports alone."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names):
                children = {f"{module}.{each.name}" for each in names} & modules
                found |= children
                if len(children) < len(names):  # a name of the module itself
                    found.add(module)
    return (found & modules) - {name}


def package_figures(
    package: str, sources: Mapping[str, str], trees: Mapping[str, ast.Module], imports: Graph
) -> dict[str, Any]:
    """Measure one package: its size, its functions, its rooms."""
    mine = {name: tree for name, tree in trees.items() if name.split(".")[0] == package}
    lengths = [_num_lines(sources[name]) for name in mine]
    rooms = room_graph(package, imports)
    return {
        "files": len(mine),
        "lines": sum(lengths),
        "longest_file": max(lengths),
        "files_under_50_lines": sum(length < 50 for length in lengths),
        "files_at_root": sum(name.count(".") == 1 and not _is_package(name, trees) for name in mine) + 1,
        **function_figures(mine),
        "rooms": len(rooms),
        "room_imports": sum(map(len, rooms.values())),
        "room_circles": sum(len(circles(room_graph(parent, imports))) for parent in _parents(mine)),
    }


def function_figures(trees: Mapping[str, ast.Module]) -> dict[str, Any]:
    """Count functions, and their lines from `def` to the last one."""
    lengths = {f"{name}.{each.name}": each.end_lineno - each.lineno + 1 for name, each in _functions(trees)}  # type: ignore[operator]
    every = [each.end_lineno - each.lineno + 1 for _, each in _functions(trees)]  # type: ignore[operator]
    longest = max(lengths, key=lambda name: lengths[name])
    return {
        "functions": len(every),
        "median_function_lines": median(every),
        "functions_over_60_lines": sum(length > 60 for length in every),
        "longest_function_lines": lengths[longest],
        "longest_function": longest,
    }


def defined_again(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public classes and functions that several modules define, with those modules.

    Functions of the web service's routes and of commands are left out: their names are those of paths and commands.
    """
    found: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_route = bool(node.decorator_list) and not isinstance(node, ast.ClassDef)
            if not is_route and not node.name.startswith("_") and node.name != "main":
                found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def branches_on_plans(tree: ast.AST) -> int:
    """Count a module's checks for the kind of a job's plan: by isinstance, or by a case."""
    found = 0
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                found += any(isinstance(each, ast.Name) and each.id in _PLANS for each in ast.walk(kinds))
            case ast.MatchClass(cls=ast.Name(id=name)):
                found += name in _PLANS
    return found


def room_graph(package: str, imports: Graph) -> dict[str, set[str]]:
    """Return the imports between the modules and packages directly below a package."""
    depth = package.count(".") + 2
    rooms: dict[str, set[str]] = {}
    for name, targets in imports.items():
        if not name.startswith(f"{package}."):
            continue
        room = _cut(name, depth)
        inside = {_cut(target, depth) for target in targets if target.startswith(f"{package}.")}
        rooms.setdefault(room, set()).update(inside - {room})
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach one another."""
    reached = {node: _reached(node, graph) for node in graph}
    found = {
        tuple(sorted(other for other in graph if other in reached[node] and node in reached[other])) for node in graph
    }
    return [list(group) for group in sorted(found) if group]


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest sequence of modules where each imports the next; a cycle is entered once."""
    circle = {node: index for index, group in enumerate(circles(graph)) for node in group}

    @cache
    def below(node: str) -> tuple[str, ...]:
        others = (o for o in sorted(graph[node]) if o not in circle or circle.get(o) != circle.get(node))
        return (node, *max((below(other) for other in others), key=len, default=()))

    longest = max((below(node) for node in sorted(graph)), key=len)
    return list(longest)


def _reached(node: str, graph: Graph) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[node])
    while waiting:
        if (other := waiting.pop()) not in found:
            found.add(other)
            waiting += graph.get(other, ())
    return found


def _functions(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def _parents(modules: Mapping[str, object]) -> set[str]:
    return {name.rpartition(".")[0] for name in modules if "." in name}


def _is_package(name: str, modules: Mapping[str, object]) -> bool:
    return any(other.startswith(f"{name}.") for other in modules)


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _cut(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def _num_lines(text: str) -> int:
    return text.count("\n")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=["HEAD"], metavar="REV")
    print(json.dumps([measure(revision) for revision in parser.parse_args().revisions], indent=1))


if __name__ == "__main__":
    main()
