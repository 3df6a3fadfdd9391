"""Divergences from a teacher against the textbook's sums over probabilities, in float64, however targets are cut."""

import dataclasses
from itertools import product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.losses import DivergenceKind
from megatron_worker.engine import Batch, Divergence, LikeliestIds, Outputs, Scores, TeacherStates
from megatron_worker.head.distributions import score_with_divergence
from megatron_worker.head.logprobs import VocabShard, whole_vocabulary
from megatron_worker.head.scalar import LmHeadLora
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.test_head import shard_of

NUM_TARGETS, HIDDEN_SIZE, VOCAB_SIZE, RANK = 7, 6, 23, 2
KINDS: tuple[DivergenceKind, ...] = get_args(DivergenceKind)
SKEW = 0.3
EXACT = {"rtol": 1e-6, "atol": 1e-6}


class Given:
    """Random states of student and teacher, with adapters beside the output layer if so wanted."""

    def __init__(self, dtype: torch.dtype = torch.float32, has_adapters: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.student_NH, self.teacher_NH = random(NUM_TARGETS, HIDDEN_SIZE), random(NUM_TARGETS, HIDDEN_SIZE)
        self.weight_VH, self.grad_N = random(VOCAB_SIZE, HIDDEN_SIZE), random(NUM_TARGETS)
        self.label_N = torch.randint(0, VOCAB_SIZE, (NUM_TARGETS,), generator=generator)
        self.student_b_VR, self.teacher_b_VR = (0.25 * random(VOCAB_SIZE, RANK) for _ in range(2))
        self.a_HR = random(HIDDEN_SIZE, RANK)
        self.has_adapters = has_adapters

    def leaves(self) -> tuple[Tensor, Tensor]:
        weight = self.student_b_VR if self.has_adapters else self.weight_VH
        return self.student_NH.clone().requires_grad_(), weight.clone().requires_grad_()

    def logits(self, student_NH: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's and the teacher's."""
        if not self.has_adapters:
            return student_NH @ weight.t(), self.teacher_NH @ weight.detach().t()
        teacher_VH = self.weight_VH + self.teacher_b_VR @ self.a_HR.t()
        return student_NH @ (self.weight_VH + weight @ self.a_HR.t()).t(), self.teacher_NH @ teacher_VH.t()

    def batch(self, tokens: str, teacher_logit_NV: Tensor, top_k: int) -> Batch:
        zeros_N = torch.zeros(NUM_TARGETS, dtype=torch.int64)
        batch = Batch.to_score(zeros_N, zeros_N, zeros_N - 1, zeros_N, self.label_N)
        logprob_NV = teacher_logit_NV.log_softmax(1).float()
        if tokens == "all":
            beside = (self.teacher_NH @ self.a_HR, self.teacher_b_VR) if self.has_adapters else ()
            return dataclasses.replace(batch, teacher=TeacherStates(self.teacher_NH, *beside))
        if tokens == "drawn":
            drawn = LikeliestIds(self.label_N[:, None], logprob_NV.gather(1, self.label_N[:, None]))
            return dataclasses.replace(batch, teacher=drawn)
        top = logprob_NV.topk(top_k, dim=1)
        return dataclasses.replace(batch, teacher=LikeliestIds(top.indices.int(), top.values))


def textbook(kind: DivergenceKind, teacher: Tensor, own: Tensor) -> Tensor:
    """Return the divergence of rows of probabilities."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(1)

    mixed = SKEW * teacher + (1 - SKEW) * own
    match kind:
        case "forward_kl":
            return kl(teacher, own)
        case "reverse_kl":
            return kl(own, teacher)
        case "jsd":
            return SKEW * kl(teacher, mixed) + (1 - SKEW) * kl(own, mixed)
        case "skew_kl":
            return kl(teacher, mixed)
        case "skew_reverse_kl":
            return kl(own, (1 - SKEW) * teacher + SKEW * own)


def with_others_as_one(prob_NV: Tensor, id_NK: Tensor) -> Tensor:
    named_NK = prob_NV.gather(1, id_NK)
    return torch.cat([named_NK, 1 - named_NK.sum(1, keepdim=True)], dim=1)


def expected(given: Given, kind: DivergenceKind, tokens: str, top_k: int, temperature: float) -> tuple[Tensor, ...]:
    """Return the divergence and its gradients by hidden states and weight, or adapter."""
    leaves = given.leaves()
    own, teacher = ((x / temperature).softmax(1) for x in given.logits(*leaves))
    if tokens != "all":
        id_NK = given.label_N[:, None] if tokens == "drawn" else teacher.topk(top_k, dim=1).indices
        own, teacher = (with_others_as_one(x, id_NK) for x in (own, teacher))
    found_N = textbook(kind, teacher, own)
    found_N.backward(given.grad_N)
    return found_N.detach(), *(leaf.grad for leaf in leaves)


def score(
    given: Given, leaves: tuple[Tensor, Tensor], batch: Batch, outputs: Outputs, chunk: int | None, shard: VocabShard
) -> Scores:
    student_NH, weight = leaves
    if given.has_adapters:
        beside = LmHeadLora(student_NH @ given.a_HR, weight)
        return score_with_divergence(student_NH, given.weight_VH, batch, outputs, shard, beside, chunk=chunk)
    return score_with_divergence(student_NH, weight, batch, outputs, shard, None, chunk=chunk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "top_k"), [("all", 0), ("top_k", 4), ("drawn", 0)])
def test_value_and_gradients_are_the_textbooks_however_targets_are_cut(kind: DivergenceKind, tokens: str, top_k: int):
    for has_adapters in (False, True):
        exact, given = Given(torch.float64, has_adapters), Given(torch.float32, has_adapters)
        reference = expected(exact, kind, tokens, top_k, temperature=1.5)
        batch = given.batch(tokens, exact.logits(*exact.leaves())[1].detach() / 1.5, top_k)
        outputs = Outputs(temperature=1.5, divergence=Divergence(kind, SKEW, tokens))
        for chunk in (1, 3, None):
            leaves = given.leaves()
            found = score(given, leaves, batch, outputs, chunk, whole_vocabulary(VOCAB_SIZE))
            found.divergence_N.backward(given.grad_N)
            label_N = (exact.logits(*exact.leaves())[0].detach() / 1.5).log_softmax(1)
            torch.testing.assert_close(
                found.logprob_N.double(), label_N.gather(1, exact.label_N[:, None])[:, 0], rtol=1e-5, atol=1e-5
            )
            for name, value, wanted in zip(
                ("divergence", "hidden", "weight"),
                (found.divergence_N, *(x.grad for x in leaves)),
                reference,
                strict=True,
            ):
                scale = max(1.0, float(wanted.abs().max()))
                error = float((value.detach().double() - wanted).abs().max()) / scale
                assert error < 1e-6, (name, has_adapters, chunk, error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 1, 4])
