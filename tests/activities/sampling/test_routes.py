"""Routes of samples, from a sampler's answer to packed units: checked, bound to their sequences, refused by name."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activities.host_context import HostContext
from activities.sampling.completions import (
    ROUTES,
    Branch,
    RoutesFile,
    RoutesWriter,
    Sample,
    SampledGroup,
    read_answer,
    read_sampled_groups,
    sent_bytes,
)
from activities.trajectories.group_samples import GROUPS, GroupSamples, GroupSamplesRequest
from activities.trajectories.pack_trajectories import GroupsRequest, PackedGroups, PackTrajectories
from longshore.views import StepStatus
from shared.chat.trajectories import DrawnTurn, sequences_of_turns
from shared.errors import InvalidInput
from shared.jobs.packed import RouteShape, Units
from shared.settings import DownloadSettings, Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.groups import group, rl_run, write_groups

SHAPE = RouteShape(num_layers=2, num_experts=8, per_token=3)
WIDE = RouteShape(num_layers=1, num_experts=300, per_token=2)
PROMPT, ANSWERS = (1, 2, 3), ((4, 5, 6), (4, 5), (7,), (4, 5, 6))


def routes(num_tokens: int, seed: int, shape: RouteShape = SHAPE) -> np.ndarray:
    random = np.random.default_rng(seed)
    size = num_tokens * shape.num_layers
    drawn = [random.permutation(shape.num_experts)[: shape.per_token] for _ in range(size)]
    return np.array(drawn, np.int32).reshape(num_tokens, shape.num_layers, shape.per_token)


def as_answer(route_TLK: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, route_TLK)
    return base64.b64encode(file.getvalue()).decode()


# What a sampler sends.


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [(np.uint8, SHAPE, 1), (np.int64, SHAPE, 1), (np.uint16, WIDE, 2), (np.int32, WIDE, 2)],
)
def test_an_answer_in_any_integers_is_read(dtype: Any, shape: RouteShape, num_bytes: int) -> None:
    sent = routes(5, 0, shape)
    found = read_answer(as_answer(sent.astype(dtype)), 5, shape, "rows.jsonl:1: sample 0")
    assert len(found) == sent.size * num_bytes
    assert (np.frombuffer(found, shape.dtype) == sent).all()


def changed(at: tuple[int, ...], value: int) -> str:
    found = routes(5, 0)
    found[at] = value
    return as_answer(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "sends no routed_experts.*--enable-return-routed-experts.*routing_replay: off"),
        ("not base64", "cannot be read"),
        (base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "cannot be read"),
        (as_answer(routes(5, 0).astype(float)), "cannot be read"),
        (as_answer(routes(4, 0)), r"\(4, 2, 3\).*\(5, 2, 3\)"),
        (as_answer(routes(5, 0)[:, :1]), r"\(5, 1, 3\).*\(5, 2, 3\)"),
        (as_answer(routes(5, 0)[..., :2]), r"\(5, 2, 2\).*\(5, 2, 3\)"),
        (as_answer(routes(5, 0))[:-8], "cannot be read"),
        (changed((3, 1, 2), 8), "token 3 has the experts.* in layer 1.*has 8"),
        (changed((3, 1, 2), -1), "token 3 has the experts.* in layer 1.*has 8"),
        (changed((4, 0), 5), r"token 4 has the experts \[5, 5, 5\] in layer 0.*twice"),
        (as_answer(np.zeros((5, 2, 3), np.uint8)), "token 0.*twice"),
    ],
)
def test_what_no_model_chose_is_refused_with_the_samples_name(text: str | None, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule) as caught:
        read_answer(text, 5, SHAPE, "rows.jsonl:7: sample 2")
    assert caught.value.place == "rows.jsonl:7: sample 2"


def test_of_an_answer_that_has_all_layers_those_with_experts_are_taken() -> None:
    """vLLM's has zeros for the others."""
    shape, sent = SHAPE.model_copy(update={"has_experts": (False, True, False, True)}), routes(5, 0)
    everything = np.zeros((5, 4, 3), np.uint8)
    everything[:, [1, 3]] = sent
    assert everything.nbytes == 5 * sent_bytes(shape)
    for each in (everything, sent):
        assert (np.frombuffer(read_answer(as_answer(each), 5, shape, ""), shape.dtype) == sent).all()
    with pytest.raises(InvalidInput, match=r"\(5, 4, 3\).*\(5, 2, 3\)"):
        read_answer(as_answer(everything), 5, SHAPE, "")


