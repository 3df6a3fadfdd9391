"""`longshore import openai`: read an account's fine-tuning jobs by OpenAI's API, and start them here."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.render import FAILED, NOT_FOUND, USAGE, Stop, plain, print_table, say, stop_of

if TYPE_CHECKING:
    from longshore import Client
    from service.cli.openai_account import Account, TheirJob

State = Literal["started", "would start", "imported before", "waits", "no counterpart", "left out"]
_THEIR_URL = "https://api.openai.com/v1"
_MARK = "openai_job"
_UPLOAD_S = 3600.0
_EXAMPLES = """\b
Examples:
  export OPENAI_API_KEY=sk-...
  longshore import openai --dry-run
  longshore import openai --model gpt-4.1-mini-2025-04-14=Qwen/Qwen3-8B
"""
_PLAIN = ("n_epochs", "batch_size", "learning_rate_multiplier")
# Hyperparameters that a method has here, by the names that they have there.
_KNOWN = {
    "supervised": _PLAIN,
    "dpo": (*_PLAIN, "beta"),
    "reinforcement": (*_PLAIN, "compute_multiplier", "eval_interval", "eval_samples"),
}
_SAYS_NOTHING = (None, "auto", "default")
app = group("import", help="Import jobs and data from elsewhere.", epilog=_EXAMPLES)


@dataclass
class Imported:
    """What became of one job. `left_out`: its settings that have no counterpart here."""

    job: str
    state: State
    why: str = ""
    model: str | None = None
    run: str | None = None
    left_out: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)


@app.callback()
def _group() -> None:
    """Keep `openai` a command of its group, though it is the only one."""


@command(app)
def openai(
    client: "Client",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="THEIRS=OURS", help="The model to train here instead of one of OpenAI's."),
    ] = None,
    job: Annotated[list[str] | None, typer.Option(metavar="ftjob-ID", help="Import only these jobs.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which runs would start, without starting them.")
    ] = False,
    base_url: Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="Base URL of OpenAI's API.")] = _THEIR_URL,
    max_file_bytes: Annotated[int, typer.Option(min=1, help="Size of the longest file that is read.")] = 1 << 30,
) -> CommandAnswer:
    """Start the fine-tuning jobs of an account at OpenAI here, with their files, settings and graders.

    The account's key is read from OPENAI_API_KEY. A job that was imported before is not started again.
    """
    from service.cli.openai_account import Account

    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        raise Stop("OPENAI_API_KEY is not set: the key of the account that is read", USAGE)
    with Account(base_url, key, max_file_bytes) as account:
        found = _Import(client, account, _named(model or ()), dry_run).all(job)

    def show() -> None:
        rows = [(each.job, each.state, each.run or "", plain("; ".join(_notes(each)))) for each in found]
        print_table(("job", "", "run", ""), rows)
        if any(each.checkpoints for each in found):
            say("checkpoints stay where they are: OpenAI gives no weights away; --json names them")

    is_partial = any(each.state in ("waits", "no counterpart") for each in found)
    return CommandAnswer(found, show, FAILED if is_partial else 0)


def _notes(imported: Imported) -> list[str]:
    left_out = [f"without {', '.join(imported.left_out)}"] if imported.left_out else []
    return [*([imported.why] if imported.why else []), *left_out]


def _named(given: "list[str] | tuple[str, ...]") -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if not all(theirs and ours for theirs, _, ours in pairs):
        raise Stop("--model: give a name of OpenAI's and one of ours, as gpt-4.1-mini-2025-04-14=Qwen/Qwen3-8B", USAGE)
    return {theirs: ours for theirs, _, ours in pairs}


class _NoCounterpart(Exception):
    """A job cannot be started here. Its text says why."""


class _Waits(Exception):
    """A job starts from a checkpoint that another one has not made yet."""


class _Import:
    """One import of an account."""

    def __init__(self, client: "Client", account: "Account", models: Mapping[str, str], is_dry: bool) -> None:
        self._client = client
        self._account = account
        self._models = models
        self._is_dry = is_dry
        self._ours: dict[str, dict[str, Any] | None] = {}  # jobs here, by the names of the models that theirs made
        self._uploaded: dict[str, str] | None = None

    def all(self, wanted: list[str] | None) -> list[Imported]:
        """Import the jobs that succeeded, oldest first, since a job may start from an older one's model."""
        jobs = self._account.jobs()
        if missing := sorted(set(wanted or ()) - {each.id for each in jobs}):
            raise Stop(f"--job: the account has no job {', '.join(missing)}", NOT_FOUND)
        return [self._one(each) for each in jobs if wanted is None or each.id in wanted]

    def _one(self, job: "TheirJob") -> Imported:
        if job.status != "succeeded":
            return Imported(job.id, "left out", f"its status is {_printable(job.status)}")
        checkpoints = [_printable(name) for name in self._account.checkpoints(job.id)]
        before = self._found(job)
        if before is not None:
            self._note(job, before)
            return Imported(job.id, "imported before", "", before["model"], before["id"], [], checkpoints)
        from longshore.client import ServiceError

        try:
            body, left_out = translated(job, self._model_of(job))
            if self._is_dry:
                self._note(job, None)
                return Imported(job.id, "would start", "", body["model"], None, left_out, checkpoints)
            for place in ("training_file", "validation_file"):
                if body.get(place):
                    body[place] = self._file(body[place])
            ours = self._client.call(
                "POST", "/v1/fine_tuning/jobs", json=body, headers={"idempotency-key": f"openai-{job.id}"}
            )
        except _Waits as reason:
            return Imported(job.id, "waits", str(reason), None, None, [], checkpoints)
        except _NoCounterpart as reason:
            return Imported(job.id, "no counterpart", str(reason), None, None, [], checkpoints)
        except (Stop, ServiceError) as refusal:
            found = stop_of(refusal) if isinstance(refusal, ServiceError) else refusal
            if found.advice:  # of the service or the key, and not of this job
                raise
            return Imported(job.id, "no counterpart", _printable(found.message), None, None, [], checkpoints)
        self._note(job, ours)
        return Imported(job.id, "started", "", ours["model"], ours["id"], left_out, checkpoints)

    def _found(self, job: "TheirJob") -> dict[str, Any] | None:
        """Return the job here that an earlier import has started."""
        page = self._client.call("GET", "/v1/fine_tuning/jobs", params={"limit": 1, f"metadata[{_MARK}]": job.id})
        return page["data"][0] if page["data"] else None

    def _note(self, job: "TheirJob", ours: dict[str, Any] | None) -> None:
        if job.fine_tuned_model:
            self._ours[job.fine_tuned_model] = ours

    def _model_of(self, job: "TheirJob") -> str:
        theirs = job.model
        if theirs in self._models:
            return self._models[theirs]
        if theirs in self._ours:
            ours = self._ours[theirs]
            if ours is None or not ours["fine_tuned_model"]:  # told when it has succeeded
                name = ours["id"] if ours else _printable(theirs)
                raise _Waits(f"it goes on from what {name} makes: import again when that has succeeded")
            return str(ours["fine_tuned_model"])
        if theirs.startswith("ft:"):
            raise _NoCounterpart(f"it goes on from {_printable(theirs)}, which no imported job makes")
        raise _NoCounterpart(f"say what is trained in the place of its model: --model {_printable(theirs)}=...")

    def _file(self, file_id: str) -> str:
        """Return the id here of a file at OpenAI. It is copied once: its name contains the original's id."""
        name = f"{file_id}-{_plain(self._account.file(file_id).filename)}"
        if self._uploaded is None:
            self._uploaded = self._files()
        if name not in self._uploaded:
            with tempfile.TemporaryFile() as copy:
                self._account.read(file_id, copy)
                copy.seek(0)
                form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": (name, copy)}}
                self._uploaded[name] = self._client.call("POST", "/v1/files", **form, timeout_s=_UPLOAD_S)["id"]
        return self._uploaded[name]

    def _files(self) -> dict[str, str]:
        found: dict[str, str] = {}
        after: dict[str, str] = {}
        while True:
            params = {"purpose": "fine-tune", "limit": 1000, **after}
            page = self._client.call("GET", "/v1/files", params=params)
            found |= {each["filename"]: each["id"] for each in page["data"]}
            if not page["has_more"]:
                return found
            after = {"after": page["data"][-1]["id"]}


