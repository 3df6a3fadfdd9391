"""Arithmetic over named grades, against Python's own."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.grading import FUNCTIONS, ExpressionError, parse_expression

VALUES = {"a": 0.5, "b_2": -3.0, "minimum": 2.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("8 - 3 - 2", 3),
        ("8 / 4 / 2", 1),
        ("2 ^ 3 ^ 2", 512),
        ("-2 ^ 2", -4),
        ("2 ^ -1", 0.5),
        ("(1 + 2) * -3", -9),
        (".5 + 1e2 + 3.", 103.5),
        ("a * b_2 + minimum", 0.5),
        ("min(1, max(a, 0.25), 9) + abs(b_2)", 3.5),
        ("floor(-1.5) + ceil(1.2)", 0),
        ("exp(0) + sqrt(9) + log(1)", 4),
        ("+a", 0.5),
    ],
)
def test_values(text: str, value: float) -> None:
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
PYTHON = {name: getattr(math, name, None) or {"min": min, "max": max, "abs": abs}[name] for name in FUNCTIONS}
# Of integers Python's powers are exact, and as long as the machine's memory.
PYTHON |= {name: lambda x, whole=PYTHON[name]: float(whole(x)) for name in ("floor", "ceil")}


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
        expected = eval(text.replace("^", "**"), {"__builtins__": {}}, {**PYTHON, **VALUES})
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
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        expression = parse_expression(text)
        expression.value(dict.fromkeys(expression.names, 1.0))
    except ExpressionError:
        pass