# The file beside the samples.


def drawn() -> SampledGroup:
    own = [routes(len(answer) - 1, 10 + number) for number, answer in enumerate(ANSWERS)]
    samples = [
        Sample(
            token_ids=answer,
            logprobs=(-0.5,) * len(answer),
            text="",
            finish_reason="stop",
            routes=each.astype("<u1").tobytes(),
        )
        for answer, each in zip(ANSWERS, own, strict=True)
    ]
    return SampledGroup(
        **{"group": 0, "row": 0, "place": "rows.jsonl:1", "prompt_ids": PROMPT, "policy_version": 0},
        samples=tuple(samples),
        prompt_routes=routes(3, 1).astype("<u1").tobytes(),
    )


def test_a_part_keeps_bytes_and_the_samples_file_their_places(tmp_path: Path) -> None:
    group_ = drawn()
    assert SampledGroup.model_validate_json(group_.encoded()) == group_
    with RoutesWriter(tmp_path) as writer:
        kept = writer.without_bytes(group_)
    assert not kept.prompt_routes and not any(sample.routes for sample in kept.samples)
    file = RoutesFile([tmp_path], SHAPE)
    for number, sample in enumerate(kept.samples):
        assert kept.prompt_block is not None and sample.block is not None
        found = file.of_sequence((*PROMPT, *sample.token_ids), 3, (kept.prompt_block, sample.block))
        computed = np.concatenate([routes(3, 1), routes(len(sample.token_ids) - 1, 10 + number)])
        assert (found[:-1] == computed).all()
        assert (found[-1] == computed[-1]).all(), "nobody computed the last token"
    with RoutesWriter(tmp_path / "none") as writer:
        assert writer.without_bytes(kept.model_copy(update={"prompt_block": None})).prompt_block is None
    assert not (tmp_path / "none").exists(), "samples without routes have no such file"


def test_no_sequence_gets_the_routes_of_another(tmp_path: Path) -> None:
    with RoutesWriter(tmp_path) as writer:
        kept = writer.without_bytes(drawn())
    file, prompt = RoutesFile([tmp_path], SHAPE), kept.prompt_block
    assert prompt is not None
    first, second, third, fourth = (sample.block for sample in kept.samples)
    assert file.of_sequence((*PROMPT, 4, 5, 6), 3, (prompt, first)).shape == (6, 2, 3)
    # The fourth sample has the tokens of the first, and so its routes are as good.
    assert file.of_sequence((*PROMPT, 4, 5, 6), 3, (prompt, fourth)).shape == (6, 2, 3)
    for blocks in [
        (prompt, second),
        (prompt, third),
        (prompt, first + 1),
        (prompt, 10_000),
        (first, first),
        (-1, first),
    ]:
        with pytest.raises(InvalidInput, match="another sequence"):
            file.of_sequence((*PROMPT, 4, 5, 6), 3, blocks)
    with pytest.raises(InvalidInput, match="another sequence"):
        file.of_sequence((1, 2, 9, 4, 5, 6), 3, (prompt, first))
    with (tmp_path / ROUTES).open("r+b") as cut:
        cut.truncate((tmp_path / ROUTES).stat().st_size - 1)
    with pytest.raises(InvalidInput, match="another sequence"):
        RoutesFile([tmp_path], SHAPE).of_sequence((*PROMPT, 4, 5, 6), 3, (prompt, fourth))


# From samples to units.


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path,)))


