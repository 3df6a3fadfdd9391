"""Prompts to packed steps through a real sampler: the same bytes every time, nothing drawn twice, nothing mixed up."""

import json
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.grading.grade import Grade, GradeRequest
from activities.host_context import HostContext
from activities.sampling.client import Sampler
from activities.sampling.completions import Rows, numbers_of, sample_seed
from activities.sampling.sample import (
    Drawing,
    PolicySampleRequest,
    Proved,
    ProveRequest,
    Sampled,
    SamplerActivities,
    Share,
    ShareRequest,
    draw_group,
)
from activities.sampling.samplers import Samplers
from activities.tokenizing.render_prompts import PromptRow, PromptsFile
from activities.trajectories.group_samples import GroupSamples, GroupSamplesRequest
from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories
from longshore.fields import Artifact, Fence
from longshore.views import StepStatus
from shared.chat.completions import Sampling
from shared.errors import InvalidInput, SamplerMismatch, SamplerUnavailable
from shared.runs.acceptance import parse_grader
from shared.serving import LeasedSampler, ServedSampler
from shared.settings import Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.groups import rl_run
from tests.activities.sampling.conftest import (
    GRADER,
    GROUP_SIZE,
    NUM_PROMPTS,
    Place,
    SamplerProxy,
    cancelled_when,
    groups_in,
    proxy_of,
    rendered,
    request_of,
    sampled,
    settings_of,
)
from tests.activities.sampling.injected import (
    Policy,
    check_that_faults_are_noticed,
    transformers_logprobs,
    write_weights,
    write_zero_adapter,
)
from tests.megatron_worker.sampler_process import NAME


def packed(settings: Settings, found: Sampled) -> tuple[str, str, dict[str, float]]:
    """Grade, group and pack: the hashes of the units and of the plan, and what is reported."""
    run = ActivityEnvironment().run
    graded = run(Grade(HostContext(settings)).grade, GradeRequest(samples=found.samples, grader=parse_grader(GRADER)))
    assert graded.summary.num_failed == 0 and graded.summary.std > 0
    request = GroupSamplesRequest(completions=found.completions, grades=graded.grades)
    grouped = run(GroupSamples(HostContext(settings)).group_samples, request)
    step = StepStatus(step=1, key="1", groups=grouped.groups_uri)
    own = {"prompts": {"uri": "file:///prompts"}, "grader": parse_grader(GRADER), "steps": 1}
    run_of = rl_run(max_tokens=128, rollouts=own | {"max_completion_tokens": 24})
    pack = GroupsRequest(run_id="r1", tenant="default", run=run_of, step=step, policy_version=3, vocab_size=512)
    result = run(PackTrajectories(HostContext(settings)).pack_trajectories, pack)
    assert result.data is not None
    assert result.metrics["reward_mean"] == pytest.approx(graded.summary.mean)
    assert result.metrics["trajectories"] == found.num_samples == NUM_PROMPTS * GROUP_SIZE
    assert result.metrics["truncation_rate"] == found.num_cut_off / found.num_samples
    assert result.metrics["response_tokens_mean"] == found.num_tokens / found.num_samples
    return result.data.units.sha256, result.data.plan.sha256, result.metrics


def test_from_prompts_to_a_packed_step_twice_to_the_same_bytes_with_a_cancel_between(
    place: Place, tmp_path: Path
) -> None:
    whole = settings_of(tmp_path / "whole", place)
    expected = sampled(whole, request_of(place, rendered(whole, place)))
    with proxy_of(place.sampler.url) as proxy:
        broken = settings_of(tmp_path / "broken", place, proxy.url)
        request = request_of(place, rendered(broken, place), run_id="r2")
        proxy.hold_after = 5
        cancelled_while_drawing(broken, request, proxy)
        held = proxy.prompts()
        parts = sorted((tmp_path / "broken" / "store" / "sampled").glob("*-parts/*"))
        assert len(parts) == 5, "a finished prompt stands in the store at once"
        proxy.asked.clear()
        proxy.hold_after = 1 << 62
        found = sampled(broken, request)
        again = proxy.prompts()
    assert not list((tmp_path / "broken" / "store" / "sampled").glob("*-parts/*")), "forgotten at the end"
    parts[0].write_bytes(b"left by an attempt that was killed as it forgot them")
    assert sampled(broken, request) == found and not parts[0].exists()
    assert len(again) == NUM_PROMPTS - 5 and len(held) == NUM_PROMPTS
    assert (found.completions.sha256, found.samples.sha256) == (expected.completions.sha256, expected.samples.sha256)
    assert packed(broken, found) == packed(whole, expected)
    assert not list((tmp_path / "broken" / "scratch").iterdir())


