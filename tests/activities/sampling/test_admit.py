"""Prompts admitted to a step: the oldest that are complete, once decided, wherever their samples are by then."""

import threading
from pathlib import Path

import numpy as np
import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.sampling.admit import AdmitGroups, AdmitRequest, Admitted, BegunPrompts
from activities.sampling.completions import RoutesFile, Sample, SampledGroup, read_sampled_groups
from activities.sampling.sample import write_samples
from activities.tokenizing.render_prompts import PromptRow, PromptsFile, write_rows
from longshore.fields import Artifact
from longshore.views import CarriedOver
from shared.jobs.packed import RouteShape
from shared.settings import Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.paths import RunKeys, completions, sampled_part, samples

ROUTES = RouteShape(num_layers=2, num_experts=4, per_token=1)
NUM = 4


@pytest.fixture
def host(tmp_path: Path) -> HostContext:
    return HostContext(Settings(root=tmp_path / "root"))


@pytest.fixture
def prompts(host: HostContext, tmp_path: Path) -> Artifact:
    (folder := tmp_path / "prompts").mkdir()
    write_rows((PromptRow(f"rows.jsonl:{n}", (1, n), {"row": n}) for n in range(3 * NUM)), folder)
    seal(folder)
    return upload_artifact(host.store, "prompts", folder)


def group(step: int, number: int, has_routes: bool = False) -> SampledGroup:
    routes = [np.full((2, ROUTES.num_layers, 1), n, ROUTES.dtype.base).tobytes() for n in (0, number % 4)]
    tokens = (10 + step, 20 + number, 30)
    sample = Sample(token_ids=tokens, logprobs=(-1.0, -2.0, -3.0), text=f"{step}.{number}", finish_reason="stop")
    told = SampledGroup(
        group=number,
        row=(step - 1) * NUM + number,
        place=f"rows.jsonl:{number}",
        prompt_ids=(1, number),
        policy_version=step,
        samples=(sample.model_copy(update={"routes": routes[1]}) if has_routes else sample,),
    )
    return told.model_copy(update={"prompt_routes": routes[0]}) if has_routes else told


def complete(host: HostContext, step: int, *numbers: int, has_routes: bool = False) -> None:
    for number in numbers:
        host.store.put_bytes(sampled_part(f"key-{step}", number), group(step, number, has_routes).encoded())


def put_together(host: HostContext, prompts: Artifact, step: int, has_routes: bool = False) -> None:
    """As `sample` does it at its end."""
    with host.scratch("sample") as scratch, PromptsFile(host.stage(prompts)) as rows:
        folders = scratch / "completions", scratch / "samples"
        write_samples((group(step, number, has_routes) for number in range(NUM)), rows, *folders)
        for folder, key in zip(folders, (completions(f"key-{step}"), samples(f"key-{step}")), strict=True):
            host.keep(key, folder)
    for number in range(NUM):
        host.store.delete(sampled_part(f"key-{step}", number))


def request(prompts: Artifact, left: CarriedOver, step: int = 1, last: int = 2, **changes: object) -> AdmitRequest:
    begun = tuple(BegunPrompts(step=n, key=f"key-{n}", groups=left.of_step(n, NUM)) for n in range(1, last + 1))
    return AdmitRequest(run_id="r1", step=step, prompts=prompts, begun=begun, num_groups=NUM).model_copy(update=changes)


def admitted(host: HostContext, asked: AdmitRequest) -> Admitted:
    found: Admitted = ActivityEnvironment().run(AdmitGroups(host).admit_groups, asked)
    return found


def taken(found: Admitted) -> dict[int, tuple[int, ...]]:
    return {one.step: one.groups for one in found.taken}


def groups_of(host: HostContext, found: Admitted) -> list[SampledGroup]:
    return list(read_sampled_groups(stage(found.completions, host.paths.cache, host.settings.s3)))