@pytest.mark.parametrize("lead", [4.0, 15.0, 25.0, 60.0])
def test_a_teacher_that_is_nearly_sure_leaves_the_mass_that_it_leaves(kind: DivergenceKind, top_k: int, lead: float):
    """Others have e^-lead of its mass, less than float32 tells beside 1: the reference is in float64 throughout.

    `top_k` 0: the token that stands in the row, which is now the teacher's favourite and now another.
    """
    given = Given()
    teacher_logit_NV = torch.randn(NUM_TARGETS, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 0.5
    rows_N, favourite_N = torch.arange(NUM_TARGETS), (given.label_N + torch.arange(NUM_TARGETS) % 2) % VOCAB_SIZE
    teacher_logit_NV[rows_N, favourite_N] += lead
    zeros_N = torch.zeros(NUM_TARGETS, dtype=torch.int64)
    batch = Batch.to_score(zeros_N, zeros_N, zeros_N - 1, zeros_N, given.label_N)
    eye = torch.eye(VOCAB_SIZE)
    outputs = Outputs(logprob=False, top_k=top_k, rest=True)
    with torch.no_grad():
        told = score_with_divergence(teacher_logit_NV, eye, batch, outputs, whole_vocabulary(VOCAB_SIZE), None, chunk=3)
    batch = dataclasses.replace(batch, teacher=LikeliestIds(told.top_id_NK.int(), told.top_logprob_NK))
    student_logit_NV = torch.randn(NUM_TARGETS, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    outputs = Outputs(divergence=Divergence(kind, SKEW, "top_k" if top_k else "drawn"))
    leaf = student_logit_NV.clone().requires_grad_()
    found = score_with_divergence(leaf, eye, batch, outputs, whole_vocabulary(VOCAB_SIZE), None)
    found.divergence_N.sum().backward()

    exact = student_logit_NV.double().requires_grad_()
    id_NK = teacher_logit_NV.topk(top_k).indices if top_k else given.label_N[:, None]

    def outcomes(logit_NV: Tensor) -> Tensor:
        logprob_NV = logit_NV.double().log_softmax(1)
        rest_N = logprob_NV.scatter(1, id_NK, -torch.inf).logsumexp(1)
        return torch.cat([logprob_NV.gather(1, id_NK), rest_N[:, None]], dim=1).exp()

    wanted_N = textbook(kind, outcomes(teacher_logit_NV), outcomes(exact))
    wanted_N.sum().backward()
    for value, wanted in ((found.divergence_N, wanted_N.detach()), (leaf.grad, exact.grad)):
        error = float((value.detach().double() - wanted).abs().max()) / max(1.0, float(wanted_N.detach().max()))
        assert error < 1e-6, error


def test_a_server_that_tells_more_digits_than_float32_has_beside_one_is_believed():
    """`drawn`, without what is left: it follows from the one number, of which -1e-9 is told exactly."""
    given = Given()
    told = LikeliestIds(given.label_N[:, None], torch.full((NUM_TARGETS, 1), -1e-9))
    batch = dataclasses.replace(given.batch("all", given.teacher_NH, 0), teacher=told)
    outputs = Outputs(divergence=Divergence("reverse_kl", 0.0, "drawn"))
    found_N = score(given, given.leaves(), batch, outputs, None, whole_vocabulary(VOCAB_SIZE)).divergence_N
    own = (given.student_NH @ given.weight_VH.t()).double().softmax(1).gather(1, given.label_N[:, None])
    teacher = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64)
    own = torch.cat([own, 1 - own], dim=1)
    torch.testing.assert_close(found_N.double(), textbook("reverse_kl", teacher, own), rtol=1e-5, atol=1e-5)


def test_naming_every_id_is_the_whole_distribution():
    given = Given()
    teacher_logit_NV = given.logits(*given.leaves())[1].detach()
    for kind in KINDS:
        whole, named = (
            score(
                given,
                given.leaves(),
                given.batch(tokens, teacher_logit_NV, VOCAB_SIZE),
                Outputs(divergence=Divergence(kind, SKEW, tokens)),
                None,
                whole_vocabulary(VOCAB_SIZE),
            ).divergence_N
            for tokens in ("all", "top_k")
        )
        torch.testing.assert_close(whole, named, rtol=0, atol=1e-5)


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient():
    given = Given()
    given.teacher_NH = given.student_NH
    # A logit is rounded, however a processor adds it up; so is its probability, by as much, and a gradient multiplies
    # that with a weight.
    rounding = torch.finfo(torch.float32).eps * given.logits(*given.leaves())[0].abs().max()
    bound = float(rounding * given.weight_VH.abs().max())
    assert bound < 1e-5
    for kind in KINDS:
        leaves = given.leaves()
        batch = given.batch("all", leaves[0].detach(), 0)
        outputs = Outputs(divergence=Divergence(kind, SKEW, "all"))
        found = score(given, leaves, batch, outputs, 2, whole_vocabulary(VOCAB_SIZE))
        found.divergence_N.sum().backward()
        assert found.divergence_N.abs().max() < 1e-6 and leaves[0].grad.abs().max() < bound


def test_capped_and_divided_logits():
    exact, given = Given(torch.float64), Given()
    leaves, cap, divisor = exact.leaves(), 4.0, 2.0
    own, teacher = ((cap * (x / cap).tanh() / divisor).softmax(1) for x in exact.logits(*leaves))
    wanted_N = textbook("reverse_kl", teacher, own)
    wanted_N.backward(exact.grad_N)
    mine = given.leaves()
    shard = dataclasses.replace(whole_vocabulary(VOCAB_SIZE), logit_cap=cap, logit_divisor=divisor)
    outputs = Outputs(divergence=Divergence("reverse_kl", 0.0, "all"))
    found = score(given, mine, given.batch("all", mine[0].detach(), 0), outputs, 3, shard)
    found.divergence_N.backward(given.grad_N)
    torch.testing.assert_close(found.divergence_N.double(), wanted_N, **EXACT)
    for leaf, wanted in zip(mine, leaves, strict=True):
        torch.testing.assert_close(leaf.grad.double(), wanted.grad, **EXACT)


def test_in_half_precision_it_is_finite_and_near():
    given = Given(torch.bfloat16)
    leaves = given.leaves()
    outputs = Outputs(divergence=Divergence("jsd", SKEW, "all"))
    found = score(given, leaves, given.batch("all", leaves[0].detach(), 0), outputs, 3, whole_vocabulary(VOCAB_SIZE))
    found.divergence_N.backward(given.grad_N.float())
    near = expected(Given(torch.float64), "jsd", "all", 0, 1.0)
    torch.testing.assert_close(found.divergence_N.double(), near[0], rtol=0.05, atol=0.02)
    assert F.cosine_similarity(leaves[0].grad.double().flatten(), near[1].flatten(), dim=0) > 0.999


def check_shards() -> None:
    """In float64; the last shard padded by a row, and again with a second shard that is all padding."""
    for rows_per_rank, tokens in product((12, VOCAB_SIZE), ("all", "top_k")):
        given = Given(torch.float64)
        batch = given.batch(tokens, given.logits(*given.leaves())[1].detach(), 4)
        whole_VH, whole_shard = given.weight_VH, whole_vocabulary(VOCAB_SIZE)
        for top_k in (0, 4):
            outputs, teacher_NH = Outputs(logprob=False, top_k=top_k, rest=True), given.teacher_NH
            shard_VH, shard, own_rows = shard_of(whole_VH, rows_per_rank)
            told = score_with_divergence(teacher_NH, shard_VH.detach(), batch, outputs, shard, None, chunk=3)
            whole = score_with_divergence(teacher_NH, whole_VH, batch, outputs, whole_shard, None)
            assert torch.equal(told.top_id_NK, whole.top_id_NK)
            torch.testing.assert_close(told.top_logprob_NK, whole.top_logprob_NK, rtol=1e-12, atol=1e-12)
        for kind in KINDS:
            hidden_NH, _ = given.leaves()
            shard_VH, shard, own_rows = shard_of(whole_VH, rows_per_rank)
            outputs = Outputs(divergence=Divergence(kind, SKEW, tokens))
            found = score(given, (hidden_NH, shard_VH), dataclasses.replace(batch), outputs, 3, shard)
            found.divergence_N.backward(given.grad_N)
            value_N, by_hidden, by_weight = expected(given, kind, tokens, 4, 1.0)
            torch.testing.assert_close(found.divergence_N, value_N, **EXACT)
            torch.testing.assert_close(hidden_NH.grad, by_hidden, **EXACT)
            torch.testing.assert_close(shard_VH.grad, own_rows(by_weight), **EXACT)


def test_ranks_with_shards_of_the_vocabulary_agree_with_the_whole():
    on_ranks(2, check_shards)