def cancelled_while_drawing(settings: Settings, request: PolicySampleRequest, proxy: SamplerProxy) -> None:
    """Cancel when five prompts are answered and the others wait for a server that says nothing."""
    store = settings.root_path / "store" / "sampled"
    cancelled_when(
        lambda: len(list(store.glob("*-parts/*.json"))) >= 5 and proxy.answered >= NUM_PROMPTS,
        lambda environment: sampled(settings, request, environment),
    )


def test_shares_of_several_samplers_are_the_bytes_of_one(place: Place, tmp_path: Path) -> None:
    """One share of three was lost before it was drawn: who puts the result together asks for its prompts alone."""
    whole = settings_of(tmp_path / "whole", place)
    expected = sampled(whole, request_of(place, rendered(whole, place)))
    with proxy_of(place.sampler.url) as proxy:
        shared = settings_of(tmp_path / "shared", place, proxy.url)
        request = request_of(place, rendered(shared, place))
        activities = SamplerActivities(HostContext(shared), Samplers(shared))
        asked = []
        for number in (2, 0):
            share = ShareRequest(**dict(request), share=Share(number=number, count=3))
            assert share.key == request.key
            ActivityEnvironment().run(activities.draw_share, share)
            asked.append(sorted(proxy.prompts()))
            proxy.asked.clear()
        found = sampled(shared, request)
        asked.append(sorted(proxy.prompts()))
        assert [len(prompts) for prompts in asked] == [NUM_PROMPTS // 3] * 3
        assert len({prompt for prompts in asked for prompt in prompts}) == NUM_PROMPTS
        proxy.asked.clear()
        ActivityEnvironment().run(activities.draw_share, share)
        assert not proxy.asked, "a share that comes late asks nobody"
    assert (found.completions.sha256, found.samples.sha256) == (expected.completions.sha256, expected.samples.sha256)


def test_a_second_attempt_asks_nobody(place: Place, tmp_path: Path) -> None:
    with proxy_of(place.sampler.url) as proxy:
        settings = settings_of(tmp_path, place, proxy.url)
        prompts = rendered(settings, place)
        first = sampled(settings, request_of(place, prompts))
        proxy.asked.clear()
        assert sampled(settings, request_of(place, prompts, keep=place.adapters, run_id="r9")) == first
        assert proxy.asked == []


def test_every_sample_is_its_own_prompts_and_seeds(place: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, place)
    prompts = rendered(settings, place)
    request = request_of(place, prompts, rows=Rows(first=5, count=NUM_PROMPTS, seed=5))
    found = groups_in(settings, sampled(settings, request))
    assert [group.row for group in found] == numbers_of(request.rows, NUM_PROMPTS)
    assert [group.group for group in found] == list(range(NUM_PROMPTS))
    shown = stage(sampled(settings, request).samples, tmp_path / "cache", settings.s3) / "samples.jsonl"
    items = [json.loads(line) for line in shown.read_text().splitlines()]
    assert len(items) == NUM_PROMPTS * GROUP_SIZE
    name = f"r1-{place.adapters[0].sha256[:16]}"
    with (
        PromptsFile(stage(prompts.prompts, tmp_path / "cache", settings.s3)) as file,
        Sampler(place.sampler.url, place.sampler.api_key) as client,
    ):
        for group in found:
            prompt = file[group.row]
            assert (group.prompt_ids, group.place, group.policy_version) == (prompt.token_ids, prompt.place, 3)
            for j, sample in enumerate(group.samples):
                item = items[group.group * GROUP_SIZE + j]
                assert item["item"] == prompt.item
                assert item["sample"]["output_text"] == sample.text
                assert item["sample"]["finish_reason"] == sample.finish_reason
                assert item["sample"]["num_tokens"] == len(sample.token_ids)
            seed = sample_seed(request.seed, group.group) + 2
            [alone] = client.sample(name, prompt.token_ids, request.sampling, n=1, seed=seed)
            assert (alone.token_ids, alone.logprobs) == (group.samples[2].token_ids, group.samples[2].logprobs)


def test_the_samples_follow_from_what_the_key_holds_and_from_nothing_else(place: Place, tmp_path: Path) -> None:
    prompts = rendered(settings_of(tmp_path, place), place)
    first = request_of(place, prompts)
    lease = LeasedSampler(run_id="r1", fence=Fence(epoch=1), worker_id="w1")
    same = {"run_id": "r2", "keep": place.adapters, "adapter": place.adapters[0].model_copy(update={"uri": "s3://b/c"})}
    assert all(request_of(place, prompts, **{name: value}).key == first.key for name, value in same.items())
    others = {
        "model": place.adapters[1],
        "dtype": "bfloat16",
        "prompts": place.adapters[1],
        "rows": Rows(count=NUM_PROMPTS, seed=6),
        "group_size": 5,
        "sampling": Sampling(temperature=1.3, max_tokens=25, stop=("q",)),
        "seed": 12,
        "adapter": None,
        "policy_version": 4,
        "place": lease,
    }
    keys = {request_of(place, prompts, **{name: value}).key for name, value in others.items()} | {first.key}
    assert len(keys) == len(others) + 1
    assert request_of(place, prompts, place=lease.model_copy(update={"sampler": "vllm"})).key not in keys
    later = lease.model_copy(update={"fence": Fence(epoch=7), "worker_id": "w2", "run_id": "r2"})
    assert request_of(place, prompts, place=later).key == request_of(place, prompts, place=lease).key


def test_adapters_come_and_go_by_run(place: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, place)
    prompts = rendered(settings, place)
    one, two, three = place.adapters
    names = [f"r4-{adapter.sha256[:16]}" for adapter in place.adapters]

    def serve(run_id: str, adapter: Artifact | None, *keep: Artifact) -> tuple[set[str], str]:
        rows = Rows(first=len(seen), count=1)
        request = request_of(place, prompts, run_id=run_id, adapter=adapter, keep=keep, rows=rows)
        found = sampled(settings, request)
        seen.append(found.completions.sha256)
        return {name for name in client.models() if name.startswith(("r4-", "r4x-"))}, found.completions.sha256

    seen: list[str] = []
    with Sampler(place.sampler.url, place.sampler.api_key) as client:
        assert serve("r4", one)[0] == {names[0]}
        assert serve("r4", two, one)[0] == {names[0], names[1]}
        assert serve("r4-x", three)[0] == {names[0], names[1], f"r4-x-{three.sha256[:16]}"}, "of another run"
        assert serve("r4", three, two)[0] == {names[1], names[2], f"r4-x-{three.sha256[:16]}"}
        assert serve("r4", None)[0] == {f"r4-x-{three.sha256[:16]}"}
        assert serve("r4-x", None)[0] == set()
    assert len(set(seen)) == 6


def test_what_the_sampler_refuses_names_the_prompt(place: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, place)
    request = request_of(place, rendered(settings, place), sampling=Sampling(max_tokens=250))
    with pytest.raises(InvalidInput, match=r"rows.jsonl:\d+: the sampler refuses \(400: .*256"):
        sampled(settings, request)


def test_a_server_that_forgot_the_adapter_is_asked_again(place: Place) -> None:
    how = Drawing(group_size=1, sampling=Sampling(), seed=0, policy_version=0)
    with (
        Sampler(place.sampler.url, place.sampler.api_key) as client,
        pytest.raises(SamplerUnavailable, match="serves r1-gone no longer"),
    ):
        draw_group(client, "r1-gone", how, 0, 0, PromptRow("rows.jsonl:1", (1, 2, 3), {}))


def test_a_server_that_is_away_is_said_to_be_and_parts_stay(place: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, place, "http://127.0.0.1:9")
    with pytest.raises(SamplerUnavailable):
        sampled(settings, request_of(place, rendered(settings, place)))


def test_rows_go_round_in_shuffled_epochs() -> None:
    stretch = numbers_of(Rows(first=0, count=30, seed=3), 10)
    epochs = [stretch[start : start + 10] for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert numbers_of(Rows(first=7, count=9, seed=3), 10) == stretch[7:16]
    assert numbers_of(Rows(first=0, count=10, seed=4), 10) != epochs[0]
    assert numbers_of(Rows(), 10) == list(range(10))
    with pytest.raises(ValueError, match="would be ignored"):
        Rows(seed=1)


def test_seeds_leave_room_and_differ() -> None:
    seeds = {sample_seed(seed, group) for seed in (0, 1, 2**62) for group in range(1000)}
    assert len(seeds) == 3000
    assert min(seeds) >= 0 and 2**61 < max(seeds) < 2**62


def test_an_adapter_is_proved_by_its_logprobs(place: Place, tmp_path: Path, tiny_model: Path) -> None:
    settings = settings_of(tmp_path, place)
    prompts = rendered(settings, place)
    trainer = transformers_logprobs(tiny_model, path_of(place.adapters[1]), prompts.probe)

    def prove(adapter: Artifact | None, logprobs: tuple[float, ...], bound: float = 1e-4) -> float:
        request = ProveRequest(
            run_id="r5", adapter=adapter, probe=prompts.probe, logprobs=logprobs, bound=bound, place=ServedSampler()
        )
        found: Proved = ActivityEnvironment().run(
            SamplerActivities(HostContext(settings), Samplers(settings)).prove_adapter, request
        )
        return found.max_difference

    assert 0 <= prove(place.adapters[1], trainer) < 1e-4
    for other in (place.adapters[0], None):
        with pytest.raises(SamplerMismatch, match=r"token \d+ of the probe \(id \d+\) has the logprob -.* 0.0001"):
            prove(other, trainer)
    spoilt = (*trainer[:4], trainer[4] - 0.5, *trainer[5:])
    again = "after it was loaded anew from the store"
    with pytest.raises(SamplerMismatch, match=rf"token 5 of the probe \(id {prompts.probe[5]}\).*{again}"):
        prove(place.adapters[1], spoilt)
    assert prove(place.adapters[1], spoilt, bound=0.6) == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(SamplerMismatch, match=r"token 5 .* nan apart"):
        prove(place.adapters[1], (*trainer[:4], float("nan"), *trainer[5:]))


def path_of(artifact: Artifact) -> Path:
    return Path(artifact.uri.removeprefix("file://"))


def test_a_stale_a_wrong_and_a_missing_adapter_are_noticed(place: Place, tmp_path: Path, tiny_model: Path) -> None:
    settings = settings_of(tmp_path, place)
    probe = rendered(settings, place).probe
    stale, newest, wrong = (path_of(adapter) for adapter in place.adapters)
    policy = Policy(place.adapters[1], True, probe, transformers_logprobs(tiny_model, newest, probe))
    others = {"stale": stale, "wrong": wrong, "missing": write_zero_adapter(tmp_path / "zero", newest)}
    check_that_faults_are_noticed(policy, others, HostContext(settings), Samplers(settings), ServedSampler())


def test_stale_wrong_and_missing_weights_are_noticed(place: Place, tmp_path: Path, tiny_model: Path) -> None:
    settings = settings_of(tmp_path, place)
    probe = rendered(settings, place).probe
    stale, newest, wrong = (write_weights(tmp_path / f"weights-{seed}", tiny_model, seed) for seed in (1, 2, 3))
    seal(newest)
    weights = upload_artifact(LocalStore(tmp_path / "store"), "weights", newest)
    policy = Policy(weights, False, probe, transformers_logprobs(newest, None, probe))
    others = {"stale": stale, "wrong": wrong, "missing": tiny_model}
    try:
        check_that_faults_are_noticed(policy, others, HostContext(settings), Samplers(settings), ServedSampler())
    finally:
        with Sampler(place.sampler.url, place.sampler.api_key) as client:
            client.load_weights(NAME, str(tiny_model))
