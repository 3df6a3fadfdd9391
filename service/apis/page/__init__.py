"""The page's own addresses: sign in and out, and the HTML frame that its scripts fill."""

import math
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader

from longshore.accounts import ALL_SCOPES, hash_key
from longshore.automation import NOTICE_TYPES
from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from longshore.runs import RUN_ID, RLRun
from longshore.training import Lora
from service.accounts import audit
from service.accounts.keys import COOKIE, LASTS_S, Asking, Principal, csrf_token, sent_key, shown_prefix
from service.apis import errors as problems
from service.backend import Backed, Backend
from shared.errors import Forbidden

_HERE = Path(__file__).parent
SIGN_IN = "/login"
OPEN_PATHS = (SIGN_IN,)
HEALTH_PATHS = ("/health", "/healthz", "/readyz")
_TITLES = {"/": "Runs", "/new": "New run", "/compare": "Compare runs"} | {
    f"/{name}": name.capitalize() for name in ("models", "files", "sweeps", "schedules", "hosts", "account")
}
STATIC = "/static"
# Trusted types: the browser stops scripts that write HTML. The page's own scripts only set text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

_RATES = {
    run.model_fields["kind"].default: run.model_fields["learning_rate"].default
    for run in (SFTRun, DPORun, DistillRun, RewardRun, RLRun)
}
"""The learning rate of a run that names none, by kind: forms show it."""

router = APIRouter(include_in_schema=False)
_frames = Environment(loader=FileSystemLoader(_HERE / "templates"), autoescape=True)


def is_page(path: str) -> bool:
    """True for a path of the page, which redirects to the sign-in form if there is no session."""
    return path in _TITLES or path.startswith("/runs/")


def is_opened(path: str, accept: str) -> bool:
    """True if a browser asks for HTML at an address outside the APIs."""
    is_api = path in ("/api", "/v1", *HEALTH_PATHS) or path.startswith(("/api/", "/v1/", f"{STATIC}/"))
    return "text/html" in accept and not is_api


async def unknown_address(request: Request, error: Exception) -> Response:
    """Answer 404: a page for browsers, the documented error for programs."""
    if is_opened(request.url.path, request.headers.get("accept", "")):
        return _html("unknown.html", 404)
    return await problems.http_error(request, error)


class _Fresh(StaticFiles):
    """Static files that browsers revalidate each time, so that they never mix scripts of two versions."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        answer = super().file_response(*arguments, **options)
        answer.headers["cache-control"] = "no-cache"
        return answer


static_files = _Fresh(directory=_HERE / "static")
"""Scripts, styles and pictures. They say nothing of runs, and need no session."""


def _modules(name: str) -> list[str]:
    """Names of a script and of those that it imports, which browsers load at once instead of one after another."""
    found = [name]
    for each in found:  # grows meanwhile
        imported = re.findall(r'from "\./(\S+)"', (_HERE / "static" / each).read_text())
        found += [other for other in dict.fromkeys(imported) if other not in found]
    return found


_MODULES = {path: _modules(f"{path[1:] or 'runs'}.js") for path in (*_TITLES, "/run")}


async def page(request: Request, backend: Backed, asking: Asking) -> Response:
    path = request.url.path
    return _frame(request, backend, asking, path, _TITLES[path])


for _path in _TITLES:
    router.get(_path)(page)


@router.get("/runs/{run_id}")
async def run(run_id: str, request: Request, backend: Backed, asking: Asking) -> Response:
    if not re.fullmatch(RUN_ID, run_id):
        return _html("unknown.html", 404)
    return _frame(request, backend, asking, "/run", run_id, run=run_id)


@router.get(SIGN_IN)
async def sign_in(
    after: Annotated[str, Query(max_length=512)] = "/", once: Annotated[str, Query(max_length=512)] = ""
) -> Response:
    """Show the form. A link's token is only used when it is sent, so that nothing that looks ahead uses it up."""
    return _html("login.html", after=_local(after), once=once)


