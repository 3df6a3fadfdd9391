"""Tinker's messages as commands of sessions, and results as its messages; losses against their formulas."""

import json
import math
from base64 import urlsafe_b64encode
from typing import Any

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from pydantic import ValidationError

from longshore.accounts import QuotaSettings
from longshore.commands import (
    CommandResult,
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardOptions,
    ForwardOptions,
    TokenScores,
)
from longshore.losses import CISPO, DRO, GSPO, PPO, Reinforce, TruncatedReinforce
from service.accounts.tenants import Quotas
from service.apis.tinker import samples
from service.apis.tinker.records import (
    AskedLoss,
    CheckpointRecord,
    SampleRequest,
    TinkerRecords,
    TrainingFuture,
)
from service.apis.tinker.translation import (
    command_of,
    head_of,
    loss_and_command,
    policy_loss,
    scores_and_metrics,
    scores_of,
)
from service.apis.tinker.wire import MAX_MESSAGE_BYTES, batch_of, error_body, plain_body, tinker_key
from service.database import engine
from service.database.engine import Database
from service.inference.questions import check_length
from shared.errors import Conflict, InvalidInput, NotFound
from shared.jobs.commands import read_command, stored_form
from shared.settings import Settings
from shared.storage.store import LocalStore
from tests.service.tinker_bodies import (
    FLOAT32,
    INT64,
    SPOILT,
    batch,
    compressed,
    gspo,
    policy,
    sampled,
    setting,
    sparse,
    spoilt,
    tensor,
)


def translated(message: Any) -> bytes:
    return command_of(batch_of(message.SerializeToString()))


def stored(*data: Datum, **options: Any) -> bytes:
    return stored_form(ForwardBackward(data=data, **options))


def told(command: bytes, loss_fn: str, *logprobs: tuple[float, ...], config: Any = None, **result: Any) -> Any:
    """The scores and metrics of a command whose data have these log-probabilities."""
    scores = tuple(TokenScores(logprobs=each) for each in logprobs)
    done = CommandResult(number=1, kind="forward_backward", data=scores, **result)
    return scores_and_metrics(command, loss_fn, config or {}, done)


def test_targets_that_follow_are_the_sequence_itself() -> None:
    """The file is the one that a client's own command of the same data is stored as."""
    assert translated(batch(weights=[0.0, 1.0, 0.5])) == stored(Datum(tokens=(5, 6, 7, 8), weights=(0.0, 1.0, 0.5)))
    assert translated(batch()) == stored(Datum(tokens=(5, 6, 7, 8), weights=(1.0, 1.0, 1.0)))


def test_other_targets_are_labels_one_or_several_in_a_place() -> None:
    labels, weights = ((9,), (7,), (8,)), ((1.0,), (0.0,), (1.0,))
    sent = translated(batch(target_tokens=[9, 7, 8], weights=[1.0, 0.0, 1.0]))
    assert sent == stored(Datum(tokens=(5, 6, 7, 0), labels=labels, label_weights=weights))
    message = batch()
    tensor(message).Clear()
    sparse(tensor(message), [{0: 9, 1: 8}, {}, {1: 7}], 2, INT64)
    sparse(message.data[0].loss_fn_inputs.add(key="weights").value, [{0: 0.5}, {}, {1: 0.25}], 2, FLOAT32)
    several, shares = ((9, 8), (0, 0), (0, 7)), ((0.5, 0.0), (0.0, 0.0), (0.0, 0.25))
    one, other = Datum(tokens=(5, 6, 7, 0), labels=several, label_weights=shares), Datum(tokens=(5, 6), weights=(1.0,))
    assert translated(message) == stored(one)
    message.data.append(batch().data[0])
    follows = other.model_copy(update={"tokens": (5, 6, 7, 8), "weights": (1.0, 1.0, 1.0)})
    assert translated(message) == stored(one, follows), "beside one that scores its own tokens"


