"""Every public method of the installed Tinker SDK stands in the docs: served, or refused and why.

`python -m tests.service.test_tinker_methods` writes the table again.
"""

import ast
import re
from pathlib import Path

from fastapi.routing import APIRoute

from service.apis.tinker.wire import TINKER
from service.app import TINKER_ROUTERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tinker_api.md"
SDK = ROOT / ".venv" / "clients" / "tinker-38" / "tinker" / "lib" / "public_interfaces"
BEGIN, END = "<!-- methods of tinker 0.38.0: written by tests/service/test_tinker_methods.py -->\n", "<!-- end -->\n"
OF_THE_REFUSED = (
    *("audit", "auth/", "billing/usage/events", "copy_weights", "sessions/{session_id}/trace_export"),
    *("create_custom_loss", "join_sampling_session", "retrieve_futures"),  # which the client is told not to ask for
)
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
_ELSEWHERE = "there is nobody to pay here: `longshore usage`, and quotas"
REFUSED = {
    "copy_weights": "there are no projects to copy into; a checkpoint is its tenant's, whoever of it asks",
    "get_audit_log": "`GET /api/v1/audit` of the native API tells it, in a form of its own",
    "get_billing_usage": _ELSEWHERE,
    "export_session_trace": "no trace is recorded",
    "whoami": "the SDK reads it from a token of Tinker's own; `longshore whoami` tells it",
    "get_console_url": "the SDK names Tinker's own console; ours is the page",
}
NOTES = {
    "forward_backward": "losses: above",
    "forward_backward_custom": "computed in the client",
    "create_custom_loss": "kept by the client",
    "sample": "what samplers here tell: above",
    "create_sampling_client": "by path, and of base models",
    "publish_checkpoint_from_tinker_path": "a mark: a checkpoint stays its tenant's",
    "assign_session_project": "a label",
    "get_current_checkpoint_storage_usage": "counts and bytes, no prices",
    "load_state": "also of other models, of the same shape",
}


def methods() -> dict[str, list[str]]:
    """The public methods of each client, in the SDK's order."""
    assert SDK.is_dir(), "the clients are not installed: requirements/clients.sh"
    found: dict[str, list[str]] = {}
    for path in sorted(SDK.glob("*_client.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in CLIENTS:
                parts = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                found[node.name] = [each.name for each in parts if not each.name.startswith("_")]
    return {name: found[name] for name in CLIENTS}


def plain(name: str) -> str:
    return name.removesuffix("_async")


def counts() -> tuple[int, int]:
    """How many methods are served, of how many."""
    names = [name for each in methods().values() for name in each]
    return sum(plain(name) not in REFUSED for name in names), len(names)


def table() -> str:
    served, total = counts()
    lines = [f"Served: {served} of {total} public methods of tinker 0.38.0, `…_async` counted.", ""]
    lines += ["| client | method | |", "|---|---|---|"]
    for client, names in methods().items():
        for name in dict.fromkeys(map(plain, names)):
            twin = f", `{name}_async`" if f"{name}_async" in names else ""
            told = f"refused: {REFUSED[name]}" if name in REFUSED else f"served{'; ' if name in NOTES else ''}"
            lines.append(f"| {client} | `{name}`{twin} | {told}{NOTES.get(name, '')} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_method_of_the_sdk() -> None:
    page = PAGE.read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)] == table()


def test_most_methods_are_served() -> None:
    served, total = counts()
    assert total == 108 and served >= 0.85 * total, (served, total)
    known = {plain(name) for each in methods().values() for name in each}
    assert REFUSED.keys() | NOTES.keys() <= known


def test_what_the_sdk_asks_for_is_there() -> None:
    """Every address that the SDK names, but those of what is refused."""
    served = {_form(route.path) for router in TINKER_ROUTERS for route in router.routes if isinstance(route, APIRoute)}
    asked = {
        _form(f"{TINKER}/{path}")
        for file in SDK.parents[1].rglob("*.py")
        if "_test" not in file.name
        for path in re.findall(r"""["']/api/v1/([a-z0-9_/{}]+)["']""", file.read_text())
        if not path.startswith(OF_THE_REFUSED)
    }
    assert len(asked) > 30 and asked <= served, asked - served


def _form(path: str) -> str:
    """A path whose parameters have no names; a checkpoint's has two parts."""
    return re.sub(r"{[^}]*}", "{}", path.replace("{checkpoint_id}", "{}/{}"))


if __name__ == "__main__":
    before = PAGE.read_text()
    PAGE.write_text(before[: before.index(BEGIN) + len(BEGIN)] + table() + before[before.index(END) :])
