"""Graders: OpenAI's own shapes are accepted, mistakes are named; templates and arithmetic over grades as Python's."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.grading import (
    FUNCTIONS,
    MAX_SOURCE_BYTES,
    MAX_TEMPLATE_CHARS,
    ExpressionError,
    SampledItem,
    TemplateError,
    parse_expression,
    parse_template,
    render,
)
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


VALUES = {"a": 0.5, "b_2": -3.0, "minimum": 2.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".5 + 1e2 + 3.", 103.5),
        ("a * b_2 + minimum", 0.5),
        ("min(1, max(a, 0.25), 9) + abs(b_2)", 3.5),
        ("floor(-1.5) + ceil(1.2)", 0),
        ("exp(0) + sqrt(9) + log(1)", 4),
        ("+a", 0.5),
    ],
)
def test_values(text: str, value: float) -> None:
    """Of what the expressions below leave out."""
    assert parse_expression(text).value(VALUES) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a number or a name is missing"),
        ("1 +", "character 4: a number or a name is missing before 'the end'"),
        ("(1", "')' is missing"),
        ("1 2", "the end is missing before '2'"),
        ("a b", "the end is missing before 'b'"),
        ("a % b", "character 3 ('%') has no meaning here"),
        ("a ** b", "a number or a name is missing before '*'"),
        ("a.b", "character 2 ('.') has no meaning here"),
        ("__import__('os')", "has no meaning here"),
        ("open(1)", "there is no function 'open'"),
        ("abs(1, 2)", "abs takes one argument"),
        ("min(1)", "min takes two or more arguments"),
        ("min()", "a number or a name is missing"),
        ("1e999", "beyond what a float holds"),
        ("2a", "has no meaning here"),
        ("(" * 60 + "1" + ")" * 60, "nested deeper than 50 levels"),
        ("-" * 3000 + "1", "nested deeper than 50 levels"),
        ("1+" * 3000 + "1", "at most 4,000 characters"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=re.escape(message)):
        parse_expression(text)


@pytest.mark.parametrize("text", ["1/0", "log(0)", "sqrt(-1)", "(-1)^0.5", "0^-1", "exp(1000)", "10^400", "1e308*10"])
def test_no_finite_value(text: str) -> None:
    with pytest.raises(ExpressionError, match=r"has no value|is not finite"):
        parse_expression(text).value({})


def test_long_sums_need_no_depth() -> None:
    assert parse_expression("+".join(["a"] * 1900)).value(VALUES) == 950


def test_names_are_those_that_are_no_functions() -> None:
    assert parse_expression("a + min(b_2, minimum)").names == {"a", "b_2", "minimum"}


NUMBERS = st.floats(0, 100, allow_nan=False).map(lambda x: format(x, ".3f"))
BY_PYTHON = {name: getattr(math, name, None) or {"min": min, "max": max, "abs": abs}[name] for name in FUNCTIONS}
# Of integers Python's powers are exact, and as long as the machine's memory.
BY_PYTHON |= {name: lambda x, whole=BY_PYTHON[name]: float(whole(x)) for name in ("floor", "ceil")}


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from("+-*/^"), inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        st.tuples(st.sampled_from(["abs", "floor", "ceil", "sqrt"]), inner).map(lambda t: f"{t[0]}({t[1]})"),
    )


@given(st.recursive(NUMBERS | st.sampled_from(sorted(VALUES)), _joined, max_leaves=12))
def test_values_are_pythons(text: str) -> None:
    """Python's grammar is an independent reader: `^` is its `**`, and the rest is the same."""
    try:
        expected = eval(text.replace("^", "**"), {"__builtins__": {}}, {**BY_PYTHON, **VALUES})
        defined = not isinstance(expected, complex) and math.isfinite(expected)
    except (ArithmeticError, ValueError, TypeError):
        return  # of complex intermediate values, too: there is no such thing here
    if not defined:
        return
    try:
        found = parse_expression(text).value(VALUES)
    except ExpressionError:
        assert "^" in text or "/" in text, text  # an intermediate that Python lets through, such as complex or infinite
        return
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(st.text(alphabet="0123456789.eE+-*/^(), abminlogx_$\n'"))
def test_any_expression_is_read_or_refused(text: str) -> None:
    try:
        expression = parse_expression(text)
        expression.value(dict.fromkeys(expression.names, 1.0))
    except ExpressionError:
        pass


ROW = {
    "sample": {"output_text": "12 sacks", "output_json": {"n": [1, {"deep": "x"}]}},
    "item": {"answer": "12", "a-b": True, "none": None, "list": ["p", "q"], "ünï": "no", "trap": "{{ item.answer }}"},
}
PLAIN = st.text().filter(lambda text: "{{" not in text)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ sample.output_text }}", "12 sacks"),
        ("{{sample.output_text}} of {{item.answer}}!", "12 sacks of 12!"),
        ("{{ item.list[1] }}{{item.a-b}} {{ item.none }}", "qtrue null"),
        ("{{ sample.output_json.n[1].deep }} {{ sample.output_json.n }}", 'x [1, {"deep": "x"}]'),
        ('{"a": {"b": 1}} }}', '{"a": {"b": 1}} }}'),
        ("{{ item.trap }}", "{{ item.answer }}"),
        ("", ""),
    ],
)
def test_references_become_values(template: str, text: str) -> None:
    assert render(template, ROW) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a {{ item.x", "the {{ at character 3 is never closed"),
        ("{{ item }}", "is no reference"),
        ("{{ env.HOME }}", "is no reference"),
        ("{{ item.x | upper }}", "is no reference"),
        ("{{ item.__class__() }}", "is no reference"),
        ("{{ item['x'] }}", "is no reference"),
        ("{{ 7*7 }}", "is no reference"),
        ("{{ item.list[-1] }}", "is no reference"),
        ("{{}}", "is no reference"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "at most 65,536 characters"),
    ],
)
def test_what_is_no_reference_is_refused(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(message)):
        parse_template(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ item.wrong }}", "item.wrong is not in this row: item has no field 'wrong'"),
        ("{{ item.list[2] }}", "item.list[2] is not in this row: item.list has no place 2"),
        ("{{ item.answer.length }}", "item.answer has no field 'length'"),
        ("{{ item.answer[0] }}", "item.answer has no place 0"),
        ("{{ item.__class__ }}", "item has no field '__class__'"),
        ("{{ sample.output_text.__len__ }}", "has no field '__len__'"),
    ],
)
def test_what_a_row_does_not_have_is_named(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(message)):
        render(template, ROW)


def test_a_template_cannot_blow_up() -> None:
    with pytest.raises(TemplateError, match="longer than 16,777,216 characters"):
        render("{{item.x}}" * 1000, {"sample": {}, "item": {"x": "a" * 100_000}})


@given(st.lists(st.tuples(PLAIN, JSON)))
def test_any_text_and_any_value_come_through_as_they_are(pairs: list[tuple[str, object]]) -> None:
    template, expected = "", ""
    for place, (text, value) in enumerate(pairs):
        text = text.rstrip("{")  # a brace before a reference would belong to it
        template += f"{text}{{{{ item.v[{place}] }}}}"
        expected += text + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    assert render(template, {"sample": {}, "item": {"v": [value for _, value in pairs]}}) == expected


@given(st.text(alphabet="{} .[]0aitemsample"))
def test_any_text_is_read_or_refused(template: str) -> None:
    try:
        pieces = parse_template(template)
    except TemplateError:
        return
    literal = "".join(piece for piece in pieces if isinstance(piece, str))
    assert "{{" not in template or len(literal) < len(template)
