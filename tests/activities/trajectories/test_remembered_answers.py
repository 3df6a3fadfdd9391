"""Answers of this installation in trajectories: the drawn ids and logprobs to the bit, and nobody else's."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from activities.host_context import HostContext
from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories, StepReport
from activities.trajectories.read_groups import BrokenTrajectory, Conversations, PublishedPolicy, RememberedAnswers
from longshore.views import StepStatus
from shared.chat.messages import CalledFunction, ToolCall
from shared.chat.trajectories import (
    AnswerLookup,
    AnswerRecord,
    ChatTrajectory,
    DrawnChoice,
    Trajectory,
    look_up,
    new_answer_id,
    parse_record,
    prune_answers,
    remember,
)
from shared.settings import DownloadSettings, Settings
from shared.storage.store import LocalStore, ObjectStore, open_store, open_uri
from tests.activities.groups import rl_run, write_groups
from tests.activities.templates import write_model
from tests.activities.trajectories.chat_server import ASKED, MAX_TOKENS, Server, sampled_ids
from tests.conftest import S3Server

SURE = {"role": "user", "content": "Sure?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "chatml", "chatml")


@pytest.fixture
def server(folder: Path) -> Server:
    return Server(folder)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


class Harbour:
    """Gives answers drawn letter by letter, which no tokenizer would give for their text, and remembers them."""

    def __init__(self, server: Server, store: ObjectStore) -> None:
        self.server, self.store = server, store

    def answer(self, messages: list[Any], text: str, version: int = 3, **changes: Any) -> tuple[Any, AnswerRecord]:
        asked = self.server.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = [i for letter in text for i in self.server.ids(letter)] + self.server.ids("<|im_end|>")
        assert ids != self.server.ids(text + "<|im_end|>")
        logprobs = [-1 / (k + 3) for k in range(len(ids))]
        record = AnswerRecord(
            answer_id=new_answer_id(time.time()),
            model_sha256=self.server.artifact.sha256,
            name="harbour",
            version=version,
            prompt_ids=tuple(self.server.ids(asked)),
            choices=(DrawnChoice(content=text, token_ids=tuple(ids), logprobs=tuple(logprobs)),),
        ).model_copy(update=changes)
        remember(self.store, "north", record)
        content = [self.server.token(i, p) for i, p in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": {"content": content, "refusal": None},
            "message": {"role": "assistant", "content": text},
            "answer_id": record.answer_id,
        }
        return choice, record

    def read(self, *messages: Any, tenant: str = "north", **fields: Any) -> tuple[Trajectory, ...]:
        answers = RememberedAnswers(partial(look_up, self.store, tenant))
        policy = PublishedPolicy(2, "harbour", 4)
        with Conversations(self.server.artifact, self.server.files, answers, policy) as reader:
            chat = ChatTrajectory.model_validate({"messages": messages, "reward": 1.0} | fields)
            reader.prepare([chat])
            try:
                return reader.trajectories_of(chat, MAX_TOKENS)
            finally:
                self.counts = dict(reader.counts)


@pytest.fixture
def harbour(server: Server, store: LocalStore) -> Harbour:
    return Harbour(server, store)


def test_drawn_ids_and_logprobs_are_trained_to_the_bit(harbour: Harbour) -> None:
    choice, record = harbour.answer(ASKED, "There are 12 sacks.")
    [drawn] = record.choices
    bare = {**choice["message"], "answer_id": record.answer_id}
    for form in (choice, bare):
        [one] = harbour.read(*ASKED, form)
        assert one.token_ids == record.prompt_ids + drawn.token_ids
        assert tuple(p for p in one.logprobs if p is not None) == drawn.logprobs
        assert tuple(sampled_ids(one)) == drawn.token_ids
        assert harbour.counts["remembered_turns"] == 1


def test_an_answer_without_its_id_is_found_by_its_content(harbour: Harbour) -> None:
    """Clients that put an answer together of streamed pieces, or convert it for another library, lose the id."""
    harbour.answer(ASKED, "There are 12 sacks.", choices=())
    choice, record = harbour.answer(ASKED, "There are 12 sacks.")
    del choice["answer_id"]
    [one] = harbour.read(*ASKED, choice)
    assert one.token_ids == record.prompt_ids + record.choices[0].token_ids
    assert (one.policy_version, harbour.counts["remembered_turns"]) == (1, 1)
    elsewhere = [*ASKED[:-1], {"role": "user", "content": "How many sacks, again?"}]
    rounded = [{**token, "logprob": round(token["logprob"], 2)} for token in choice["logprobs"]["content"]]
    for tenant, messages, sent in (
        ("south", ASKED, choice),
        ("north", elsewhere, choice),
        ("north", ASKED, {**choice, "logprobs": {"content": rounded}}),
    ):
        with pytest.raises(BrokenTrajectory) as caught:
            harbour.read(*messages, sent, tenant=tenant)
        assert caught.value.rule == "differs", "its text alone does not give the ids again"


def test_a_steps_answers_are_looked_up_by_the_host(server: Server, s3_server: S3Server, tmp_path: Path) -> None:
    """By their ids, more than are looked up at once, and by their content. Who reads the step cannot open the store."""
    settings = Settings(
        root=tmp_path / "root",
        store_uri=f"{s3_server.uri}/{tmp_path.name}",
        s3=s3_server.settings,
        download=DownloadSettings(file_roots=(tmp_path,)),
    )
    harbour = Harbour(server, open_store(settings.store, settings.s3))
    choices = [
        harbour.answer(ASKED, text)[0] for text in ("There are 12.", *(f"There are {n} sacks." for n in range(19)))
    ]
    del choices[0]["answer_id"]
    lost = {**harbour.server.answer(ASKED, "12."), "answer_id": "chatcmpl-" + "0" * 32}
    trajectories = [{"messages": [*ASKED, one], "reward": float(k)} for k, one in enumerate((*choices, lost))]
    packed = PackTrajectories(HostContext(settings)).pack_trajectories(
        GroupsRequest(
            run_id="r1",
            tenant="north",
            run=rl_run(max_tokens=MAX_TOKENS),
            step=StepStatus(step=1, key="a", groups=write_groups(tmp_path / "g.jsonl", {"trajectories": trajectories})),
            policy_version=0,
            vocab_size=1000,
            model=server.artifact,
        )
    )
    assert packed.report_uri is not None
    store, key = open_uri(packed.report_uri, settings.s3)
    turns = StepReport.model_validate_json(store.get_bytes(key)).groups.turns
    assert turns == {"remembered_turns": 20, "rendered_turns": 1, "unknown_answers": 1}


def test_conversations_of_one_trajectory_share_its_reward(harbour: Harbour) -> None:
    first, one = harbour.answer(ASKED, "There are 12 sacks.")
    second, two = harbour.answer([SURE], "Yes, 12.")
    found = harbour.read(*ASKED, first, additional_histories=[{"messages_and_choices": [SURE, second]}])
    assert [each.token_ids for each in found] == [each.prompt_ids + each.choices[0].token_ids for each in (one, two)]
    assert {each.reward for each in found} == {1.0}
    with pytest.raises(BrokenTrajectory) as caught:
        harbour.read(*ASKED, first, additional_histories=[{"messages": [SURE, {**second, "index": 7}]}])
    assert caught.value.field == "additional_histories.0.messages.1.index"


def test_own_answers_are_those_that_the_runs_policy_gave(harbour: Harbour) -> None:
    mine, one = harbour.answer(ASKED, "There are 12 sacks.")
    judged, _ = harbour.answer([SURE], "There are 19 sacks.", name="judge")
    both: dict[str, Any] = {"additional_histories": [{"messages": [SURE, judged]}]}
    assert len(harbour.read(*ASKED, mine, **both)) == 2
    [alone] = harbour.read(*ASKED, mine, own_answers=True, **both)
    assert alone.token_ids == one.prompt_ids + one.choices[0].token_ids
    for message, rule in ((judged, "nothing_sampled"), ({**mine, "answer_id": "chatcmpl-0"}, "unknown_answer")):
        with pytest.raises(BrokenTrajectory) as caught:
            harbour.read(*ASKED, message, own_answers=True)
        assert caught.value.rule == rule


def test_a_later_answer_is_another_sequence_unless_it_was_asked_for_with_the_drawn_ids(harbour: Harbour) -> None:
    first, one = harbour.answer(ASKED, "There are 12 sacks.")
    later = [*ASKED, first["message"], SURE]
    second, two = harbour.answer(later, "Yes, 12.")
    found = harbour.read(*ASKED, first, SURE, second)
    assert [each.token_ids for each in found] == [each.prompt_ids + each.choices[0].token_ids for each in (one, two)]
    between = tuple(harbour.server.ids("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"))
    kept = one.prompt_ids + one.choices[0].token_ids + between
    second, two = harbour.answer(later, "Yes, 12.", prompt_ids=kept)
    [whole] = harbour.read(*ASKED, first, SURE, second)
    assert whole.token_ids == kept + two.choices[0].token_ids
    assert tuple(sampled_ids(whole)) == one.choices[0].token_ids + two.choices[0].token_ids


def test_another_tenants_answer_is_not_there(harbour: Harbour) -> None:
    choice, record = harbour.answer(ASKED, "There are 12 sacks.")
    bare = {**choice["message"], "answer_id": record.answer_id}
    ids = [record.answer_id, "chatcmpl-" + "0" * 32, "../../north/" + record.answer_id, ""]
    assert look_up(harbour.store, "south", AnswerLookup(ids=(record.answer_id,))) == [None]
    for answer_id in ids:
        with pytest.raises(BrokenTrajectory, match="no answer of this id is remembered") as caught:
            harbour.read(*ASKED, bare | {"answer_id": answer_id}, tenant="south")
        assert caught.value.rule == "unknown_answer"
    honest = harbour.server.answer(ASKED, "12.") | {"answer_id": record.answer_id}
    [one] = harbour.read(*ASKED, honest, tenant="south")
    assert sampled_ids(one) == harbour.server.turns[0][1], "what its own logprobs say is taken, and no more"
    assert harbour.counts == {"unknown_answers": 1, "rendered_turns": 1}


def test_a_text_that_was_changed_is_refused(harbour: Harbour) -> None:
    choice, _ = harbour.answer(ASKED, "There are 12 sacks.")
    changes: list[tuple[str, Any, str]] = [
        ("message", {"role": "assistant", "content": "There are 19 sacks."}, "another_text"),
        ("token_ids", [1] * len(choice["logprobs"]["content"]), "differs"),
        ("index", 1, "unknown_answer"),
    ]
    for name, value, rule in changes:
        with pytest.raises(BrokenTrajectory) as caught:
            harbour.read(*ASKED, choice | {name: value})
        assert caught.value.rule == rule
    other, _ = harbour.answer(ASKED, "There are 12 sacks.", model_sha256="0" * 64)
    with pytest.raises(BrokenTrajectory, match="another model") as caught:
        harbour.read(*ASKED, other)


def test_calls_are_compared_as_they_are_meant(harbour: Harbour) -> None:
    call = ToolCall(id="call_1", function=CalledFunction(name="tide", arguments='{"port": "north"}'))
    drawn = DrawnChoice(content=None, tool_calls=(call,), token_ids=(5, 6), logprobs=(-1.0, -2.0))
    choice, _ = harbour.answer(ASKED, "unread", choices=(drawn,))
    said = {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]}
    said["tool_calls"][0]["function"]["arguments"] = '{"port":"north"}'
    assert sampled_ids(harbour.read(*ASKED, choice | {"message": said})[0]) == [5, 6]
    for wrong in ([], [{"function": {"name": "tide", "arguments": "{}"}}], ["tide"], [{}]):
        with pytest.raises(BrokenTrajectory):
            harbour.read(*ASKED, choice | {"message": said | {"tool_calls": wrong}})


def test_ids_that_a_client_brings_are_trained_where_they_say_the_same(harbour: Harbour) -> None:
    """As vLLM gives them, of whose answers nobody here remembers anything."""
    choice, record = harbour.answer(ASKED, "There are 鯨 12.")
    ids = list(record.choices[0].token_ids)
    choice |= {"answer_id": None, "token_ids": ids}
    [one] = harbour.read(*ASKED, choice)
    assert one.token_ids == (*record.prompt_ids, *ids)
    with pytest.raises(BrokenTrajectory) as caught:
        harbour.read(*ASKED, choice | {"message": {"role": "assistant", "content": "There are 19."}})
    assert caught.value.rule == "another_text"


@pytest.mark.parametrize(("version", "number"), [(4, 2), (3, 1), (2, 0), (1, 0)])
def test_the_policy_that_answered_is_remembered(harbour: Harbour, version: int, number: int) -> None:
    """Version 4 is what the run's second step published."""
    choice, _ = harbour.answer(ASKED, "There are 12 sacks.", version)
    assert [one.policy_version for one in harbour.read(*ASKED, choice, policy_version=9)] == [number]
    plain = harbour.server.answer(ASKED, "12.")
    assert [one.policy_version for one in harbour.read(*ASKED, plain, model_version=version)] == [number]
    other, _ = harbour.answer(ASKED, "There are 12 sacks.", version, name="quay")
    assert [one.policy_version for one in harbour.read(*ASKED, other)] == [None]


