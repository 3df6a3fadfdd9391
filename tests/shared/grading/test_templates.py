"""Template strings: substitution of what a row has, and refusal of everything else."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.grading import MAX_TEMPLATE_CHARS, TemplateError, parse_template, render

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