def test_a_policy_loss_leaves_out_padding_without_advantage() -> None:
    numbers = {"advantages": (0.0, 1.0, -1.0), "logprobs": (-1.0, -2.0, -3.0)}
    plain = Datum(tokens=(5, 6, 7, 8), **numbers)
    loss = policy_loss("ppo", {}).ours
    assert translated(policy()) == stored(plain, loss=loss)
    padded = plain.model_copy(update={"weights": (0.0, 1.0, 1.0)})
    assert translated(policy(target_tokens=[0, 7, 8])) == stored(padded, loss=loss)
    both = policy(target_tokens=[0, 7, 8])
    both.data.append(policy().data[0])
    assert translated(both) == stored(padded, plain, loss=loss), "whose weights are 1"


def test_gspo_is_of_the_places_that_its_mask_names() -> None:
    """Its ratio is of the sequence: the mean over the mask, and not over all places that are the token that follows."""
    loss = policy_loss("gspo", {}).ours
    assert isinstance(loss, GSPO) and loss.aggregation == "token_mean"
    assert (1 - loss.clip_low, 1 + loss.clip_high) == (0.8, 1.2), "to the bit"
    numbers = {"weights": (0.0, 1.0, 1.0), "advantages": (0.0, 1.0, -1.0), "logprobs": (-1.0, -2.0, -3.0)}
    command = translated(gspo(target_tokens=[0, 7, 8]))
    assert command == stored(Datum(tokens=(5, 6, 7, 8), **numbers), loss=loss) == translated(gspo())
    [found], named = told(command, "gspo", (-1.9, -2.9))
    assert found.values.tolist() == pytest.approx([0.0, -1.9, -2.9])
    s = math.exp(0.1)
    assert named["loss:sum"] == pytest.approx(-s + s, abs=1e-6)
    _, named = told(command, "gspo", (-1.4, -2.8))
    assert named["loss:sum"] == pytest.approx(-1.2 + math.exp(0.4)), "clipped where the advantage is above 0"


def test_stable_reinforce_is_of_the_places_that_were_sampled() -> None:
    """Those alone are pulled towards the sampler, and each pass names the formula that was computed."""
    loss = TruncatedReinforce(truncation=1.0, old_kl_coefficient=0.01)
    numbers = {"weights": (0.0, 1.0, 1.0), "advantages": (0.0, 1.0, -1.0), "logprobs": (-1.0, -2.0, -3.0)}
    command = translated(sampled(("prompt", 1), ("sampled", 2)))
    assert command == stored(Datum(tokens=(5, 6, 7, 8), **numbers), loss=loss)
    assert command == translated(sampled(("prompt", 1), ("sampled", 1), ("sampled", 1), target_tokens=[0, 7, 8]))
    _, named = told(command, "stable_reinforce", (-1.9, -3.2))
    assert named.pop("loss:sum") == pytest.approx(1.9 + 0.005 * 0.01 - math.exp(-0.2) * 3.2 + 0.005 * 0.04)
    assert named == {"stable_reinforce_computed_as_truncated_reinforce:max": 1.0}
    stronger = sampled(("prompt", 1), ("sampled", 2))
    setting("kl_coeff", 0.5)(stronger)
    pulled = stored(Datum(tokens=(5, 6, 7, 8), **numbers), loss=loss.model_copy(update={"old_kl_coefficient": 0.5}))
    assert translated(stronger) == pulled
    _, named = told(command, "stable_reinforce", (-1.9, -3.2), config={"kl_coeff": 0.5})
    assert named["loss:sum"] == pytest.approx(1.9 + 0.25 * 0.01 - math.exp(-0.2) * 3.2 + 0.25 * 0.04)
    body = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {}, "record_stability_info": True}
    SampleRequest.model_validate(body).check()


