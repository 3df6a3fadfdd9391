"""String checks and text similarity, from 0 to 1: pure functions, float64, case-sensitive except for ROUGE and `ilike`.

Words are runs of letters, digits and _; every other character that is not white space is a separate word.

BLEU, GLEU and ROUGE-N are written here: sacrebleu and rouge-score would bring ten packages (lxml and nltk among them)
for forty lines, and rouge-score's words have ASCII letters only.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from activities.grading.outcome import NotGraded
from shared.grading.graders import Metric

_MAX_CHARS = 100_000  # the comparison's time grows with the product of both lengths
_WORD = re.compile(r"\w+|[^\w\s]")
_ROUGE_WORD = re.compile(r"\w+")
_MAX_ORDER = 4  # of BLEU's and GLEU's n-grams


def string_check(operation: Literal["eq", "ne", "like", "ilike"], text: str, reference: str) -> float:
    """1.0 if the operation holds, else 0.0. `ilike` compares case-folded texts."""
    match operation:
        case "eq":
            holds = text == reference
        case "ne":
            holds = text != reference
        case "like":
            holds = reference in text
        case "ilike":
            holds = reference.casefold() in text.casefold()
    return float(holds)


def text_similarity(metric: Metric, text: str, reference: str) -> float:
    """The metric of a text against a reference. Two empty texts are equal; one empty text has similarity 0.

    Raises:
        NotGraded: a text of more than 100,000 characters.
    """
    if (longest := max(len(text), len(reference))) > _MAX_CHARS:
        raise NotGraded(f"text_similarity compares up to {_MAX_CHARS:,} characters; a text here has {longest:,}")
    match metric:
        case "fuzzy_match":
            return share_in_common(text, reference)
        case "bleu":
            return bleu(_WORD.findall(text), _WORD.findall(reference))
        case "gleu":
            return gleu(_WORD.findall(text), _WORD.findall(reference))
        case "rouge_l":
            return share_in_common(_rouge_words(text), _rouge_words(reference))
        case "rouge_1" | "rouge_2" | "rouge_3" | "rouge_4" | "rouge_5":
            return rouge_n(_rouge_words(text), _rouge_words(reference), int(metric[-1]))


def _rouge_words(text: str) -> list[str]:
    return _ROUGE_WORD.findall(text.lower())


def bleu(words: Sequence[str], reference: Sequence[str]) -> float:
    """Sentence BLEU (Papineni et al. 2002, eq. 1-3), n-grams up to 4, or up to the text's length if it is shorter.

    An n-gram order without a match is smoothed by halves: 1/2, 1/4, ... of a match (Chen & Cherry 2014, smoothing 3),
    but a text that shares no word with its reference scores 0.
    """
    if not words or not reference:
        return float(not words and not reference)
    log_precisions = []
    doubling = 1
    for order in range(1, min(_MAX_ORDER, len(words)) + 1):
        matches, total = _matches(words, reference, order), len(words) - order + 1
        if not matches and order == 1:
            return 0.0
        if not matches:
            doubling *= 2
        log_precisions.append(math.log((matches or 1 / doubling) / total))
    brevity = min(0.0, 1 - len(reference) / len(words))
    return math.exp(brevity + sum(log_precisions) / len(log_precisions))


def gleu(words: Sequence[str], reference: Sequence[str]) -> float:
    """GLEU (Wu et al. 2016, arXiv:1609.08144, section 5.2): the lesser of precision and recall, n-grams up to 4."""
    if not words or not reference:
        return float(not words and not reference)
    matches = sum(_matches(words, reference, order) for order in range(1, _MAX_ORDER + 1))
    return matches / max(_num_ngrams(len(words)), _num_ngrams(len(reference)))


def rouge_n(words: Sequence[str], reference: Sequence[str], order: int) -> float:
    """ROUGE-N (Lin 2004, section 2) as the F1 of its precision and recall. Texts too short for an n-gram score 0."""
    if not words and not reference:
        return 1.0
    num_words, num_reference = len(words) - order + 1, len(reference) - order + 1
    if num_words < 1 or num_reference < 1:
        return 0.0
    return 2 * _matches(words, reference, order) / (num_words + num_reference)


def share_in_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """2 LCS / (m + n): ROUGE-L of words (Lin 2004, section 3.1, with beta 1), rapidfuzz's `ratio` / 100 of characters.

    To the last bit: rapidfuzz computes its ratio as 1 - distance / (m + n), which may differ in it.
    """
    from rapidfuzz.distance import LCSseq

    if not first and not second:
        return 1.0
    return 2 * LCSseq.similarity(first, second) / (len(first) + len(second))


def _matches(words: Sequence[str], reference: Sequence[str], order: int) -> int:
    """Return the number of n-grams in common, each counted as often as it occurs in both."""
    return (_ngrams(words, order) & _ngrams(reference, order)).total()


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))


def _num_ngrams(num_words: int) -> int:
    return sum(max(0, num_words - order + 1) for order in range(1, _MAX_ORDER + 1))
