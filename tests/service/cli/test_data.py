"""`validate` and `preview` with the real workflow, a real tokenizer and real rows."""

import json
from pathlib import Path

import pytest

from tests.service.conftest import Service


@pytest.fixture
def options(tiny_model: Path, tmp_path: Path) -> list[str]:
    rows = [
        {"messages": [{"role": "user", "content": f"Quay {n}?"}, {"role": "assistant", "content": f"{n} crates."}]}
        for n in range(12)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model", str(tiny_model), "--dataset", str(path)]


def test_preview_marks_what_is_trained(service: Service, options) -> None:
    answer = service.cli("preview", *options, "--rows", "2")
    assert answer.code == 0, answer
    assert "⟦1 crates.<|im_end|>⟧" in answer.stdout
    assert "Quay 1?<|im_end|>" in answer.stdout and "⟦Quay" not in answer.stdout
    assert "2 crates" not in answer.stdout
    coloured = service.cli("preview", *options, "--rows", "1", FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[32m0 crates.<|im_end|>\x1b[0m" in coloured and "⟦" not in coloured
    spans = service.cli("preview", *options, "--rows", "1", "--json").json["rows"][0]["spans"]
    assert [span["text"] for span in spans if span["trained"]] == ["0 crates.<|im_end|>"]


def test_preview_shows_both_answers_of_a_pair(service: Service, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "Quay 1?", "chosen": "7 crates.", "rejected": "None."}) + "\n")
    options = ["--model", str(tiny_model), "--dataset", str(path)]
    answer = service.cli("preview", *options)
    assert answer.code == 0, answer
    _, _, told = answer.stdout.partition("assistant\n")
    assert told.startswith("⟦7 crates.<|im_end|>⟧\n\nrejected:\n⟦None.<|im_end|>⟧"), answer.stdout
    coloured = service.cli("preview", *options, FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[32m7 crates.<|im_end|>\x1b[0m" in coloured and "\x1b[31mNone.<|im_end|>\x1b[0m" in coloured
    assert service.cli("validate", *options, "--json").json["report"]["format"] == "preference"


def test_a_look_leaves_no_file_behind_but_what_stood_there(service: Service, options) -> None:
    def names() -> list[str]:
        return [file["file_id"] for file in service.cli("files", "ls", "--json").json]

    before = names()
    whole = service.cli("validate", *options, "--json").json
    assert (whole["report"]["num_rows"], whole["report"]["num_kept"], whole["problem"]) == (12, 12, None)
    assert "rows" not in whole and service.cli("preview", *options).code == 0
    refused = service.cli("validate", *options, "--max-tokens", "8")
    assert refused.code == 100 and "a run would refuse this dataset" in refused.stdout
    assert names() == before
    [kept] = service.cli("files", "upload", options[-1], "--json").json
    assert kept["is_new"]
    assert service.cli("validate", *options).code == 0
    assert names() == [kept["file_id"], *before], "a file that the user had sent stays"
    assert service.cli("files", "rm", kept["file_id"]).code == 0


def test_a_bad_line_and_a_wrong_option_are_named(service: Service, options, tmp_path: Path) -> None:
    wrong = service.cli("preview", *options, "--prompt-field", "q")
    assert wrong.code == 2 and wrong.stderr.startswith("error: --dataset: ") and "go together" in wrong.stderr
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n{bad\n')
    answer = service.cli("validate", *options)
    assert answer.code == 100
    assert "chats.jsonl:2: " in answer.stderr
    assert "Traceback" not in answer.stderr + answer.stdout


def test_the_api_gives_the_same_as_an_error_body(service: Service, tiny_model: Path, tmp_path: Path) -> None:
    body = {"source": {"uri": (tmp_path / "none.jsonl").as_uri()}, "model_uri": tiny_model.as_uri()}
    with service.http() as api:
        answer = api.post("/preview", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["type"] == "invalid_input"
        assert "none.jsonl" in answer.json()["error"]["message"]
        assert api.post("/validate", json=body | {"num_rows": 1000}).json()["error"]["place"] == "num_rows"
