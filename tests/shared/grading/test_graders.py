"""Grader configurations: OpenAI's own shapes are accepted, mistakes are named with their place and the rule."""

from typing import Any

import pytest

from longshore.grading import MAX_SOURCE_BYTES, MultiGrader, SampledItem
from shared.errors import InvalidInput
from shared.runs.acceptance import parse_grader

CHECK = {"type": "string_check", "name": "n", "operation": "eq", "input": "{{sample.output_text}}", "reference": "x"}
SIMILARITY = {"type": "text_similarity", "name": "n", "evaluation_metric": "bleu", "input": "a", "reference": "b"}
PYTHON = {"type": "python", "name": "n", "source": "def grade(sample, item): return 1.0"}
MODEL = {
    "type": "score_model",
    "name": "n",
    "model": "judge",
    "input": [
        {"role": "user", "content": "{{ item.question }}"},
        {"role": "user", "type": "message", "content": {"type": "input_text", "text": "{{ sample.output_text }}"}},
    ],
    "range": [0, 10],
    "sampling_params": {"temperature": 0, "max_completions_tokens": 100},
}
MULTI = {"type": "multi", "name": "n", "graders": {"a": CHECK, "b": PYTHON}, "calculate_output": "0.8 * a + 0.2 * b"}


@pytest.mark.parametrize("fields", [CHECK, SIMILARITY, PYTHON, MODEL, MULTI])
def test_openais_shapes_are_graders_and_survive_the_wire(fields: dict[str, Any]) -> None:
    grader = parse_grader(fields)
    assert grader.type == fields["type"]
    assert parse_grader(grader.model_dump(mode="json")) == grader


@pytest.mark.parametrize(
    ("fields", "place", "rule"),
    [
        ({}, "grader", "Unable to extract tag using discriminator 'type'"),
        ({"type": "label_model"}, "grader", "does not match any of the expected tags"),
        ({**CHECK, "operation": "equals"}, "grader.operation", "Input should be 'eq', 'ne', 'like' or 'ilike'"),
        ({**CHECK, "reference": "{{ item.x"}, "grader.reference", "the {{ at character 1 is never closed by }}"),
        ({**CHECK, "input": "{{ x.y }}"}, "grader.input", "{{ x.y }} is no reference"),
        ({**CHECK, "pass_threshold": 0.5}, "grader.pass_threshold", "there is no such field"),
        ({**SIMILARITY, "evaluation_metric": "cosine"}, "grader.evaluation_metric", "compares embeddings of a model"),
        ({**SIMILARITY, "evaluation_metric": "meteor"}, "grader.evaluation_metric", "needs WordNet's synonyms"),
        ({**SIMILARITY, "evaluation_metric": "rouge_6"}, "grader.evaluation_metric", "Input should be"),
        ({**PYTHON, "source": "def score(): pass"}, "grader.source", "must define grade(sample, item)"),
        ({**PYTHON, "source": "grade" + "#" * MAX_SOURCE_BYTES}, "grader.source", "the limit is 262,144"),
        ({**PYTHON, "image_tag": "2025-05-08"}, "grader.image_tag", "leave it out"),
        ({**MODEL, "input": []}, "grader.input", "must not be empty"),
        ({**MODEL, "range": [1, 1]}, "grader.range", "the lower one first"),
        ({**MODEL, "range": [0, float("inf")]}, "grader.range", "two finite numbers"),
        (
            {**MODEL, "sampling_params": {"max_tokens": 1}},
            "grader.sampling_params.max_tokens",
            "there is no such field",
        ),
        ({**MULTI, "calculate_output": "a"}, "grader", "the grade of 'b' would be ignored"),
        ({**MULTI, "calculate_output": "a + b + c"}, "grader", "names 'c', which is none of the graders"),
        ({**MULTI, "calculate_output": "a + + * b"}, "grader", "character 7: a number or a name is missing"),
        ({**MULTI, "graders": {"min": CHECK}, "calculate_output": "1"}, "grader", "'min' cannot be a grader's name"),
        ({**MULTI, "graders": {"a": MULTI}}, "grader.graders.a", "does not match any of the expected tags"),
        ({**MULTI, "graders": {"a": {**CHECK, "name": ""}}}, "grader.graders.a.name", "must not be empty"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], place: str, rule: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_grader(fields)
    assert refused.value.place == place
    assert rule in refused.value.message


def test_a_multi_grader_holds_typed_graders() -> None:
    grader = parse_grader(MULTI)
    assert isinstance(grader, MultiGrader) and grader.graders["a"] == parse_grader(CHECK)


@pytest.mark.parametrize(
    ("sample", "output_json"),
    [
        ({"output_text": '{"a": [1]}'}, {"a": [1]}),
        ({"output_text": "[1, 2]"}, [1, 2]),
        ({"output_text": "12"}, None),
        ({"output_text": "{broken"}, None),
        ({"output_text": '{"a": NaN}'}, None),
        ({"output_text": "[" * 100_000}, None),
        ({"output_text": '{"a": 1}', "output_json": {"sent": True}}, {"sent": True}),
    ],
)
def test_output_json_is_the_text_where_that_is_json(sample: dict[str, Any], output_json: Any) -> None:
    assert SampledItem(sample=sample).namespaces["sample"].get("output_json") == output_json


@pytest.mark.parametrize("sample", [{}, {"output_text": 1}, {"output_text": None}])
def test_a_sample_has_a_text(sample: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sample\.output_text must be a text"):
        SampledItem(sample=sample)