def grouped(settings: Settings, tmp_path: Path, group_: SampledGroup) -> str:
    """The URI of the groups of a sampled group whose samples have the grades 0, 1, 2, …"""
    store, folders = LocalStore(tmp_path / "given"), {name: tmp_path / name for name in ("completions", "grades")}
    for folder in folders.values():
        folder.mkdir()
    with RoutesWriter(folders["completions"]) as writer:
        line = writer.without_bytes(group_).encoded()
    (folders["completions"] / "completions.jsonl").write_bytes(line + b"\n")
    grades = [{"place": f"s:{n}", "grade": float(n), "error": None} for n in range(len(group_.samples))]
    (folders["grades"] / "grades.jsonl").write_text("".join(json.dumps(one) + "\n" for one in grades))
    artifacts = {}
    for name, folder in folders.items():
        seal(folder)
        artifacts[name] = upload_artifact(store, name, folder)
    [read] = read_sampled_groups(folders["completions"])
    assert read.samples[0].block is None or read.samples[0].block > 0
    return GroupSamples(HostContext(settings)).group_samples(GroupSamplesRequest(**artifacts)).groups_uri


def packed(settings: Settings, uri: str, shape: RouteShape | None = SHAPE, **run: Any) -> PackedGroups:
    is_clients = run.pop("client", False)
    request = GroupsRequest(
        run_id="r1",
        tenant="default",
        run=rl_run(**run, **({} if is_clients else {"rollouts": OWN})),
        step=StepStatus(step=1, key="a", groups=uri),
        policy_version=0,
        vocab_size=512,
        routes=shape,
    )
    return PackTrajectories(HostContext(settings)).pack_trajectories(request)


OWN = {
    "prompts": {"uri": "file:///prompts"},
    "grader": {
        "type": "string_check",
        "name": "has",
        "operation": "like",
        "input": "{{ sample.output_text }}",
        "reference": "a",
    },
    "steps": 1,
    "max_completion_tokens": 24,
}


def units_of(settings: Settings, made: PackedGroups) -> Units:
    assert made.data is not None
    return Units(stage(made.data.units, settings.root_path / "cache", settings.s3))


def test_each_token_of_a_step_has_the_route_that_it_was_computed_by(settings: Settings, tmp_path: Path) -> None:
    made = packed(settings, grouped(settings, tmp_path, drawn()))
    with units_of(settings, made) as units:
        assert units.header.routes == SHAPE
        table = units.read_bin(np.arange(units.header.num_units))
        assert table.route_TLK is not None and table.route_TLK.dtype == np.uint8
        by_context = {}
        for at in range(table.num_tokens):
            context, above = [], at
            while above >= 0:
                context.append(int(table.token_id_T[above]))
                above = int(table.parent_T[above])
            by_context[tuple(context[::-1])] = table.route_TLK[at]
    prompt, [first, second, _, fourth] = routes(3, 1), [routes(len(a) - 1, 10 + n) for n, a in enumerate(ANSWERS)]
    for length in (1, 2, 3):
        assert (by_context[PROMPT[:length]] == prompt[length - 1]).all()
    # The fourth sample has the first one's tokens, and the second ends where both go on: one of the two decides.
    shared = by_context[(*PROMPT, 4, 5)]
    assert (shared == first[1]).all() or (shared == fourth[1]).all()
    assert not (shared == second[0]).all(), "of a token that ended a sample nobody knows a route"
    assert (by_context[(*PROMPT, 7)] == prompt[2]).all(), "as the token before it"


def test_other_routes_of_the_same_tokens_are_another_step(settings: Settings, tmp_path: Path) -> None:
    made = packed(settings, grouped(settings, tmp_path, drawn()))
    other = drawn().model_copy(update={"prompt_routes": routes(3, 2).astype("<u1").tobytes()})
    (tmp_path / "other").mkdir()
    again = packed(settings, grouped(settings, tmp_path / "other", other))
    assert made.data is not None and again.data is not None
    assert made.data.units.sha256 != again.data.units.sha256


