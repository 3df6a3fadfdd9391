"""Patterns mean what they mean in `re` and in PEFT, and cost no more than they may."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from longshore.training import DELTA_NET, LATENT, LINEARS, TARGETS, Lora, ModulePattern
from shared.errors import InvalidInput
from shared.models.peft import AdaptedModules, check_same

CHARACTERS = st.sampled_from(
    ["a", "b", ".", "0", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[0-9_]", r"\b", "^", "$"]
)
REPEATS = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}", "{0}"])
PATTERNS = st.recursive(
    CHARACTERS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)
AHEAD = st.lists(st.tuples(st.sampled_from(["^", "(?=", "(?!"]), PATTERNS), max_size=2).map(
    lambda ahead: "".join(kind if kind == "^" else f"{kind}{one})" for kind, one in ahead)
)


@pytest.mark.parametrize("pattern", ["[ab]*", "[ab]+b", r".*\.a", r"[^.]*\.?[^.]*", "a*b*", r"(?:\w*\.)+\w*"])
def test_a_run_of_characters_ends_where_it_ends(pattern: str) -> None:
    for name in ("a", "ab", "aab", "abab", "a.b", "ab.ab", "aa.bb.a", "aaaaaaaaa.a", ".a", "a."):
        assert ModulePattern(pattern).matches(name) == bool(re.fullmatch(pattern, name)), name


@settings(max_examples=400, deadline=None)
@given(AHEAD, PATTERNS, st.text("ab.0_", min_size=1, max_size=7))
def test_a_pattern_means_what_it_means_in_re(ahead: str, pattern: str, name: str) -> None:
    assert ModulePattern(ahead + pattern).matches(name) == bool(re.fullmatch(ahead + pattern, name))
    as_end = rf"(.*\.)?({pattern})$"  # PEFT's of its keys
    assert ModulePattern(pattern, is_end=True).matches(name) == bool(re.match(as_end, name))


@pytest.mark.filterwarnings("ignore:Possible")
def test_signs_of_the_other_engine_mean_what_they_mean_in_python() -> None:
    """In Rust's `regex` classes nest and have operators, and `\\<` is a place."""
    for pattern in (
        "[[a]b]",
        "[a&&b]",
        "[a~~b]+",
        r"\<a",
        "[[:alpha:]]",
        r"a{,2}",
        r"[^\Wb]",
        r"[\Da]",
        "a#b",
        r"\s|a",
    ):
        for name in ("a", "aa", "ab", "ab]", "[b]", "&", "-", "<a", "b", "0", ":]", "a#b", "\x1f", " "):
            assert ModulePattern(pattern).matches(name) == bool(re.fullmatch(pattern, name)), (pattern, name)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", "a reference to a group is not read"),
        ("(?i)a", "flags are not read"),
        ("(?i:a)", "subpattern is not read"),
        ("(?<=a)b", "looking ahead .* or behind is not read"),
        ("a(?=b)b", "looking ahead .* or behind is not read"),
        ("é", "ASCII"),
        (r"\ud800", "ASCII"),
        ("(?:){4000000000}", "5000 parts"),
        ("(a{100}){100}", "5000 parts"),
        ("(?>a)b", "atomic group is not read"),
        ("a++b", "possessive repeat is not read"),
        ("(", "no regular expression"),
        ("a)|(b", "no regular expression"),
        ("(" * 61 + "a" + ")" * 61, "60 groups"),
    ],
)
def test_what_is_not_read_is_refused_where_it_is_submitted(pattern: str, words: str) -> None:
    for field in ({"target_pattern": pattern}, {"rank_pattern": {pattern: 2}}, {"alpha_pattern": [[pattern, 2]]}):
        with pytest.raises(ValidationError, match=words):
            Lora.model_validate(field)


@pytest.mark.parametrize(
    "pattern",
    ["(((((.*)*)*)*)*)*x", "(.*.*.*.*.*.*.*.*)*x", "(a*)*b", r"\w+" * 320, ".{4999}", "(" * 50 + "." + ")*" * 50],
)
def test_patterns_that_hold_re_for_ever_cost_little(pattern: str) -> None:
    """`re` needs longer than there is for the first three."""
    # Held against patterns of their lengths that cost any engine little, by a factor that the speed has no part in.
    names = [f"model.layers.{layer}.mlp.experts.{one}.gate_proj" for layer in range(32) for one in range(128)]

    def cpu_s(pattern: str) -> float:
        began = time.process_time()
        found = ModulePattern(pattern)
        for name in names:
            found.matches(name)
        return time.process_time() - began

    assert cpu_s(pattern) < 100 * max(cpu_s("a" * len(pattern)), 0.001)