def test_the_oldest_that_are_complete_are_taken_and_the_others_left(host: HostContext, prompts: Artifact) -> None:
    complete(host, 1, 0, 3)
    complete(host, 2, 1, 2, 3)
    first = admitted(host, request(prompts, CarriedOver()))
    assert taken(first) == {1: (0, 3), 2: (1, 2)}
    found = groups_of(host, first)
    assert [one.group for one in found] == [0, 1, 2, 3], "counted anew"
    assert [(one.policy_version, one.row) for one in found] == [(1, 0), (1, 3), (2, 5), (2, 6)]
    left = CarriedOver().without(taken(first), NUM)
    assert left == CarriedOver(next=3, left={1: (1, 2), 2: (0, 3)}) and left.oldest == 1
    complete(host, 1, 1, 2)
    complete(host, 2, 0)
    second = admitted(host, request(prompts, left, step=2))
    assert taken(second) == {1: (1, 2), 2: (0, 3)}
    assert left.without(taken(second), NUM) == CarriedOver(next=3) and CarriedOver(next=3).oldest == 3


def test_it_waits_until_enough_are_complete(host: HostContext, prompts: Artifact) -> None:
    complete(host, 1, 0, 1, 2)
    found: list[Admitted] = []
    thread = threading.Thread(target=lambda: found.append(admitted(host, request(prompts, CarriedOver()))))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and not found
    complete(host, 2, 3)
    thread.join(60)
    assert taken(found[0]) == {1: (0, 1, 2), 2: (3,)}


def test_what_was_decided_stays_if_more_are_complete_or_all_are_put_together(
    host: HostContext, prompts: Artifact
) -> None:
    complete(host, 1, 1)
    complete(host, 2, 0, 1, 2)
    first = admitted(host, request(prompts, CarriedOver()))
    complete(host, 1, 0, 2, 3)
    assert admitted(host, request(prompts, CarriedOver())) == first
    put_together(host, prompts, 1)
    host.store.delete(f"{completions(first.completions.uri.split('/')[-2])}/manifest.json")
    assert admitted(host, request(prompts, CarriedOver())) == first, "and is made again of all of them"


def test_samples_that_are_drawn_under_another_key_are_decided_about_anew(host: HostContext, prompts: Artifact) -> None:
    """As after a sampler failed a proof: what it drew is not trained."""
    complete(host, 1, 0, 1)
    complete(host, 2, 0, 1)
    asked = request(prompts, CarriedOver())
    assert taken(admitted(host, asked)) == {1: (0, 1), 2: (0, 1)}
    complete(host, 3, 0, 1, 2, 3)
    again = asked.model_copy(update={"begun": (asked.begun[0].model_copy(update={"key": "key-3"}), asked.begun[1])})
    assert taken(admitted(host, again)) == {1: (0, 1, 2, 3)}
    decision = host.store.get_bytes(RunKeys("r1").admitted(1))
    assert b'"key-3"' in decision and b'"key-1"' not in decision


def test_groups_that_were_drawn_again_keep_their_numbers_in_the_step(host: HostContext, prompts: Artifact) -> None:
    complete(host, 1, 2)
    complete(host, 2, 0, 3)
    numbered = request(prompts, CarriedOver(next=3, left={1: (2,), 2: (0, 3)}), num_groups=3, numbers=(1, 2, 7))
    found = groups_of(host, admitted(host, numbered))
    assert [(one.policy_version, one.group) for one in found] == [(1, 1), (2, 2), (2, 7)]
    assert host.store.head(RunKeys("r1").admitted(1)) is None, "the step's own decision is another one"


def test_routes_stay_those_of_their_tokens(host: HostContext, prompts: Artifact) -> None:
    """From parts, which have their bytes, and from a folder, which has their places."""
    put_together(host, prompts, 1, has_routes=True)
    complete(host, 2, 0, has_routes=True)
    left = CarriedOver(next=3, left={1: (1, 2, 3), 2: (0,)})
    found = admitted(host, request(prompts, left, routes=ROUTES))
    folder = stage(found.completions, host.paths.cache, host.settings.s3)
    file = RoutesFile([folder], ROUTES)
    for one, number in zip(read_sampled_groups(folder), (1, 2, 3, 0), strict=True):
        [sample] = one.samples
        ids = (*one.prompt_ids, *sample.token_ids)
        route_TLK = file.of_sequence(ids, 2, (one.prompt_block, sample.block))
        assert route_TLK[:2].tolist() == [[[0], [0]]] * 2
        assert route_TLK[2:].tolist() == [[[number % 4]] * 2] * 3
