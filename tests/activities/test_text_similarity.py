"""Text similarity against tables by hand, and against slow, plain definitions."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.grading.open_grader import (
    NotGraded,
    bleu,
    gleu,
    rouge_n,
    share_in_common,
    string_check,
    text_similarity,
)

CAT, MAT = "the cat sat on the mat".split(), "the cat is on the mat".split()


@pytest.mark.parametrize(
    ("operation", "text", "reference", "grade"),
    [
        ("eq", "a", "a", 1),
        ("eq", "a", "A", 0),
        ("eq", "a ", "a", 0),
        ("ne", "a", "b", 1),
        ("ne", "a", "a", 0),
        ("like", "the answer is 12", "12", 1),
        ("like", "12", "the answer is 12", 0),
        ("like", "Straße", "STRASSE", 0),
        ("ilike", "Straße", "STRASSE", 1),
        ("ilike", "x", "y", 0),
    ],
)
def test_string_checks(operation: str, text: str, reference: str, grade: float) -> None:
    assert string_check(operation, text, reference) == grade  # type: ignore[arg-type]


def test_bleu_by_hand() -> None:
    """Unigrams 5 of 6, bigrams 3 of 5 (the cat, on the, the mat), trigrams 1 of 4, and no 4-gram: half a match of 3."""
    expected = math.exp((math.log(5 / 6) + math.log(3 / 5) + math.log(1 / 4) + math.log(0.5 / 3)) / 4)
    assert bleu(CAT, MAT) == pytest.approx(expected, rel=1e-14)
    # Two orders without a match are smoothed by 1/2 and 1/4.
    words, reference = "a b c d".split(), "a b x c d".split()
    expected = math.exp(1 - 5 / 4 + (math.log(4 / 4) + math.log(2 / 3) + math.log(0.5 / 2) + math.log(0.25 / 1)) / 4)
    assert bleu(words, reference) == pytest.approx(expected, rel=1e-14)
    # Clipped counts: Papineni et al. 2002, section 2.1, "the the the the the the the" has precision 2/7.
    assert bleu(["the"] * 7, [*MAT, "cat"]) < 0.2857 and bleu(["the"], ["the"]) == 1
    assert bleu(["x"], ["y"]) == 0 and bleu([], ["y"]) == 0 and bleu([], []) == 1


def test_gleu_by_hand() -> None:
    assert gleu(CAT, MAT) == pytest.approx((5 + 3 + 1 + 0) / (6 + 5 + 4 + 3))
    assert gleu(["a", "b"], ["a", "b", "c"]) == pytest.approx((2 + 1) / (3 + 2 + 1)), "the lesser one: recall"
    assert gleu(["a", "b", "c"], ["a", "b"]) == gleu(["a", "b"], ["a", "b", "c"])


def test_rouge_by_hand() -> None:
    assert rouge_n(CAT, MAT, 1) == pytest.approx(5 / 6)
    assert rouge_n(CAT, MAT, 2) == pytest.approx(3 / 5)
    assert rouge_n(CAT, MAT, 3) == pytest.approx(1 / 4)
    assert rouge_n(["a"], ["a", "b"], 2) == 0
    # Lin 2004, section 3.1: "police kill the gunman" against "police killed the gunman" has ROUGE-L 3/4.
    assert share_in_common("police kill the gunman".split(), "police killed the gunman".split()) == 0.75
    assert share_in_common("the gunman kill police".split(), "police killed the gunman".split()) == 0.5


@pytest.mark.parametrize(
    ("metric", "text", "reference", "grade"),
    [
        ("fuzzy_match", "kitten", "sitting", 2 * 4 / 13),
        ("fuzzy_match", "", "", 1),
        ("fuzzy_match", "", "a", 0),
        ("rouge_1", "The CAT.", "the cat!", 1),
        ("rouge_5", "a b c d e f", "a b c d e g", 0.5),
        ("bleu", "12.", "12 .", 1),
        ("bleu", "Cat", "cat", 0),
        ("gleu", "a", "", 0),
        ("rouge_l", "...", "!!!", 1),
    ],
)
def test_texts_become_words(metric: str, text: str, reference: str, grade: float) -> None:
    assert text_similarity(metric, text, reference) == pytest.approx(grade)  # type: ignore[arg-type]


def test_long_texts_are_refused_not_compared_for_hours() -> None:
    with pytest.raises(NotGraded, match="a text here has 100,001"):
        text_similarity("fuzzy_match", "a", "b" * 100_001)


TEXTS = st.text(alphabet="ab c.", max_size=30)


def slow_common_subsequence(first: str, second: str) -> int:
    """The textbook's table, row by row."""
    row = [0] * (len(second) + 1)
    for a in first:
        above = row
        row = [0]
        for (diagonal, up), b in zip(pairwise(above), second, strict=True):
            row.append(diagonal + 1 if a == b else max(up, row[-1]))
    return row[-1]


@given(TEXTS, TEXTS)
def test_a_share_in_common_is_of_the_textbooks_subsequence(first: str, second: str) -> None:
    common, length = slow_common_subsequence(first, second), len(first) + len(second)
    assert share_in_common(first, second) == (2 * common / length if length else 1)


METRICS = ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_5", "rouge_l"]


@given(st.sampled_from(METRICS), TEXTS, TEXTS)
def test_every_metric_lies_between_0_and_1_and_all_but_bleu_are_symmetric(metric: str, text: str, other: str) -> None:
    found = text_similarity(metric, text, other)  # type: ignore[arg-type]
    assert 0 <= found <= 1 + 1e-12
    if metric != "bleu":
        assert found == pytest.approx(text_similarity(metric, other, text))  # type: ignore[arg-type]
    if metric in ("fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_l"):
        assert text_similarity(metric, text, text) == pytest.approx(1)  # type: ignore[arg-type]
