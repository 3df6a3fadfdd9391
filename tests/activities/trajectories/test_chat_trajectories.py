"""Chat messages as trajectories: the ids that were sampled behind what was asked, also of our own answers.

A conversation is played as a server plays it: asked with transformers' own rendering, answered with chosen ids.
"""

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from activities.host_context import HostContext
from activities.tokenizing.tokenizer import TokenizerFiles
from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories, StepReport
from activities.trajectories.read_groups import (
    BrokenTrajectory,
    Conversations,
    PublishedPolicy,
    RememberedAnswers,
    Rules,
    parse_groups,
    read_groups,
    sequences_of,
)
from longshore.fields import Artifact
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
from shared.errors import InvalidInput
from shared.settings import DownloadSettings, Settings
from shared.storage.artifacts import seal
from shared.storage.store import LocalStore, ObjectStore, open_store, open_uri
from tests.activities.groups import rl_run, trajectory, write_groups
from tests.activities.templates import CHATML, write_model
from tests.activities.trajectories.chat_server import ASKED, MAX_TOKENS, Server, sampled_ids
from tests.conftest import S3Server

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "north"}'}}


def beside(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice as one message."""
    return {**choice["message"], "logprobs": choice["logprobs"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name) for name in ("chatml", "qwen", "llama")}


@pytest.fixture
def server(folders: dict[str, Path]) -> Server:
    return Server(folders["chatml"])


@pytest.fixture(scope="module")
def readers(folders: dict[str, Path]) -> Iterator[dict[str, Conversations]]:
    """One process a template for all tests."""
    servers = {name: Server(folder) for name, folder in folders.items()}
    found = {name: Conversations(server.artifact, server.files) for name, server in servers.items()}
    yield found
    for reader in found.values():
        reader.__exit__()


@pytest.fixture
def read(readers: dict[str, Conversations]) -> Any:
    """One sequence of ids: each of these conversations is one."""

    def of(name: str, messages: list[Any], **fields: Any) -> Trajectory:
        chat = ChatTrajectory.model_validate({"messages": messages, "reward": 1.0} | fields)
        [one] = readers[name].trajectories_of(chat, MAX_TOKENS)
        return one

    return of


@pytest.fixture
def read_all(readers: dict[str, Conversations]) -> Any:
    """All sequences of a conversation, which must be what was sampled, answer by answer."""

    def of(name: str, messages: list[Any], server: Server) -> tuple[Trajectory, ...]:
        chat = ChatTrajectory.model_validate({"messages": messages, "reward": 1.0})
        found = readers[name].trajectories_of(chat, MAX_TOKENS)
        assert [one.token_ids for one in found] == [(*asked, *ids) for asked, ids in server.turns]
        assert [sampled_ids(one) for one in found] == [ids for _, ids in server.turns]
        return found

    return of


def test_an_answer_is_its_sampled_ids_behind_what_was_asked(server: Server, read: Any) -> None:
    choice = server.answer(ASKED, "There are 12 sacks.")
    [(asked, ids)] = server.turns
    for form in (choice, beside(choice)):
        one = read("chatml", [*ASKED, form], policy_version=3, metrics={"turns": 1})
        assert one.token_ids == (*asked, *ids)
        assert one.sampled == (*[False] * len(asked), *[True] * len(ids))
        assert sampled_ids(one) == ids and ids[-1] == server.ids("<|im_end|>")[0], "the end is trained too"
        assert [p for p in one.logprobs if p is not None] == pytest.approx([-0.1 * k for k in range(1, len(ids) + 1)])
        assert (one.reward, one.policy_version, one.metrics) == (1.0, 3, {"turns": 1.0})


TOOL_SAID = [{"role": "tool", "content": "low"}, {"role": "assistant", "content": "Hm."}, *ASKED[1:]]


def test_many_turns_and_tool_results_are_one_trajectory(server: Server, read: Any) -> None:
    """Of three answers the second was not sampled: it is context, as what the tool said is."""
    first = server.answer(ASKED, "I ask the tide.")
    asked = [*ASKED, first["message"], *TOOL_SAID]
    second = server.answer(asked, "There are 12 sacks and 7 barrels.")
    one = read("chatml", [*ASKED, first, *TOOL_SAID, second, {"role": "user", "content": "Thanks."}])
    for context, ids in server.turns:
        assert one.token_ids[: len(context) + len(ids)] == (*context, *ids)
    assert sampled_ids(one) == [i for _, ids in server.turns for i in ids]
    assert one.token_ids[-1] == server.turns[1][1][-1], "nothing behind the last answer is trained on"


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_answers_stand_behind_the_very_ids_that_were_asked(
    folders: dict[str, Path], name: str, read: Any, read_all: Any
) -> None:
    """Also where the text joins other tokens than its two halves: a newline before a word is a token of its own. A
    later answer that was asked for with other tokens is a sequence of its own."""
    server, ending = Server(folders[name]), {"llama": "<|eot_id|>"}.get(name, "<|im_end|>")
    asked = [*ASKED, {"role": "assistant", "content": "12."}, {"role": "user", "content": "Sure?"}]
    text = "<think>\nI count again.\n</think>\n\nYes, 12." if name == "qwen" else "Yes, 12."
    choice = server.answer(asked, text, ending)
    [(context, ids)] = server.turns
    assert read(name, [*asked, choice]).token_ids == (*context, *ids)
    if name == "llama":
        again = server.answer([*asked, choice["message"], *ASKED[1:]], "12 sacks.", ending)
        assert len(read_all(name, [*asked, choice, *ASKED[1:], again], server)) == 2


def test_arguments_of_a_tool_call_are_rendered_as_servers_render_them(folders: dict[str, Path], read: Any) -> None:
    """Chat completions give them as text, and templates take an object."""
    server = Server(folders["qwen"])
    said = '\n<tool_call>\n{"name": "tide", "arguments": {"port": "north"}}\n</tool_call>'
    choice = server.answer(ASKED, "<think>\nhm\n</think>\n\n" + said)
    choice["message"] |= {"content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
    tool = {"role": "tool", "content": "low", "tool_call_id": "c1"}
    assert sampled_ids(read("qwen", [*ASKED, choice, tool])) == server.turns[0][1]


def test_an_answer_that_was_cut_off_has_an_end_that_was_not_sampled(server: Server, read: Any) -> None:
    choice = server.answer(ASKED, "There are 12", ending="") | {"finish_reason": "length"}
    [(asked, ids)] = server.turns
    one = read("chatml", [*ASKED, choice])
    assert one.token_ids == (*asked, *ids)
    assert one.finish_reason == "length"


@pytest.mark.parametrize("form", ["token_ids", "token_id:", "bytes"])
def test_ids_or_bytes_tell_parts_of_characters_apart(server: Server, read: Any, form: str) -> None:
    """The text of a part of a character is a question mark in a box, whichever part it is."""
    choice = server.answer(ASKED, "鯨 12")
    ids = server.turns[0][1]
    entries = choice["logprobs"]["content"]
    assert any("\N{REPLACEMENT CHARACTER}" in entry["token"] for entry in entries)
    with pytest.raises(BrokenTrajectory, match=r"logprobs\.content\.\d+: .* ask the server for token ids"):
        read("chatml", [*ASKED, choice])
    if form == "token_ids":
        choice["token_ids"] = ids
    elif form == "token_id:":
        choice["logprobs"]["content"] = [{**e, "token": f"token_id:{i}"} for e, i in zip(entries, ids, strict=True)]
    else:
        whole, at = list("鯨".encode()), 0
        for entry in entries[: len(server.ids("鯨"))]:
            size = len(server.tokenizer.convert_ids_to_tokens(ids[at]))  # a character spells a byte
            entry["bytes"], whole, at = whole[:size], whole[size:], at + 1
    assert sampled_ids(read("chatml", [*ASKED, choice])) == ids


def broken(server: Server, name: str) -> list[Any]:
    choice = server.answer(ASKED, "There are 12 sacks.")
    content, message = choice["logprobs"]["content"], choice["message"]
    match name:
        case "another_word":
            content[2]["token"], content[2]["bytes"] = " 19", list(b" 19")
        case "another_split":  # the same text in other tokens: sampled so, but never rendered so
            content[: len(server.ids("There"))] = [server.token(server.ids(c)[0], -1.0) for c in "There"]
        case "another_id":
            choice["token_ids"] = [*server.turns[0][1][:-1], server.ids(" sacks")[0]]
        case "more_text":
            message["content"] += " And 7 barrels."
        case "trimmed":
            content.insert(-1, server.token(server.ids("\n")[0], -1.0))
        case "unnamed":
            del content[3:]
        case "beyond_its_end":
            content.append(server.token(server.ids("12")[0], -1.0))
        case "short_ids":
            choice["token_ids"] = [1]
        case "no_tokens":
            choice["logprobs"] = {"content": []}
        case "no_logprob":
            del content[1]["logprob"]
        case "user_sampled":
            return [ASKED[0], {**ASKED[1], "logprobs": choice["logprobs"]}, choice]
        case "nothing_sampled":
            return [*ASKED, message]
        case "no_role":
            return [{"content": "x"}, choice]
        case "image":
            return [{"role": "user", "content": [{"type": "image_url"}]}, choice]
        case "too_long":
            return [{"role": "user", "content": "sack " * MAX_TOKENS}, choice]
    return [*ASKED, choice]


BROKEN = {
    "another_word": (
        "differs",
        r"messages\.2\.logprobs\.content\.2: ' 19' was sampled, .* has '.+' there \(token \d+\)",
    ),
    "another_split": ("differs", r"messages\.2\.logprobs\.content\.0: 'T' was sampled"),
    "another_id": ("differs", r"messages\.2\.logprobs\.content\.\d+: token \d+ was sampled, .*<\|im_end\|>"),
    "more_text": ("differs", r"messages\.2\.logprobs\.content\.\d+: '<\|im_end\|>' was sampled"),
    "trimmed": ("differs", r"messages\.2\.logprobs\.content\.\d+: '\\n' was sampled"),
    "unnamed": ("differs", r"messages\.2\.logprobs: 3 tokens were sampled, and the conversation has \d+ there"),
    "beyond_its_end": ("differs", r"messages\.2\.logprobs: (\d+) tokens were sampled, and the conversation has (?!\1)"),
    "short_ids": ("length", r"messages\.2\.token_ids: it has 1 entries for \d+ logprobs"),
    "no_tokens": ("missing_logprobs", r"messages\.2\.logprobs: it names no token"),
    "no_logprob": ("logprobs", r"messages\.2\.logprobs\.content\.1\.logprob: this field is required"),
    "user_sampled": ("role", r"messages\.1\.logprobs: the message is the user's"),
    "nothing_sampled": ("nothing_sampled", "no assistant's turn has logprobs"),
    "no_role": ("messages", r"messages: messages\[0\]\.role must be one of"),
    "image": ("messages", r"messages\[0\]\.content\[0\] must be a text part"),
    "too_long": ("too_long", r"\d+ tokens; max_tokens is 500"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_give_the_sampled_tokens_again_is_no_trajectory(server: Server, read: Any, name: str) -> None:
    rule, message = BROKEN[name]
    with pytest.raises(BrokenTrajectory, match=message) as caught:
        read("chatml", broken(server, name))
    assert caught.value.rule == rule


def test_answers_of_a_template_that_rewrites_earlier_turns_are_sequences_of_their_own(
    folders: dict[str, Path], read_all: Any
) -> None:
    """Thoughts are cut out of earlier turns: the second answer was sampled behind another text than the first was."""
    server = Server(folders["qwen"])
    first = server.answer(ASKED, "<think>\nhm\n</think>\n\n12.")
    later = [*ASKED, first["message"], {"role": "user", "content": "Sure?"}]
    second = server.answer(later, "<think>\nhm\n</think>\n\nYes.")
    read_all("qwen", [*ASKED, first, later[3], second], server)


def test_every_answer_stands_behind_what_was_asked(folders: dict[str, Path], read_all: Any) -> None:
    """The answers' own ids are right; a thought before the first was there when it was sampled, and is cut out now."""
    server = Server(folders["qwen"])
    thoughtful = {"role": "assistant", "content": "<think>\nx\n</think>\n\nHm."}
    asked = [*ASKED, thoughtful, {"role": "tool", "content": "1"}]
    first = server.answer(asked, "12.")
    later = [*asked, first["message"], {"role": "user", "content": "Sure?"}]
    second = server.answer(later, "<think>\nhm\n</think>\n\nYes.")
    read_all("qwen", [*asked, first, later[-1], second], server)


HEADED = "{{ '<|im_start|>system\n' + ('x' if messages | length < 5 else 'y') + '<|im_end|>\n' }}" + CHATML
ENDED = CHATML.replace("message['content']", "message['content'] + ('!' if messages | length > 5 else '')")


@pytest.mark.parametrize(("template", "ending"), [(HEADED, "<|im_end|>"), (ENDED, "!<|im_end|>")])
def test_a_template_that_counts_messages_is_noticed(
    folders: dict[str, Path], tmp_path: Path, template: str, ending: str
) -> None:
    """The answers are what was sampled. Before the first one, or in its place, later turns saw something else."""
    folder = tmp_path / "counting"
    shutil.copytree(folders["chatml"], folder, ignore=shutil.ignore_patterns("manifest.json"))
    (folder / "chat_template.jinja").write_text(template)
    server = Server(folder)
    first = server.answer(ASKED[1:], "12.", ending)
    between = [*ASKED[1:], {"role": "assistant", "content": "Hm."}, *ASKED[1:]]
    second = server.answer([*ASKED[1:], first["message"], *between], "12.", ending)
    with Conversations(server.artifact, server.files) as reader:

        def of(*messages: Any) -> list[tuple[int, ...]]:
            chat = ChatTrajectory.model_validate({"messages": messages, "reward": 1.0})
            return [one.token_ids for one in reader.trajectories_of(chat, MAX_TOKENS)]

        sampled = [(*asked, *ids) for asked, ids in server.turns]
        assert of(*ASKED[1:], first["message"], *between, second) == sampled[1:]
        assert of(*ASKED[1:], first, *between, second) == sampled


def test_groups_may_mix_both_forms_and_arts_json_is_read(
    server: Server, readers: dict[str, Conversations], tmp_path: Path
) -> None:
    choice = server.answer(ASKED, "There are 12 sacks.")
    arts = {
        "messages_and_choices": [*ASKED, choice],
        "tools": None,
        "additional_histories": [],
        "reward": 0.5,
        "initial_policy_version": 4,
        "final_policy_version": None,
        "metrics": {"solved": True},
        "metadata": {"task": "sacks"},
        "logs": ["asked"],
    }
    ours = trajectory(0.0, policy_version=4)
    bad = {"messages": broken(server, "another_word"), "reward": 0.0}
    path = tmp_path / "g.jsonl"
    write_groups(path, {"trajectories": [arts, ours, bad], "exceptions": [], "metadata": {}, "metrics": {}, "logs": []})
    rules = Rules(rl_run(max_tokens=MAX_TOKENS, broken="drop"), 4, 1000, readers["chatml"])
    found = read_groups(parse_groups(path, path.name), rules)
    [group] = found.groups
    kept = sequences_of(group)
    assert [(one.reward, one.policy_version) for one in kept] == [(0.5, 4), (0.0, 4)]
    assert sampled_ids(kept[0]) == server.turns[0][1]
    assert kept[0].metrics == {"solved": 1.0}
    assert [one.reward for one in group] == [0.5, 0.0, 0.0], "what cannot be trained has a reward all the same"
    assert (found.report.dropped_broken, found.report.dropped_for) == (1, {"differs": 1})
    rules = Rules(rl_run(max_tokens=MAX_TOKENS), 4, 1000, readers["chatml"])
    with pytest.raises(InvalidInput) as caught:
        read_groups(parse_groups(path, path.name), rules)
    assert caught.value.place == "g.jsonl:1: trajectories.2.messages.2.logprobs.content.2"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"messages": []}, "trajectories.0.messages: "),
        ({"additional_histories": [{"messages_and_choices": []}]}, "trajectories.0.additional_histories.0.messages"),
        ({"rewards": 1}, "trajectories.0.rewards: there is no such field"),
        ({"token_ids": [1]}, "trajectories.0.token_ids: there is no such field"),
    ],
)
def test_a_conversation_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    path = tmp_path / "g.jsonl"
    write_groups(path, {"trajectories": [{"messages": ASKED, "reward": 1.0} | changes]})
    with pytest.raises(InvalidInput) as caught:
        list(parse_groups(path, path.name))
    assert rule in f"{caught.value.place}: {caught.value.message}"


