"""Answers whose parts weigh differently: which tokens have which weight, by template, and what is refused."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from activities.tokenizing.tokenizer import ModelTokenizer
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.runs.dataset_runs import SFTRun
from tests.activities.templates import TEMPLATES, open_model, write_model
from tests.activities.tokenizing.test_tokenize import tokenize

ENDS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "qwen": "<|im_end|>", "mistral": "</s>", "blocks": "<|im_end|>"}


def chat(*parts: tuple[str, float | None], weight: float | None = None) -> dict[str, Any]:
    content = [{"type": "text", "text": text} | ({} if w is None else {"weight": w}) for text, w in parts]
    answer = {"role": "assistant", "content": content} | ({} if weight is None else {"weight": weight})
    said = {"role": "assistant", "content": "before"}
    return {"messages": [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}, answer]}


def weighed(folder: Path, tokenizer: ModelTokenizer) -> list[tuple[str, float]]:
    """Return the texts of neighbouring targets of one weight, of the only unit."""
    with Units(folder) as units:
        row = units.read_bin(np.array([0]))
    targets = zip(row.hidden_index_N.tolist(), row.label_N.tolist(), row.weight_N.tolist(), strict=True)
    runs = groupby(enumerate(targets), key=lambda each: (each[1][0] - each[0], each[1][2]))
    return [(tokenizer.decode([label for _, (_, label, _) in run]), weight) for (_, weight), run in runs]


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_part_s_tokens_have_its_weight(tmp_path: Path, template: str) -> None:
    """The token that ends the turn weighs as the message; other answers are trained as ever."""
    tokenizer = open_model(write_model(tmp_path / "model", template))
    tokenize(tmp_path, tokenizer, chat(("12 sacks.", 0.5), (" 7 barrels.", 0), (" None", None), weight=2))
    before, *around, first, last = weighed(tmp_path / "units", tokenizer)
    assert "before" in before[0] and before[1] == 1
    assert (first[0].lstrip(), first[1], last) == ("12 sacks.", 1.0, (f" None{ENDS[template]}", 2.0))
    assert {weight for _, weight in around} == (
        {2.0} if template == "qwen" else set()
    )  # no thoughts, which it writes in front


def test_a_token_in_two_parts_has_the_greater_weight(tmp_path: Path) -> None:
    tokenizer = open_model(write_model(tmp_path / "model", "chatml"))
    assert len(tokenizer.tokens_of(" crane")) == 1
    for name, weights in {"falls": (3.0, 0.5), "rises": (0.5, 3.0), "ends": (3.0, 0.0)}.items():
        (folder := tmp_path / name).mkdir()
        tokenize(folder, tokenizer, chat(("The cr", weights[0]), ("ane lifts", weights[1])))
        told = dict(each for each in weighed(folder / "units", tokenizer)[1:])
        assert any(" crane" in text and weight == 3 for text, weight in told.items()), (name, told)


def test_what_does_not_line_up_is_refused(tmp_path: Path) -> None:
    """An answer that the template changes, or that is empty; and fields that are not there."""
    tokenizer = open_model(write_model(tmp_path / "model", "chatml"))
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1.*does not write the answer as it stands here"):
        tokenize(tmp_path, tokenizer, chat((" ", 0.5)))
    run = {"model": "m", "dataset": {"uri": "u"}, "epochs": 1, "batch_size": 1, "neftune_noise_alpha": 5}
    with pytest.raises(ValidationError, match="neftune_noise_alpha"):
        SFTRun.model_validate(run)