def test_losses_have_their_settings() -> None:
    message = policy()
    for name, number in (("clip_low_threshold", 0.9), ("clip_high_threshold", 1.5)):
        setting(name, number)(message)
    command, _ = read_command(translated(message))
    assert isinstance(command, ForwardBackwardOptions) and isinstance(command.loss, PPO)
    assert (1 - command.loss.clip_low, 1 + command.loss.clip_high) == (0.9, 1.5)
    assert policy_loss("importance_sampling", {}).ours == Reinforce()
    assert policy_loss("dro", {"beta": 0.5}).ours == DRO(beta=0.5)
    found = policy_loss("cispo", {}).ours
    assert isinstance(found, CISPO) and found.clip_low is not None
    assert (1 - found.clip_low, 1 + found.clip_high) == (0.8, 1.2), "to the bit"
    message.forward_only = True
    forward, _ = read_command(translated(message))
    assert isinstance(forward, ForwardOptions) and forward.score_all


def test_values_are_tinker_s_formulas() -> None:
    new, old, advantage = np.array([-1.0, -2.0, -3.0]), np.array([-1.5, -1.0, -3.0]), np.array([1.0, -2.0, 0.5])
    ratio = [math.exp(0.5), math.exp(-1.0), 1.0]
    expected = {
        "importance_sampling": [-ratio[0], 2 * ratio[1], -0.5],
        "ppo": [-1.2, 1.6, -0.5],
        "cispo": [1.2, -0.8 * 2 * 2, 1.5],
        "dro": [1 + 0.025 * 0.25, -4 + 0.025, 1.5],
    }
    for name, values in expected.items():
        assert policy_loss(name, {}).value(new, old, advantage) == pytest.approx(values), name


def test_results_have_a_number_for_each_place() -> None:
    data = (
        Datum(tokens=(5, 6, 7, 8), weights=(0.0, 1.0, 0.5)),
        Datum(tokens=(5, 6, 0), labels=((9, 8), (3, 4)), label_weights=((1.0, 0.0), (0.0, 2.0))),
    )
    metrics = {"loss": 0.5, "loss_sum": 2.0, "tokens": 7.0, "ratio_max": 3.0, "entropy": 1.0}
    found, named = told(stored(*data), "cross_entropy", (-1.0, -2.0), (-3.0, -4.0), metrics=metrics)
    assert [each.values.tolist() for each in found] == [[0.0, -1.0, -2.0], [-3.0, 0.0, 0.0, -4.0]]
    assert [each.trailing_shape for each in found] == [(), (2,)]
    assert named == {"loss:sum": 1 + 1 + 3 + 8, "tokens:sum": 7.0, "ratio_max:max": 3.0, "entropy:mean": 1.0}
    everything = (-5.0, -1.0, -2.0), (-3.0, -6.0, -7.0, -4.0)
    found, named = told(stored_form(Forward(data=data, score_all=True)), "cross_entropy", *everything)
    assert [each.values.tolist() for each in found] == [[-5.0, -1.0, -2.0], [-3.0, -6.0, -7.0, -4.0]]
    assert named == {"loss:sum": 13.0}


