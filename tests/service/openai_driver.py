"""What a user of OpenAI's client does, whichever version it is of: run with that version on PYTHONPATH, tells JSON.

python -m tests.service.openai_driver URL FLAKY_URL KEY FOLDER

FLAKY_URL: of a proxy that loses first answers. FOLDER: for a file to be uploaded.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import openai

ROW = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}) + "\n"
MODEL = "file:///models/tiny"
WAITS, FAILS = 2, 1  # seeds: what the stand-in workflow does
SMALL = {"longshore": {"rank": 4, "max_tokens": 256}}
CHECK = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
PYTHON = {
    "type": "python",
    "name": "length",
    "source": "def grade(sample, item):\n    return len(sample['output_text'])",
}


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    """How the client tells of a refusal."""
    try:
        call()
    except openai.APIStatusError as error:
        return {
            "class": type(error).__name__,
            "status": error.status_code,
            "param": error.param,
            "type": error.type,
            "code": error.code,
            "message": error.message,
            "request_id": error.request_id,
        }
    raise AssertionError("nothing was refused")


def files(client: openai.OpenAI) -> dict[str, Any]:
    names = [f"train {n}.jsonl" for n in range(3)]
    made = [
        client.files.create(file=(name, ROW.encode() * (n + 1)), purpose="fine-tune") for n, name in enumerate(names)
    ]
    again = client.files.create(file=(names[0], ROW.encode()), purpose="fine-tune")
    held = client.files.create(file=("held.jsonl", BytesIO(ROW.encode())), purpose="evals")
    # No file of these is deleted, so pages of them go on whatever the other versions' sessions do.
    listed = [item.id for item in client.files.list(limit=2, purpose="fine-tune")]
    also_held = [item.id for item in client.files.list(limit=100)]
    oldest = [item.id for item in client.files.list(limit=2, order="asc", purpose="fine-tune")]
    client.files.delete(held.id)
    return {
        "made": [item.model_dump() for item in made],
        "again": again.id,
        "held": held.model_dump(),
        "listed": listed,
        "also_held": also_held,
        "oldest": oldest,
        "retrieved": client.files.retrieve(made[1].id).model_dump(),
        "content": client.files.content(made[1].id).text,
        "gone": refused(lambda: client.files.retrieve(held.id)),
        "purpose": refused(lambda: client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")),
        "empty": refused(lambda: client.files.create(file=("a.jsonl", b""), purpose="fine-tune")),
        "after": refused(lambda: client.files.list(after="file-none")),
    }


def uploads(client: openai.OpenAI, folder: Path) -> dict[str, Any]:
    content = ROW.encode() * 1000

    def announced(**changes: Any) -> Any:
        given = {"filename": "big.jsonl", "bytes": len(content), "mime_type": "text/jsonl", "purpose": "fine-tune"}
        return client.uploads.create(**(given | changes))

    upload = announced()
    half = len(content) // 2
    second = client.uploads.parts.create(upload.id, data=content[half:])
    first = client.uploads.parts.create(upload.id, data=content[:half])
    ordered = [first.id, second.id]
    digest = hashlib.md5(content).hexdigest()
    other = "0" * 32
    md5 = refused(lambda: client.uploads.complete(upload.id, part_ids=ordered, md5=other))
    short = refused(lambda: client.uploads.complete(upload.id, part_ids=ordered[:1]))
    unknown = refused(lambda: client.uploads.complete(upload.id, part_ids=[first.id, "part_none"]))
    done = client.uploads.complete(upload.id, part_ids=ordered, md5=digest)
    again = client.uploads.complete(upload.id, part_ids=ordered, md5=digest)
    assert done.file is not None and again.file is not None
    cancelled = client.uploads.cancel(announced().id)
    path = folder / "chunked.jsonl"
    path.write_bytes(content)
    chunked = client.uploads.upload_file_chunked(
        file=path, mime_type="text/jsonl", purpose="fine-tune", part_size=30_000
    )
    assert chunked.file is not None
    return {
        "created": upload.model_dump(),
        "md5": md5,
        "short": short,
        "unknown": unknown,
        "done": done.model_dump(),
        "again": again.file.id,
        "is_content": client.files.content(done.file.id).content == content,
        "is_chunked": client.files.content(chunked.file.id).content == content,
        "cancelled": cancelled.status,
        "late": refused(lambda: client.uploads.parts.create(cancelled.id, data=b"x")),
        "purpose": refused(lambda: announced(purpose="vision")),
    }


def jobs(client: openai.OpenAI) -> dict[str, Any]:
    file = client.files.create(file=("train.jsonl", ROW.encode() * 120), purpose="fine-tune")
    evals = client.files.create(file=("evals.jsonl", ROW.encode()), purpose="evals")
    create = client.fine_tuning.jobs.create
    version = openai.__version__
    first = first_job(client, file.id)
    others = [create(model=MODEL, training_file=file.id, metadata={"client": version, "n": str(n)}) for n in range(3)]
    odd = {'a "quoted" \\ name.é[0]': version}
    labelled = create(model=MODEL, training_file=file.id, metadata=odd)
    dpo = create(
        model=MODEL,
        training_file=file.id,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}},
        metadata={"kind": "dpo"},
    )
    waits = create(model=MODEL, training_file=file.id, seed=WAITS)
    paused = create(model=MODEL, training_file=file.id, seed=WAITS)
    failed = create(model=MODEL, training_file=file.id, seed=FAILS)
    client.fine_tuning.jobs.pause(paused.id)
    done = until(client, first.id, "succeeded")
    result = {
        "first": first.model_dump(),
        "done": done.model_dump(),
        "dpo": dpo.model_dump(),
        "failed": until(client, failed.id, "failed").model_dump(),
        "paused": until(client, paused.id, "paused").model_dump(),
        "waits": client.fine_tuning.jobs.retrieve(waits.id).status,
        "others": [job.id for job in others],
        "found": [job.id for job in client.fine_tuning.jobs.list(limit=2, extra_query={"metadata[client]": version})],
        "one": [job.id for job in client.fine_tuning.jobs.list(metadata={"client": version, "n": "1"})],
        "labelled": labelled.id,
        "odd": [job.id for job in client.fine_tuning.jobs.list(metadata=odd)],
        "events": [event.model_dump() for event in client.fine_tuning.jobs.list_events(first.id, limit=2)],
        "checkpoints": [item.id for item in client.fine_tuning.jobs.checkpoints.list(first.id)],
        "succeeded_twice": refused(lambda: client.fine_tuning.jobs.cancel(first.id)),
    }
    client.fine_tuning.jobs.cancel(waits.id)
    client.fine_tuning.jobs.resume(paused.id)
    return result | {
        "cancelled": until(client, waits.id, "cancelled").model_dump(),
        "resumed": until(client, paused.id, "succeeded").status,
        "refusals": refused_jobs(client, file.id, evals.id, first.id),
    }


def first_job(client: openai.OpenAI, file_id: str) -> Any:
    """With all that a job may be told."""
    version = openai.__version__
    return client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=file_id,
        validation_file=file_id,
        suffix=f"Harbour Bot {version}",
        metadata={"team": "quay", "client": version},
        integrations=[{"type": "wandb", "wandb": {"project": "harbour", "tags": ["a"]}}],
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 0.5}},
        },
        extra_body=SMALL,
    )


def refused_jobs(client: openai.OpenAI, file_id: str, evals_id: str, job_id: str) -> dict[str, Any]:
    """What is no job, and who may not ask for one."""
    create = client.fine_tuning.jobs.create
    return {
        "file": refused(lambda: create(model=MODEL, training_file="file-none")),
        "purpose": refused(lambda: create(model=MODEL, training_file=evals_id)),
        "ours": refused(
            lambda: create(model=MODEL, training_file=file_id, extra_body={"longshore": {"group_size": 4}})
        ),
        "reference": refused(
            lambda: create(
                model=MODEL,
                training_file=file_id,
                method={"type": "dpo"},
                extra_body={"longshore": {"reference": "nobody"}},
            )
        ),
        "hosted": refused(lambda: create(model="gpt-4o-mini", training_file=file_id)),
        "job": refused(lambda: client.fine_tuning.jobs.retrieve("ftjob-none")),
        "event": refused(lambda: client.fine_tuning.jobs.list_events(job_id, after="ftevent-none")),
        "key": refused(lambda: client.with_options(api_key="sk-nobody").fine_tuning.jobs.list()),
    }


def graders(client: openai.OpenAI) -> dict[str, Any]:
    run, validate = client.fine_tuning.alpha.graders.run, client.fine_tuning.alpha.graders.validate
    multi = {"type": "multi", "name": "both", "graders": {"a": CHECK, "b": PYTHON}, "calculate_output": "a + b"}
    broken = PYTHON | {"source": "def grade(sample, item):\n    return 1 / 0"}
    return {
        "same": run(grader=CHECK, model_sample="4", item={"answer": "4"}).model_dump(),
        "multi": run(grader=multi, model_sample="four", item={"answer": "4"}).model_dump(),
        "broken": run(grader=broken, model_sample="4", item={}).model_dump(),
        "missing": run(grader=CHECK, model_sample="4", item={}).model_dump(),
        "valid": validate(grader=PYTHON).model_dump(),
        "operation": refused(lambda: validate(grader=CHECK | {"operation": "near"})),
    }


def retried(client: openai.OpenAI) -> dict[str, Any]:
    """The same job twice, each answer lost once; then twice under one key."""
    file = client.files.create(file=("train.jsonl", ROW.encode()), purpose="fine-tune")
    create = client.fine_tuning.jobs.create
    label = {"retried": openai.__version__}
    jobs = [create(model=MODEL, training_file=file.id, metadata=label).id for _ in range(2)]
    listed = [job.id for job in client.fine_tuning.jobs.list(extra_query={"metadata[retried]": label["retried"]})]
    keyed = [
        create(model=MODEL, training_file=file.id, extra_headers={"Idempotency-Key": f"mine {openai.__version__}"}).id
        for _ in range(2)
    ]
    return {"jobs": jobs, "listed": listed, "keyed": keyed}


def until(client: openai.OpenAI, job_id: str, status: str) -> Any:
    """The job as soon as it has a status."""
    end = time.monotonic() + 120
    while (job := client.fine_tuning.jobs.retrieve(job_id)).status != status:
        assert time.monotonic() < end, job
        time.sleep(0.2)
    return job


def main() -> None:
    url, flaky_url, key, folder = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key=key, timeout=60)
    told = {
        "version": openai.__version__,
        "files": files(client),
        "uploads": uploads(client, Path(folder)),
        "jobs": jobs(client),
        "graders": graders(client),
        "retried": retried(client.with_options(base_url=flaky_url)),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