def test_looking_ahead_is_not_read_in_front_of_ends() -> None:
    with pytest.raises(ValidationError, match="pattern of ends"):
        Lora.model_validate({"rank_pattern": {"(?!a)b": 2}})
    assert Lora(target_pattern=r"^(?!.*vision).*q_proj")


def test_settings_by_pattern_are_peft_s() -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    names = [
        f"model.layers.{layer}.{place}_proj" for layer in range(12) for place in ("self_attn.q", "mlp.experts.3.up")
    ]
    ranks, alphas = {r"layers\.1\..*": 3, "q_proj": 5}, {"mlp.*": 7, r".*1\.self_attn.q_proj": 9}
    for ours, theirs in (
        ({"targets": ["q_proj"], "layers": [1, 11]}, {"target_modules": ["q_proj"], "layers_to_transform": [1, 11]}),
        ({"target_pattern": r".*\.1?1\..*proj"}, {"target_modules": r".*\.1?1\..*proj"}),
        ({}, {"target_modules": ["q_proj", "up_proj"]}),
    ):
        adapted = AdaptedModules(Lora.model_validate(ours | {"rank_pattern": ranks, "alpha_pattern": alphas}))
        for name in names:
            found = adapted.of(name)
            assert (found is not None) == bool(check_target_module_exists(LoraConfig(**theirs), name))
            if found is not None:
                rank = ranks.get(get_pattern_key(list(ranks), name), 16)
                assert (found.rank, found.scale) == (rank, alphas.get(get_pattern_key(list(alphas), name), 32) / rank)


def test_targets_are_said_once() -> None:
    assert Lora.model_validate({"targets": "all-linear"}) == Lora.model_validate({"targets": ["all-linear"]}) == Lora()
    for other in ({"targets": ["q_proj"]}, {"layers": [0]}):
        with pytest.raises(ValidationError, match="replaces targets and layers"):
            Lora.model_validate({"target_pattern": "q_proj"} | other)
    lora = Lora.model_validate({"rank_pattern": {"b": 2, "a": 3}})
    assert Lora.model_validate_json(lora.model_dump_json()) == lora and hash(lora)  # in their order


PLAIN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("found", "expected", "are_alike"),
    [
        (PLAIN, LINEARS, True),  # of a model that has no others
        ((*LATENT, "o_proj", "up_proj"), LINEARS, True),
        (PLAIN, PLAIN[:2], False),
        (PLAIN, (*PLAIN[:2], *DELTA_NET), False),
        (PLAIN, TARGETS, False),  # every model has an output layer
        (("q_proj", "lm_head"), (*PLAIN, "lm_head"), False),
        ((*PLAIN, "lm_head"), (*LINEARS, "lm_head"), True),
        ((*PLAIN, "lm_head"), TARGETS, False),  # and embeddings
    ],
    ids=str,
)
def test_targets_are_the_same_where_a_model_may_have_just_these(found, expected, are_alike: bool) -> None:
    """Of which model an adapter is is not known where it is read."""
    for one, other in ((found, expected), (expected, found)):
        if are_alike:
            check_same(Lora(targets=one), Lora(targets=other), "")
            continue
        with pytest.raises(InvalidInput, match="the adapter's targets is"):
            check_same(Lora(targets=one), Lora(targets=other), "")


def test_every_setting_but_dropout_is_compared() -> None:
    lora = Lora.model_validate({"layers": [2, 0, 2], "rank_pattern": {"q_proj": 2}})
    check_same(lora, Lora.model_validate({"layers": [0, 2], "rank_pattern": {"q_proj": 2}, "dropout": 0.5}), "")
    for field in ({"rank": 2}, {"alpha": 2}, {"layers": [0]}, {"rank_pattern": {}}, {"alpha_pattern": {"q_proj": 2}}):
        with pytest.raises(InvalidInput, match=f"the adapter's {next(iter(field))} is"):
            check_same(Lora.model_validate(lora.model_dump() | field), lora, "")