@pytest.mark.parametrize("broken", ["refuse", "drop"])
def test_a_missing_or_a_strange_route_fails_the_step_by_name(settings: Settings, tmp_path: Path, broken: str) -> None:
    bare = drawn().model_copy(
        update={
            "prompt_routes": b"",
            "samples": tuple(sample.model_copy(update={"routes": b""}) for sample in drawn().samples),
        }
    )
    (tmp_path / "bare").mkdir()
    uri = grouped(settings, tmp_path / "bare", bare)
    with pytest.raises(InvalidInput, match="it has none, and the trainer") as caught:
        packed(settings, uri, broken=broken)
    assert caught.value.place == f"{GROUPS}:1: trajectories.0.routes"
    assert packed(settings, uri, None).data is not None, "a run that replays nothing"
    samples = list(drawn().samples)
    samples[0], samples[2] = (
        one.model_copy(update={"routes": other.routes})
        for one, other in ((samples[0], samples[2]), (samples[2], samples[0]))
    )
    (tmp_path / "swapped").mkdir()
    uri = grouped(settings, tmp_path / "swapped", drawn().model_copy(update={"samples": tuple(samples)}))
    with pytest.raises(InvalidInput, match="another sequence") as caught:
        packed(settings, uri, broken=broken)
    assert caught.value.place.startswith(f"{GROUPS}:1: trajectories.")


def test_a_clients_trajectories_bring_none(settings: Settings, tmp_path: Path) -> None:
    uri = write_groups(tmp_path / "g.jsonl", group(0.0, 1.0, routes=[0, 24]))
    with pytest.raises(InvalidInput, match="run's own samples"):
        packed(settings, uri, None, client=True)
    plain = packed(settings, write_groups(tmp_path / "h.jsonl", group(0.0, 1.0)), None, client=True)
    with units_of(settings, plain) as units:
        assert units.header.routes is None and "route" not in units.columns
        assert units.read_bin(np.arange(1)).route_TLK is None


# Episodes: what was drawn keeps its experts, and an observation has those of the turn that read it.


def test_an_episode_has_the_experts_that_drew_each_answer_and_a_branch_has_its_own(tmp_path: Path) -> None:
    first, second, branch = routes(4, 1), routes(8, 2), routes(4, 3)  # of all ids of prompt and answer but the last
    turns = [
        DrawnTurn((1, 2, 3), (4, 5), (-1.0,) * 2, "stop", (3, 3), first.astype(SHAPE.dtype.base).tobytes()),
        DrawnTurn(
            (1, 2, 3, 4, 5, 6, 7), (8, 9), (-1.0,) * 2, "stop", (3, 3), second.astype(SHAPE.dtype.base).tobytes()
        ),
        DrawnTurn((1, 9, 9), (4, 5), (-1.0,) * 2, "stop", (3, 3), branch.astype(SHAPE.dtype.base).tobytes()),
    ]
    whole, other = sequences_of_turns(turns)
    item = SHAPE.dtype.itemsize
    tail = {"finish_reason": "stop", "routes": other.routes[3 * item :]}
    own = {"prompt_ids": (1, 9, 9), "prompt_routes": other.routes[: 3 * item], "token_ids": (4, 5)}
    sample = Sample(
        token_ids=tuple(whole.ids[3:]),
        logprobs=tuple(whole.logprobs[3:]),
        text="",
        finish_reason="stop",
        routes=whole.routes[3 * item :],
        branches=(Branch(logprobs=(-1.0, -1.0), **own, **tail),),
    )
    group = SampledGroup(
        group=0,
        row=0,
        place="p",
        prompt_ids=(1, 2, 3),
        policy_version=3,
        samples=(sample,),
        prompt_routes=whole.routes[: 3 * item],
    )
    with RoutesWriter(tmp_path) as writer:
        [written] = writer.without_bytes(group).samples
    read = RoutesFile([tmp_path], SHAPE)
    found = read.of_sequence(whole.ids, 3, (0, written.block))
    # Answers 4 5 and 8 9; the last id of an answer is computed with what comes behind it.
    expected = np.concatenate([first, second[4:], second[-1:]])
    assert (found == expected).all()
    [place] = written.branches
    found = read.of_sequence([1, 9, 9, 4, 5], 3, (place.prompt_block, place.block))
    assert (found == np.concatenate([branch, branch[-1:]])).all()
    with pytest.raises(InvalidInput, match="those of another sequence"):
        read.of_sequence([1, 9, 9, 4, 6, 7], 3, (place.prompt_block, place.block))
