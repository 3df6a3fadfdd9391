"""A preview shows rows as they will be trained on, and what a run would say of the whole."""

import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.tokenizing.render_prompts import PromptsRequest, write_prompts
from activities.tokenizing.tokenize import PreviewDataset, TokenizeRequest, preview_of, write_units
from activities.tokenizing.units import PackRequest, write_plan
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact
from longshore.views import Cut, Preview, PreviewRequest, PreviewStart
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.settings import DownloadSettings, Settings
from tests.activities.templates import open_model, write_model

SCORED = {"prompt": "How many?", "completion": "12 sacks.", "score": 0.5}
ARTIFACT = Artifact(uri="file:///a", sha256="0" * 64)


def look(tmp_path: Path, rows: list[Any], cut: Cut | None = None, **fields: Any) -> Preview:
    folder = tmp_path / "rows"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = open_model(write_model(tmp_path / "model", "chatml"))
    return preview_of(folder, tokenizer, PreviewRequest(source=DatasetSource(uri="f"), model_uri="m", **fields), cut)


def row(k: int) -> dict[str, str]:
    return {"prompt": f"q{k}", "completion": f"a{k}"}


def test_spans_say_what_is_trained(tmp_path: Path) -> None:
    preview = look(tmp_path, [row(k) for k in range(30)], num_rows=3)
    assert len(preview.rows) == 3 and preview.is_complete and preview.problem is None
    shown = preview.rows[2]
    assert [(span.text, span.trained) for span in shown.spans] == [
        ("<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n", False),
        ("a2<|im_end|>", True),
        ("\n", False),
    ]
    assert (shown.place, shown.fate, shown.is_cut) == ("rows.jsonl:3", "kept", False)
    assert preview.report.num_rows == 30


def test_lost_rows_are_shown_with_their_fate_and_the_problem_is_told(tmp_path: Path) -> None:
    preview = look(tmp_path, [row(0), {"prompt": "crate " * 99, "completion": "b"}], max_tokens=40)
    assert [shown.fate for shown in preview.rows] == ["kept", "too_long"]
    assert not any(span.trained for span in preview.rows[1].spans)
    assert preview.problem and "1 of 2 rows would be lost" in preview.problem


def test_only_so_many_rows_are_counted(tmp_path: Path) -> None:
    preview = look(tmp_path, [row(k) for k in range(50)], max_rows=20)
    assert preview.report.num_rows == 20 and not preview.is_complete
    late = look(tmp_path / "late", [row(k) for k in range(50)], max_seconds=1e-9)
    assert late.report.num_rows == 1 and not late.is_complete


def test_prompts_are_refused_in_the_words_of_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "crate " * (1 + k)} for k in range(20)]
    for limit, share in ((12, 0.1), (3, 1.0), (40, 1.0)):
        folder = tmp_path / f"{limit}-{share}"
        preview = look(folder, rows, max_tokens=limit, max_lost_fraction=share, are_prompts=True)
        asked = PromptsRequest(
            dataset=ARTIFACT,
            model=ARTIFACT,
            source=DatasetSource(uri="f"),
            max_prompt_tokens=limit,
            max_lost_fraction=share,
        )
        written = folder / "written"
        written.mkdir()
        problem = None
        try:
            report = write_prompts(folder / "rows", open_model(folder / "model"), asked, written)
        except InvalidInput as error:
            problem = str(error)
        assert preview.problem == problem and (problem is None) == (limit == 40)
        if problem is None:
            assert preview.report.lost == report.lost and preview.report.num_kept == report.num_prompts
            assert preview.report.longest_tokens == report.longest_tokens


def test_with_a_cut_the_length_of_a_run_is_told(tmp_path: Path) -> None:
    rows = [{"prompt": "crate " * k, "completion": f"a{k}"} for k in range(1, 24)]
    cut = Cut(seed=3, epochs=1.3, batch_size=4)
    preview = look(tmp_path, rows, cut=cut, max_tokens=30)
    tokenize = TokenizeRequest(
        dataset=ARTIFACT, model=ARTIFACT, source=DatasetSource(uri="f"), max_tokens=30, max_lost_fraction=1
    )
    write_units(tmp_path / "rows", open_model(tmp_path / "model"), tokenize, tmp_path / "units")
    request = PackRequest(units=ARTIFACT, bin_tokens=30, **cut.model_dump())
    plan = write_plan(Units.read_lengths(tmp_path / "units"), request, tmp_path / "plan")
    assert preview.length is not None and preview.report.num_kept < 23
    assert (preview.length.steps, preview.length.tokens) == (plan.num_steps, plan.num_tokens)


def test_a_preview_fits_into_a_payload(tmp_path: Path) -> None:
    long = {"prompt": "船" * 20_000, "completion": "é🚢" * 20_000}
    preview = look(tmp_path, [long] * 6, num_rows=6, max_tokens=10**6)
    assert len(preview.model_dump_json().encode()) < 200_000
    assert preview.rows[0].is_cut and preview.rows[0].num_tokens > 40_000


def test_the_activity_downloads_looks_and_cleans_up(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(1)) + "\n")
    settings = Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path, tiny_model.parent)))
    request = PreviewRequest(source=DatasetSource(uri=f"file://{tmp_path}/rows.jsonl"), model_uri=tiny_model.as_uri())
    start = PreviewStart(tenant="default", request=request)
    preview = ActivityEnvironment().run(PreviewDataset(HostContext(settings)).preview, start)
    assert preview.report.num_rows == 1 and preview.rows[0].spans[1].text == "a1<|im_end|>"
    assert not [path for path in (tmp_path / "root" / "store").rglob("runs/**/*") if path.is_file()]
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: invalid JSON"):
        ActivityEnvironment().run(PreviewDataset(HostContext(settings)).preview, start)


@pytest.mark.parametrize("are_prompts", [False, True])
def test_a_preview_of_a_folder_says_which_files_it_read(tmp_path: Path, tiny_model: Path, are_prompts: bool) -> None:
    for k, name in enumerate(("train", "validation", "test")):
        (tmp_path / "hub").mkdir(exist_ok=True)
        (tmp_path / "hub" / f"{name}.jsonl").write_text(json.dumps(row(k)) + "\n")
    settings = Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path, tiny_model.parent)))
    source = DatasetSource(uri=f"file://{tmp_path}/hub")
    request = PreviewRequest(source=source, model_uri=tiny_model.as_uri(), are_prompts=are_prompts)
    preview = ActivityEnvironment().run(
        PreviewDataset(HostContext(settings)).preview, PreviewStart(tenant="default", request=request)
    )
    [told] = preview.report.warnings
    assert "files 'train.jsonl' were read, and 'test.jsonl', 'validation.jsonl' left" in told
    assert [shown.place for shown in preview.rows] == ["train.jsonl:1"]


def test_what_a_reward_model_learns_is_checked(tmp_path: Path) -> None:
    """Scores and margins are read: a target is an answer or a score."""
    found = look(tmp_path / "scores", [SCORED, SCORED | {"score": 2}], numbers=("score",))
    assert (found.report.num_kept, found.report.num_targets, found.rows) == (2, 2, ())
    pair = {"prompt": "How many?", "chosen": "12 sacks.", "rejected": "None."}
    found = look(tmp_path / "pairs", [pair, pair | {"margin": 0.5}], numbers=("margin",))
    assert (found.report.num_kept, found.report.num_targets) == (2, 4)