def translated(job: "TheirJob", model: str) -> tuple[dict[str, Any], list[str]]:
    """Return a job's request here, with their ids of files, and the settings that it is without.

    Raises:
        _NoCounterpart: its method is none that there is here.
    """
    method: dict[str, Any] = dict(job.method or {"type": "supervised"})
    kind = method.get("type")
    if kind not in _KNOWN:
        raise _NoCounterpart(f"there is no method {_printable(str(kind))}")
    settings = method.get(kind)
    settings = dict(settings) if isinstance(settings, dict) else {}
    of_method = settings.pop("hyperparameters", None)
    given = (of_method if isinstance(of_method, dict) else None) or job.hyperparameters or {}
    known = {name: given[name] for name in _KNOWN[kind] if given.get(name) is not None}
    ours: dict[str, Any] = {"hyperparameters": known}
    if kind == "reinforcement":
        ours["grader"] = settings.pop("grader", None)
    left_out = [f"{kind}.{_printable(name)}" for name, value in settings.items() if value not in _SAYS_NOTHING]
    left_out += [_printable(name) for name in given if name not in known and given[name] not in _SAYS_NOTHING]
    left_out += ["integrations"] if job.integrations else []
    metadata = dict(list((job.metadata or {}).items())[:15])
    left_out += ["a pair of metadata"] if len(metadata) < len(job.metadata or {}) else []
    body = {
        "model": model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "suffix": job.suffix,
        "seed": job.seed,
        "method": {"type": kind, kind: ours},
        "metadata": metadata | {_MARK: job.id},
    }
    return {name: value for name, value in body.items() if value is not None}, left_out


def _printable(text: str) -> str:
    from service.cli.openai_account import printable

    return printable(text)


def _plain(name: str) -> str:
    """Return the last part of a file's name, with _ for anything other than letters, digits, dots and dashes."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in last)[-80:] or "data.jsonl"