def test_an_answer_is_of_the_loss_that_was_sent() -> None:
    """Its name stands in the id of the request, which a client may change."""
    asked = translated(batch())
    scores = CommandResult(number=1, kind="forward_backward", data=(TokenScores(logprobs=(-1.0, -2.0, -3.0)),))
    assert scores_of(asked, AskedLoss(name="cross_entropy"), scores)
    for other in ("ppo", "nothing"):
        with pytest.raises(NotFound):
            scores_of(asked, AskedLoss(name=other), scores)


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_wrong_is_said(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        command_of(batch_of(spoilt(name, "m", 1)))
    assert caught.value.place and len(str(caught.value)) < 400


def test_bodies_are_bounded_and_whole() -> None:
    body = batch().SerializeToString()
    assert plain_body(compressed(body), "zstd") == body == plain_body(body, "")
    bomb = compressed(b"\0" * (MAX_MESSAGE_BYTES + 1), 19)
    assert len(bomb) < 10_000
    for given, encoding, rule in (
        (bomb, "zstd", "more than the 16,777,216 bytes"),
        (compressed(body)[:-3], "zstd", "no body under zstd"),
        (compressed(body) + b"more", "zstd", "no body under zstd"),
        (body, "zstd", "no body under zstd"),
        (body, "gzip", "plain or under zstd"),
    ):
        with pytest.raises(InvalidInput, match=rule):
            plain_body(given, encoding)
    with pytest.raises(InvalidInput, match="no ForwardBackwardRequest"):
        batch_of(body[:-2])


def test_a_small_body_makes_no_large_work() -> None:
    """Three hundred bytes held the service for half a minute."""
    chunks, head = b"\x0a\x02\x0a\x00" * 300_000, b"\x0a\x01m\x10\x07"
    for datum, rule in (
        (chunks, "at most 65,536 chunks"),
        (b"\x7b\x7c" + chunks, "at most 65,536 chunks"),
        (b"\x7b\x7c" * 300_000, "not served"),  # groups, which no client sends: skipped
        (b"\x12\x00" * 200_001, "at most 32 inputs"),
        (b"\x22\x00" * 200_001, "at most 65,536 chunks of an input, and spans"),
    ):
        sent = compressed(head + b"\x1a" + _VarintBytes(len(datum)) + datum, 19)
        with pytest.raises(InvalidInput, match=rule):
            loss_and_command(sent, "zstd")
        assert head_of(sent, "zstd").seq_id == 7, "the model's next request has the next number"
    with pytest.raises(InvalidInput, match="from 1 to 65,536"):
        batch_of(head + b"\x1a\x00" * 65_537)
    shape = batch()
    tensor(shape).shape.extend([1] * 200_001)
    with pytest.raises(InvalidInput, match="one or two dimensions"):
        batch_of(shape.SerializeToString())
    with pytest.raises(InvalidInput, match="1,000 times as large"):
        plain_body(compressed(b"\0" * (5 << 20), 19), "zstd")


def test_ids_of_requests_say_what_they_are_of() -> None:
    loss = AskedLoss(name="ppo", config={"clip_low_threshold": 0.9})
    future = TrainingFuture(model_id="tinker-00:train:3", command=17, kind="passes", loss=loss)
    assert TrainingFuture.parse(future.request_id) == future
    for changes in ({"command": "x"}, {"command": -1}, {"kind": "explode"}, {"loss": "ppo"}, {"more": 1}):
        with pytest.raises(NotFound):
            TrainingFuture.parse(urlsafe_b64encode(json.dumps(future.model_dump() | changes).encode()).decode())
    for broken in ("", "AA=", "€", "a" * 5000, future.request_id[:-8]):
        with pytest.raises(NotFound):
            TrainingFuture.parse(broken)


def test_errors_and_keys_have_tinker_s_shape() -> None:
    assert error_body(422, "invalid_input", "it is short", "data[0]")[1]["error"] == "data[0]: it is short"
    assert error_body(409, "conflict", "it has ended", None)[0] == 400, "the SDK would repeat a 409 for minutes"
    assert error_body(503, "unavailable", "away", None)[1]["category"] == "server"
    assert tinker_key("/tinker/api/v1/healthz", "tml-ls-0-1") == "Bearer ls-0-1"
    assert tinker_key("/api/v1/runs", "tml-ls-0-1") is None


async def test_a_name_is_one_checkpoint_s(tmp_path) -> None:
    store, database = LocalStore(tmp_path), Database(f"sqlite:///{tmp_path}/index.db")
    engine.upgrade(database)
    quotas = Quotas(QuotaSettings(), store, database)
    records = TinkerRecords(database, quotas, "acme")
    model = "tinker-" + "0" * 21 + ":train:0"
    first, other = (CheckpointRecord(model_id=model, kind="weights", name="a", command=n) for n in (1, 2))
    await records.claim(first, overwrite=False)
    await records.claim(first.model_copy(update={"created_at": 0.0}), overwrite=False)
    with pytest.raises(Conflict):
        await records.claim(other, overwrite=False)
    await records.claim(other, overwrite=True)
    assert (await records.checkpoint(first.id)).command == 2
    await records.change(other, expires_at=1.0)
    assert await records.checkpoints() == []
    for path in (first.id, "tinker://../weights/a", f"tinker://{model}/weights/..", f"{first.id}/../b", "weights/a"):
        with pytest.raises(NotFound):
            await records.checkpoint(path)
    with pytest.raises(NotFound):
        await TinkerRecords(database, quotas, "other").checkpoint(first.id)
    with pytest.raises(InvalidInput):
        await records.claim(first.model_copy(update={"name": "../x"}), overwrite=False)


def test_samples_are_divided_over_questions_of_a_bounded_size() -> None:
    body = {
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 4096, "stop": []},
        "num_samples": 150,
    }
    asked = SampleRequest.model_validate(body)
    assert samples.parts(asked) == [(0, 64), (64, 64), (128, 22)]
    last = samples.part_of(samples.question(asked, "m"), 10, 4, 1)
    assert (last.seed, last.n, last.ignore_eos, last.prompt) == (14, 1, True, [5, 6])
    narrow = asked.model_copy(
        update={"sampling_params": asked.sampling_params.model_copy(update={"top_p": 0.5, "top_k": 7})}
    )
    drawn = samples.question(narrow, "m")
    assert (drawn.top_p, drawn.top_k, last.top_p, last.top_k) == (0.5, 7, 1.0, None)
    stopped = asked.model_copy(update={"sampling_params": asked.sampling_params.model_copy(update={"stop": (2, 9)})})
    assert samples.question(stopped, "m").stop_token_ids == [2, 9]
    for name, value in (("prompt_alt_tokens_k", 2), ("target_prompt_logprobs", {})):
        with pytest.raises(InvalidInput) as caught:
            asked.model_copy(update={name: value}).check()
        assert caught.value.place == name
    for wrong in (-1, 21, 10**9):
        with pytest.raises(ValidationError, match="topk_prompt_logprobs"):
            SampleRequest.model_validate(body | {"topk_prompt_logprobs": wrong})
    asked_more = asked.model_copy(update={"topk_prompt_logprobs": 20})
    whole = samples.question(asked_more, "m")
    assert [samples.part_of(whole, 0, first, 1).prompt_logprobs for first in (0, 1)] == [20, None]
    for prompt in ([5] * 8192, [[5], [5] * 8192]):
        with pytest.raises(InvalidInput, match=r"^prompt: 8,192 tokens; prompt and answer together"):
            check_length(Settings(), prompt)
    for fits in ([5] * 8191, ["5" * 9000], "5" * 9000, "5" * (16 * 8192), ["5" * (16 * 8192)] * 2):
        check_length(Settings(), fits)
    for text in ("5" * (16 * 8192 + 1), ["5", "5" * (16 * 8192 + 1)]):
        with pytest.raises(InvalidInput, match=r"^prompt: 131,073 characters; .* of the 8,192 tokens"):
            check_length(Settings(), text)
    # A long prompt is scored once, and its ids are not copied for each of the questions.
    many = {"prompt": {"chunks": [{"tokens": [5] * 8000}]}, "num_samples": 1024, "sampling_params": {"max_tokens": 512}}
    scored = SampleRequest.model_validate(many | {"prompt_logprobs": True})
    assert samples.parts(scored) == [(0, 496), (496, 512), (1008, 16)]
    whole = samples.question(scored, "m")
    assert all(samples.part_of(whole, 0, *part).prompt is whole.prompt for part in samples.parts(scored))
    for wrong in (-1, 21, 10**9):
        with pytest.raises(ValidationError):
            SampleRequest.model_validate(body | {"topk_prompt_logprobs": wrong})
