"""A tenant of a stack as its admin sees it: its own client of every surface, and the few calls that attacks need."""

from typing import Any

import httpx

from tests.end_to_end.stack import wait_until

ENDED = ("succeeded", "failed", "cancelled")


class Tenant:
    """One tenant's admin. `http` asks with its key, paths from the root: `/api/v1/…`, `/v1/…`."""

    def __init__(self, url: str, name: str, key: str) -> None:
        self.url = url
        self.name = name
        self.key = key
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False)

    def upload(self, name: str, content: bytes) -> str:
        """The URI of a file in this tenant's folder of the store."""
        answer = self.http.post("/api/v1/files", params={"name": name}, content=content)
        assert answer.is_success, answer.text
        return str(answer.json()["uri"])

    def submit(self, kind: str, **body: Any) -> httpx.Response:
        """`kind`: sft, dpo, rl. What is refused at once is refused here."""
        return self.http.post(f"/api/v1/runs/{kind}", json=body)

    def ended(self, run_id: str, timeout_s: float = 120) -> dict[str, Any]:
        """The run's view, once it has ended."""

        def look() -> dict[str, Any] | None:
            view: dict[str, Any] = self.http.get(f"/api/v1/runs/{run_id}").json()
            return view if view["state"] in ENDED else None

        return wait_until(look, f"{run_id} has ended", timeout_s)

    def refusal(self, kind: str, timeout_s: float = 120, **body: Any) -> str:
        """What a run is refused with: at submission, or when it has failed of its own input."""
        answer = self.submit(kind, **body)
        if answer.status_code in (422, 429):
            return str(answer.json()["error"]["message"])
        assert answer.status_code == 201, answer.text
        view = self.ended(answer.json()["run_id"], timeout_s)
        assert view["state"] == "failed", view
        assert view["problem"]["kind"] == "invalid_input", view
        return str(view["problem"]["message"])
