"""Sessions on a real stack: commands that are done once and in order. Through kills: test_kills.py."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sqlalchemy import select
from temporalio.api.enums.v1 import EventType

from longshore.client import Client, CommandFailed, Pending, ServiceError, Session
from longshore.commands import Asked, CommandResult, Datum, Forward, ForwardBackward, LoadState, OptimStep, SaveState
from longshore.training import Full, Lora, SessionRun
from service.database.engine import Database, StoredRow
from shared.jobs.commands import Gap
from shared.jobs.job import Job
from shared.storage.artifacts import sha256_file
from shared.storage.paths import RunKeys
from tests.depth import SEED
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import gpu_host

pytestmark = pytest.mark.slow

_DRAWN = ("forward", "save_state", "gradients", "gradients", "labels", "labels", "step", "step", "step")
_OWN = "own:step-0"
"""Stands for one of the states that the session has saved."""


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with connected(stack) as client:
        yield client


def connected(stack: Stack) -> Client:
    return stack.client()


def opened(client: Client, model: Path, **changes: object) -> Session:
    fields: dict[str, object] = {"model": str(model), "trainable": Lora(rank=4), "max_tokens": 128, "seed": 5}
    return client.sessions.open(SessionRun.model_validate(fields | changes))


def commands_of(number: int, how_many: int, loads: bool = False) -> list[Asked]:
    """Forwards, gradients of one or two batches, of tokens or of labels, steps, saved states: the same for the same
    numbers. With `loads` also loads of `_OWN` states, which a Sender names.
    """
    rng = random.Random(number)
    made: list[Asked] = []
    while len(made) < how_many:
        data = tuple(Datum(tokens=tuple(rng.randrange(3, 500) for _ in range(12))) for _ in range(3))
        match rng.choice(_DRAWN + loads * ("load_state", "load_state")):
            case "forward":
                made.append(Forward(data=data, top_k=2))
            case "gradients":
                made.append(ForwardBackward(data=data))
            case "labels":
                made.append(ForwardBackward(data=tuple(labelled(datum, rng) for datum in data)))
            case "step":
                made += [ForwardBackward(data=data), OptimStep(learning_rate=0.01)]
            case "load_state" if any(isinstance(each, SaveState) for each in made):
                made.append(LoadState(state=_OWN, optimizer=rng.random() < 0.7))
            case _:
                made.append(SaveState())
    return made[:how_many]


def labelled(datum: Datum, rng: random.Random) -> Datum:
    """The datum with up to three labels in each place, each with a weight of its own."""
    labels = [[rng.randrange(3, 500) for _ in range(rng.randrange(4))] for _ in datum.tokens[1:]]
    weights = [[rng.random() for _ in each] for each in labels]
    return Datum.model_validate({"tokens": datum.tokens, "labels": labels, "label_weights": weights})


@dataclass
class Sender:
    """Sends commands to a session without waiting, but for the state that a load goes back to: one of the newest eight
    that it saved, drawn alike in every session. The service looks it up when it accepts the load.
    """

    session: Session
    pending: list[Pending] = field(default_factory=list)
    _saves: list[Pending] = field(default_factory=list)
    _draw: random.Random = field(default_factory=partial(random.Random, 1))

    def send(self, asked: Asked) -> None:
        if isinstance(asked, LoadState):
            step = self._draw.choice(self._saves[-8:]).result(900).step
            asked = asked.model_copy(update={"state": f"{self.session.id}:step-{step}"})
        self.pending.append(self.session.send(asked))
        if isinstance(asked, SaveState):
            self._saves.append(self.pending[-1])


def final_state(session: Session, client: Client) -> str:
    """The hash of the adapter that the session publishes last; it is closed."""
    published = session.save_state(publish=True).result(600)
    assert published.adapter is not None
    session.close()
    wait_until(lambda: session.status().state == "succeeded", "the end of a closed session")
    return sha256_file(Path(published.adapter.uri.removeprefix("file://")) / "adapter_model.safetensors")


def told(result: CommandResult) -> tuple[object, ...]:
    """What of a result is the same whenever it is done."""
    timeless = {name: value for name, value in result.metrics.items() if not name.endswith("_s")}
    return result.number, result.kind, result.problem, timeless, result.data


def test_commands_in_any_order_from_clients_that_vanish_are_done_once_and_in_theirs(
    stack: Stack, client: Client, tiny_model: Path
) -> None:
    commands = commands_of(9, 20)
    session = opened(client, tiny_model)
    in_order = [told(session.send(asked).result(600)) for asked in commands]
    state = final_state(session, client)

    other = opened(client, tiny_model)
    shuffled = list(enumerate(commands, start=1))
    random.Random(SEED).shuffle(shuffled)
    with connected(stack) as vanishing:  # it does not wait for anything, and sends each command twice
        for number, asked in shuffled * 2:
            path, headers = f"/sessions/{other.id}/commands/{number}", {"content-type": "application/json"}
            vanishing.call("PUT", path, content=asked.model_dump_json().encode(), headers=headers)
    found = {number: client.sessions.send(other.id, number, asked) for number, asked in reversed(shuffled)}
    assert [told(found[number].result(600)) for number in range(1, 21)] == in_order
    went_on = client.sessions.attach(other.id)
    assert went_on.send(SaveState()).number == 21
    assert final_state(went_on, client) == state


def test_an_idle_session_gives_its_worker_back_and_goes_on(stack: Stack, client: Client, tiny_model: Path) -> None:
    """With gradients that nobody stepped: they are made again on the next worker."""
    commands = commands_of(3, 12)
    patient, hasty = opened(client, tiny_model), opened(client, tiny_model, idle_s=0.2)
    for place, asked in enumerate(commands):
        one, other = patient.send(asked), hasty.send(asked)
        assert told(one.result(600)) == told(other.result(600))
        if place % 4 == 3:
            wait_until(lambda: hasty.status().phase == "waiting_for_commands", "an idle session's end of lease")
            time.sleep(0.5)
    assert hasty.status().epoch > patient.status().epoch
    assert final_state(patient, client) == final_state(hasty, client)


def test_a_session_is_handed_on_when_its_host_is_told_to_leave(stack: Stack, client: Client, tiny_model: Path) -> None:
    """With gradients that nobody stepped. Its state is saved as it stands: no loss is counted."""
    commands = commands_of(3, 8)
    patient, moved = opened(client, tiny_model), opened(client, tiny_model)
    for place, asked in enumerate(commands):
        one, other = patient.send(asked), moved.send(asked)
        assert told(one.result(600)) == told(other.result(600))
        if place == 4:
            for host in gpu_host(stack):
                host.terminate()  # its supervisor starts another
    assert (moved.status().epoch, moved.status().workers_lost) == (2, 0)
    assert final_state(patient, client) == final_state(moved, client)


def test_an_idle_session_gives_way_to_one_that_waits(stack: Stack, client: Client, tiny_model: Path) -> None:
    """Of two that share no worker, each would keep it for ten minutes."""
    data = [Datum(tokens=(5, 6, 7))]
    for _ in range(2):
        opened(client, tiny_model, trainable=Full(), idle_s=600).forward(data).result(300)


def test_a_published_state_is_an_adapter_and_the_archive_gives_it_again(
    stack: Stack, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    """By hand, from the job file and the commands as they lie in the store."""
    session = opened(client, tiny_model, name="by-hand")
    commands = commands_of(4, 10)
    for asked in commands:
        session.send(asked).result(600)
    published = session.save_state(publish=True).result(600)
    assert published.adapter is not None and published.version == 1
    weights = Path(published.adapter.uri.removeprefix("file://")) / "adapter_model.safetensors"
    assert load_file(weights)
    session.close()
    wait_until(lambda: session.status().state == "succeeded", "the end of a closed session")
    keys, store = RunKeys(session.id), stack.host_paths.root / "store"
    sizes = {path.name.removesuffix(".json"): path.stat().st_size for path in (store / keys.command_result()).iterdir()}
    stored = select(StoredRow.num_bytes).where(StoredRow.owner == session.id, StoredRow.what == "sessions")
    with closing(Database(f"sqlite:///{stack.root}/service/longshore.db")) as database:
        counted = database.write(lambda rows: rows.scalars(stored).one())
    assert counted == sum(sizes.values()) > 2048, "its scores count as stored bytes"
    (tmp_path / "commands").mkdir()
    for path in (store / keys.prefix / "commands").iterdir():
        (tmp_path / "commands" / path.name).write_bytes(path.read_bytes())
    job = next((store / keys.logs).rglob("job.json"))
    assert Job.model_validate_json(job.read_bytes()).plan.run_id == session.id
    done = subprocess.run(
        [sys.executable, "-m", "megatron_worker", "--once", str(job), "--into", str(tmp_path)],
        env={**os.environ, "LONGSHORE_ROOT": str(tmp_path / "root")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    by_hand = max((tmp_path / "checkpoints").iterdir()) / "weights" / "adapter_model.safetensors"
    assert by_hand.read_bytes() == weights.read_bytes()


def test_a_loaded_state_gives_the_same_bits(client: Client, tiny_model: Path) -> None:
    """Of another session, of its own past, with moments and without; and what cannot be loaded is refused."""
    print(f"seed {SEED}")
    before, behind = commands_of(11, 6), commands_of(12, 8)
    source = opened(client, tiny_model, name="source")
    for asked in before:
        source.send(asked)
    saved = source.save_state(publish=True).result(600)
    state, adapter = f"{source.id}:step-{saved.step}", saved.adapter
    sent = [source.send(asked) for asked in behind]
    went_on = [told(each.result(600))[2:] for each in sent]
    source.load_state(state).result(600)  # back to its own past
    assert [told(source.send(asked).result(600))[2:] for asked in behind] == went_on
    final = final_state(source, client)
    assert adapter is not None

    begun = opened(client, tiny_model, initial_adapter=adapter.uri, seed=6)
    without_moments = [told(begun.send(asked).result(600))[2:] for asked in behind]
    begun.close()
    other = opened(client, tiny_model, save_after_s=0.5, seed=7)
    waiting = [other.send(asked) for asked in before]
    loaded = other.load_state(state)
    waiting += [other.send(asked) for asked in behind]
    loaded.result(600)
    assert [told(each.result(600))[2:] for each in waiting[len(before) :]] == went_on
    other.load_state(state, optimizer=False)
    sent = [other.send(asked) for asked in behind]
    assert [told(each.result(600))[2:] for each in sent] == without_moments
    other.load_state(state)
    for asked in behind:
        other.send(asked)
    assert final_state(other, client) == final

    narrow = opened(client, tiny_model, trainable=Lora(rank=2))
    for name, status, rule in (
        (state, 422, "rank is 4, 2 is asked for"),
        (f"{narrow.id}:step-7", 404, "no saved state"),
        ("session-none:step-3", 404, "no run session-none"),
        ("the last one", 422, "a state's name"),
    ):
        body = {"kind": "load_state", "state": name}
        with pytest.raises(ServiceError, match=rule) as caught:
            client.call("PUT", f"/sessions/{narrow.id}/commands/1", json=body)
        assert caught.value.status == status
    narrow.forward([Datum(tokens=(5, 6, 7))]).result(600)
    narrow.close()


def _has_completed(stack: Stack, run_id: str) -> bool:
    return stack.history(run_id).events[-1].event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED


def test_bad_input_is_said_and_nothing_is_lost(stack: Stack, client: Client, tiny_model: Path) -> None:
    session = opened(client, tiny_model, gap_s=1.0)
    data = [Datum(tokens=(5, 6, 7))]
    session.forward(data).result(600)

    def refused(call: Callable[[], object], status: int, *words: str) -> None:
        with pytest.raises(ServiceError) as caught:
            call()
        assert caught.value.status == status, caught.value
        assert all(word in str(caught.value) for word in words), caught.value

    path = f"/sessions/{session.id}/commands"
    refused(lambda: client.call("PUT", f"{path}/2", json={"kind": "explode"}), 422, "kind")
    refused(lambda: client.call("PUT", f"{path}/2", json={"kind": "forward", "data": []}), 422, "data")
    refused(lambda: client.call("PUT", f"{path}/0", json={"kind": "save_state"}), 422, "number")
    refused(lambda: client.call("PUT", f"{path}/9999", json={"kind": "save_state"}), 409, "256 commands may wait")
    refused(lambda: client.call("PUT", f"{path}/1", json={"kind": "save_state"}), 422, "another one")
    large, many = b" " * (1 << 20) + b"{}", {"kind": "forward", "data": [{"tokens": [1] * 200_001}]}
    json_type = {"content-type": "application/json"}
    refused(lambda: client.call("PUT", f"{path}/2", content=large, headers=json_type), 413, "at most 1048576")
    refused(lambda: client.call("PUT", f"{path}/2", json=many), 422, "200,000 values")
    refused(lambda: client.call("GET", f"{path}/77"), 404, "no command 77")
    refused(lambda: client.call("PUT", "/sessions/session-none/commands/1", json={"kind": "save_state"}), 404, "no run")
    with pytest.raises(CommandFailed, match=r"data\[0\].tokens\[1\]: token 99999 is outside the vocabulary"):
        session.forward([Datum(tokens=(5, 99999))]).result(600)
    late = client.sessions.send(session.id, 5, SaveState())
    with pytest.raises(CommandFailed, match="command 3 did not come within 1 s"):
        late.result(600)
    for number in (3, 4):
        with pytest.raises(CommandFailed, match="command 3 did not come within 1 s"):
            client.sessions.send(session.id, number, SaveState()).result(600)
    assert client.sessions.attach(session.id).forward(data).result(600).number == 6
    session.close()
    wait_until(lambda: session.status().state == "succeeded", "the end of a closed session")
    # What comes as the end is being recorded is accepted, and dropped.
    wait_until(lambda: _has_completed(stack, session.id), "the end of its workflow")
    refused(lambda: client.call("PUT", f"{path}/7", json={"kind": "save_state"}), 409, "ended")
    refused(lambda: client.call("GET", f"{path}/7"), 404, "no command 7")
    # What a workflow has put under the number stays when a client's command is refused there.
    gap, key = Gap(through=7, message="it never came").model_dump_json(), RunKeys(session.id).command(7)
    (stack.host_paths.root / "store" / key).write_text(gap)
    refused(lambda: client.call("PUT", f"{path}/7", json={"kind": "save_state"}), 409, "ended")
    assert (stack.host_paths.root / "store" / key).read_text() == gap
    assert [client.call("GET", f"{path}/{number}")["state"] for number in (2, 4, 6)] == ["failed", "dropped", "done"]


def test_a_cancelled_session_is_resumed_with_its_state(stack: Stack, client: Client, tiny_model: Path) -> None:
    commands = commands_of(6, 14)
    whole, cut = opened(client, tiny_model), opened(client, tiny_model)
    for place, asked in enumerate(commands):
        one, other = whole.send(asked), cut.send(asked)
        assert told(one.result(600)) == told(other.result(600))
        if place == 7:
            client.call("POST", f"/runs/{cut.id}/cancel")
            wait_until(lambda: cut.status().state == "cancelled", "the end of a cancelled session")
            client.call("POST", f"/runs/{cut.id}/resume")
    assert final_state(whole, client) == final_state(cut, client)