@router.post(f"{SIGN_IN}/link")
async def sign_in_link(request: Request, backend: Backed) -> dict[str, str]:
    """Return a path that signs a browser in once, as the holder of the key that asks."""
    key = sent_key(request.headers.get("authorization", ""))
    if not key:
        raise Forbidden("a sign-in link needs an API key; a session cannot ask for one")
    return {"path": f"{SIGN_IN}?once={backend.sign_in_links.make(key)}"}


@router.post(SIGN_IN)
async def signed_in(
    request: Request,
    backend: Backed,
    key: Annotated[str, Form(max_length=512)] = "",
    once: Annotated[str, Form(max_length=512)] = "",
    after: Annotated[str, Form(max_length=512)] = "/",
) -> Response:
    """Exchange a key, or the token of a link, for a session. The audit log has the attempt, whether it succeeds or not.

    Another site's form is refused: it would sign people in as somebody else.
    """
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return _html("login.html", 403, after="/", problem="This form was sent from another site.")
    key = key.strip()
    if shown := shown_prefix(key):
        audit.touched(shown)
    if wait_s := backend.sign_in_limit.wait_s(request.client.host if request.client else "", key or once):
        problem = f"Too many sign-in attempts from this address or with this key. Wait {math.ceil(wait_s)} s."
        refusal = _html("login.html", 429, after=_local(after), problem=problem)
        refusal.headers["retry-after"] = str(math.ceil(wait_s))
        return refusal
    key_sha256 = backend.sign_in_links.take(once) if once else hash_key(key)
    if (begun := await backend.sign_ins.begin(key_sha256) if key_sha256 else None) is None:
        problem = "This key is unknown, revoked or expired."
        if once:
            problem = "This link was already used, or is older than ten minutes. `longshore dev --link` prints another."
        return _html("login.html", 401, after=_local(after), problem=problem)
    token, request.state.principal = begun
    answer = RedirectResponse(_local(after), 303, headers=_HEADERS)
    answer.set_cookie(
        COOKIE, token, max_age=LASTS_S, httponly=True, samesite="strict", secure=_is_secure(request, backend)
    )
    return answer


@router.post("/logout", status_code=204)
async def sign_out(request: Request, backend: Backed) -> Response:
    await backend.sign_ins.end(request.cookies.get(COOKIE, ""))
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=_is_secure(request, backend))
    return answer


def _frame(request: Request, backend: Backend, asking: Principal, path: str, title: str, **more: str) -> Response:
    """Return the frame of a page, with what its script knows without asking."""
    settings, token = backend.settings, request.cookies.get(COOKIE, "")
    ui = settings.temporal_ui
    told = more | {
        "tenant": asking.tenant,
        "temporal": f"{ui.rstrip('/')}/namespaces/{settings.temporal_namespace}/workflows" if ui else "",
        "wandb": settings.wandb_mode,
        "rates": _RATES,
        "rank": Lora().rank,
        "scopes": ALL_SCOPES,
        "notices": [notice for notice in NOTICE_TYPES if notice != "ping"],
    }
    return _html(
        "frame.html",
        asking=asking,
        csrf=csrf_token(token) if token else "",
        is_plain_list=path == "/" and not request.query_params,
        modules=_MODULES[path],
        path=path,
        title=title,
        told=told,
    )


def _html(name: str, status: int = 200, **values: Any) -> Response:
    return HTMLResponse(_frames.get_template(name).render(**values), status, _HEADERS)


def _local(after: str) -> str:
    """Return the path to go to after signing in: the requested one if it is on this site, else the start page."""
    parts = urlsplit(after)
    ours = not parts.scheme and not parts.netloc and is_page(parts.path) and "\\" not in after
    return after if ours else "/"


def _is_secure(request: Request, backend: Backend) -> bool:
    return request.url.scheme == "https" or backend.settings.api_url.startswith("https:")