def test_old_answers_go_and_no_tenant_keeps_more_than_its_share(harbour: Harbour, store: LocalStore) -> None:
    now = time.time()
    ages = {"old": 5000, "older": 9000, "new": 10, "newest": 1}
    ids = {name: new_answer_id(now - age) for name, age in ages.items()}
    for answer_id in ids.values():
        harbour.answer(ASKED, "There are 12 sacks.", answer_id=answer_id)
    ask = AnswerLookup(ids=tuple(ids.values()))
    [record] = filter(None, map(parse_record, look_up(store, "north", AnswerLookup(ids=(ids["new"],)))))
    remember(store, "south", record)

    def left() -> set[str]:
        return {name for name, text in zip(ids, look_up(store, "north", ask), strict=True) if text is not None}

    prune_answers(store, now, kept_s=7200, max_bytes=1 << 20)
    assert left() == {"old", "new", "newest"}
    assert len(list(store.list("answers/north/alike/"))) == 3, "no more is found by its content"
    size = len(record.model_dump_json(exclude_defaults=True))
    prune_answers(store, now, kept_s=7200, max_bytes=size * 2 + 10)
    assert left() == {"new", "newest"}
    prune_answers(store, now, kept_s=7200, max_bytes=size + 10)
    assert left() == {"newest"}
    [kept] = look_up(store, "south", AnswerLookup(ids=(ids["new"],)))
    assert parse_record(kept) == record, "others' answers do not count"