def test_a_step_of_conversations_is_packed(server: Server, folders: dict[str, Path], tmp_path: Path) -> None:
    """With the run's model; without it the activity says what is missing."""
    settings = Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path,)))
    rows = [[*ASKED, server.answer(ASKED, text)] for text in ("There are 12.", "19.")]
    group = {"trajectories": [{"messages": m, "reward": float(k)} for k, m in enumerate(rows)]}
    uri = write_groups(tmp_path / "g.jsonl", group)
    fields = {
        "run_id": "r1",
        "tenant": "default",
        "run": rl_run(max_tokens=MAX_TOKENS),
        "step": StepStatus(step=1, key="a", groups=uri),
        "policy_version": 0,
        "vocab_size": 1000,
    }
    packed = PackTrajectories(HostContext(settings)).pack_trajectories(GroupsRequest(**fields, model=server.artifact))
    assert packed.num_steps == 1
    assert packed.metrics["response_tokens_mean"] == sum(len(ids) for _, ids in server.turns) / 2
    assert packed.metrics["packing_factor"] > 1.5, "what was asked stands once"
    with pytest.raises(InvalidInput, match="need the model"):
        PackTrajectories(HostContext(settings)).pack_trajectories(GroupsRequest(**fields))


def test_a_model_without_a_template_takes_token_ids(tmp_path: Path, folders: dict[str, Path]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((folders["chatml"] / name).read_bytes())
    model = Artifact(uri=bare.as_uri(), sha256=seal(bare))
    said = {"role": "assistant", "content": "12.", "logprobs": {"content": [{"token": "12.", "logprob": -1.0}]}}
    chat = ChatTrajectory.model_validate({"messages": [*ASKED, said], "reward": 1.0})
    files = TokenizerFiles(folder=bare, place=model.uri)
    with Conversations(model, files) as reader, pytest.raises(InvalidInput) as caught:
        reader.trajectories_of(chat, MAX_TOKENS)
    assert "no chat template" in caught.value.message


SURE = {"role": "user", "content": "Sure?"}


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
