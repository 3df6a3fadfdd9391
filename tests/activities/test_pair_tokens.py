"""Pairs into units through a model's own tokenizer: each answer as supervised training has it, and the same report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from activities.tokenizing.tokenize import PROMPTS, write_units
from activities.tokenizing.tokenizer import ModelTokenizer
from activities.tokenizing.units import PackRequest, write_plan
from longshore.views import Report
from shared.errors import InvalidInput
from shared.jobs.packed import Plan, Units
from tests.activities.templates import TEMPLATES, open_model, tokenizer_json, write_model
from tests.activities.tokenizing.test_tokenize import ARTIFACT, ids_up_to, request_of, rows_in, units_in

BEFORE = [("user", "How many?"), ("assistant", "12 sacks."), ("user", "And crates?")]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}]}


def turns(*spoken: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in spoken]


def answer(content: str) -> list[dict[str, Any]]:
    return turns(("assistant", content))


PAIRS = [
    (turns(("user", "How many?")), answer("12 sacks."), answer("12 crates, and a barrel.")),
    (turns(*BEFORE), answer("Seven é船."), answer("No.")),
    (turns(("system", "Count."), ("user", "How many?")), answer("7"), answer("seven")),
]


def tokenize(tmp_path: Path, tokenizer: ModelTokenizer, *rows: Any, **fields: Any) -> Report:
    return write_units(rows_in(tmp_path, *rows), tokenizer, request_of(pairs=True, **fields), tmp_path / "units")


def answers_in(folder: Path) -> list[tuple[list[int], dict[int, int]]]:
    """Of both answers of each pair: the ids up to the last target, and labels by the place they are predicted from."""
    found = []
    with Units(folder) as units:
        for unit in range(units.header.num_units):
            packed = units.read_bin(np.array([unit]))
            for sequence in (0, 1):
                own = packed.sequence_N == sequence
                ids = [*ids_up_to(packed, packed.hidden_index_N[own][-1]), int(packed.label_N[own][-1])]
                places = packed.position_T[packed.hidden_index_N[own]].tolist()
                found.append((ids, dict(zip(places, packed.label_N[own].tolist(), strict=True))))
    return found


def supervised(tmp_path: Path, tokenizer: ModelTokenizer, row: dict[str, Any]) -> tuple[list[int], dict[int, int]]:
    """What supervised training makes of one conversation of which only the last answer is learned."""
    write_units(rows_in(tmp_path, row), tokenizer, request_of(max_tokens=1000), tmp_path / "single")
    [(ids, targets)] = units_in(tmp_path / "single")
    return ids[: max(targets) + 2], {hidden: label for hidden, (label, _) in targets.items()}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_each_answer_has_the_tokens_and_targets_of_supervised_training(tmp_path: Path, name: str) -> None:
    tokenizer = open_model(write_model(tmp_path / "model", name))
    pairs = [pair for pair in PAIRS if name not in NO_SYSTEM or pair[0][0]["role"] != "system"]
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in pairs]
    report = tokenize(tmp_path, tokenizer, *rows, max_tokens=1000)
    assert (report.format, report.num_kept) == ("preference", len(rows))
    alone = []
    for prompt, *both in pairs:
        for messages in both:
            masked = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in prompt]
            alone.append(supervised(tmp_path, tokenizer, {"messages": [*masked, *messages]}))
    assert answers_in(tmp_path / "units") == alone


NO_SYSTEM = ("mistral",)


def test_the_answers_end_with_their_terminators_and_tools_are_not_learned(tmp_path: Path) -> None:
    tokenizer = open_model(write_model(tmp_path / "model", "qwen"))
    told = [CALL, {"role": "tool", "content": "seven"}, *answer("7 crates.")]
    row = {"input": {"messages": turns(("user", "How many?"))}, "preferred_output": told}
    tokenize(tmp_path, tokenizer, row | {"non_preferred_output": answer("None.")}, max_tokens=1000)
    chosen, rejected = (tokenizer.decode(list(labels.values())) for _, labels in answers_in(tmp_path / "units"))
    assert chosen.count("<|im_end|>") == 2 and chosen.endswith("7 crates.<|im_end|>") and "tool_response" not in chosen
    assert rejected.endswith("None.<|im_end|>") and rejected.count("<|im_end|>") == 1


def test_texts_without_a_chat_template_are_joined_as_they_are(tmp_path: Path) -> None:
    files = {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    tokenizer = ModelTokenizer(files, "model")
    tokenize(tmp_path, tokenizer, {"prompt": "crate", "chosen": " quay", "rejected": " barge"})
    chosen, rejected = answers_in(tmp_path / "units")
    assert [tokenizer.decode(ids) for ids, _ in (chosen, rejected)] == ["crate quay</s>", "crate barge</s>"]
    assert [tokenizer.decode(list(t.values())) for _, t in (chosen, rejected)] == [" quay</s>", " barge</s>"]
    mixed = {"prompt": turns(("user", "q")), "chosen": answer("a"), "rejected": answer("b")}
    with pytest.raises(InvalidInput, match=r"rows.jsonl:2: the row holds a conversation, and the model has no chat"):
        tokenize(tmp_path, tokenizer, {"prompt": "q", "chosen": "a", "rejected": "b"}, mixed)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return open_model(write_model(tmp_path_factory.mktemp("chatml"), "chatml"))


def test_a_pair_is_as_long_as_its_prompt_and_both_answers_and_is_dropped_beyond(
    tmp_path: Path, chatml: ModelTokenizer
) -> None:
    rows = [{"prompt": "q", "chosen": "crate " * n, "rejected": "quay " * n} for n in (1, 2, 30)]
    report = tokenize(tmp_path, chatml, *rows, max_tokens=60)
    [lost] = report.lost
    assert (report.num_kept, report.num_too_long, lost.place) == (2, 1, "rows.jsonl:3")
    for pair in range(2):
        ids = [
            chatml.tokens_of(f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{rows[pair][a]}<|im_end|>\n")
            for a in ("chosen", "rejected")
        ]
        shared = next(k for k, (one, other) in enumerate(zip(*ids, strict=False)) if one != other)
        with Units(tmp_path / "units") as units:
            assert np.diff(units.token_offsets)[pair] == sum(map(len, ids)) - shared
    with pytest.raises(InvalidInput, match=r"1 of 3 rows would be lost.*rows.jsonl:3"):
        tokenize(tmp_path, chatml, *rows, max_tokens=60, max_lost_fraction=0.1)
    with pytest.raises(ValidationError, match="pairs are never cut"):
        request_of(pairs=True, too_long="truncate")


def test_pairs_stay_together_in_their_order_whatever_they_are_batched_and_packed_by(
    tmp_path: Path, chatml: ModelTokenizer
) -> None:
    """Rows so long that a batch of characters ends between them; every pair then lies whole in one bin."""
    rows = [{"prompt": f"q{k}", "chosen": f"crate {k}", "rejected": "quay " * (k % 50)} for k in range(700)]
    rows[3]["chosen"] = "barge " * 400_000
    report = tokenize(tmp_path, chatml, *rows, max_tokens=400)
    assert (report.num_rows, report.num_kept, report.num_too_long) == (700, 699, 1)
    answers = answers_in(tmp_path / "units")
    for unit, k in ((0, 0), (3, 4), (15, 16), (600, 601)):
        said = [chatml.decode(ids) for ids, _ in answers[2 * unit : 2 * unit + 2]]
        assert all(f"user\nq{k}<" in text for text in said)
        assert said[0].endswith(f"crate {k}<|im_end|>") and said[1].endswith("quay " * (k % 50) + "<|im_end|>")
    pack = PackRequest(units=ARTIFACT, seed=0, epochs=1, batch_size=50, bin_tokens=400)
    header = write_plan(Units.read_lengths(tmp_path / "units"), pack, tmp_path / "plan")
    plan = Plan(tmp_path / "plan")
    planned = [unit for step in range(header.num_steps) for each in plan.bins(step) for unit in each.tolist()]
    assert sorted(planned) == list(range(699))


def test_prompts_to_go_on_from_are_one_a_pair(tmp_path: Path, chatml: ModelTokenizer) -> None:
    tokenize(tmp_path, chatml, *[{"prompt": f"q{k}", "chosen": f"a{k}", "rejected": "b"} for k in range(20)])
    prompts = json.loads((tmp_path / "units" / PROMPTS).read_text())
    assert [(p["prompt"], p["reference"]) for p in prompts] == [(f"q{k}", f"a{k}") for k in range(16)]
    assert chatml.decode(prompts[1]["prompt_ids"]).endswith("q1<|im_end|>\n<|im_start|>assistant\n")
