"""A trainer's connections to the samplers of a sync. A sampler that is lost, or refuses, is left out from then on."""

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_worker.weight_sync.connections import PATIENCE_S, SyncConnection, connect_locally, connect_sampler
from megatron_worker.weight_sync.messages import Announcement, SyncBroken, SyncMessage, SyncReply
from shared.jobs.weight_sync import OVER_TCP, SyncPlace


@dataclass
class Receiver:
    """A connection to one sampler. `num_owed`: messages that it has not answered.

    `is_interrupted`: it has answered that its group broke; forming another group resets it.
    """

    place: SyncPlace
    connection: SyncConnection
    num_owed: int = 0
    is_interrupted: bool = False

    def send(self, message: SyncMessage) -> None:
        """Send a message without waiting for its reply. Raises SyncBroken."""
        self.connection.write(message)
        self.num_owed += 1

    def take_reply(self) -> SyncReply:
        """Read one reply or call. Raises SyncBroken, also if it is a refusal."""
        reply = self.connection.read(SyncReply)
        if reply.refused is not None:
            raise SyncBroken(reply.refused)
        if not reply.waits and reply.call is None:
            self.num_owed -= 1
            self.is_interrupted |= reply.interrupted
        return reply


class Receivers:
    """The samplers of one sync. `problems`: by socket, why others are no longer among the `living`."""

    def __init__(self) -> None:
        self.living: list[Receiver] = []
        self.problems: dict[str, str] = {}

    def announce(self, places: tuple[SyncPlace, ...], announcement: Announcement, secret: bytes | None) -> bool:
        """Connect to all samplers and announce a version. Returns True if one of them needs all elements.

        `secret`: the run's, for samplers that are reached over TCP.
        """
        needs_all = announcement.base_digest is None
        for place in places:
            connection: SyncConnection | None = None
            try:
                connection = _connected(place, announcement, secret)
                connection.write(announcement)
                receiver = Receiver(place, connection, num_owed=1)
                while receiver.num_owed:
                    needs_all |= receiver.take_reply().needs_all
                self.living.append(receiver)
            except SyncBroken as broken:
                self.problems[place.socket] = str(broken)
                if connection is not None:
                    connection.close()
        return needs_all

    def each(self, action: Callable[[Receiver], None]) -> None:
        """Call an action with every sampler; a sampler is lost if the action fails with it."""
        for receiver in list(self.living):
            try:
                action(receiver)
            except SyncBroken as broken:
                self.lose(receiver, str(broken))

    def send(self, message: SyncMessage) -> None:
        self.each(lambda receiver: receiver.send(message))

    def settle(self, num_owed: int) -> None:
        """Read replies until no sampler owes more than `num_owed`. Samplers that are lost do not disturb the others."""
        while owing := self._owing(num_owed):
            self._take_replies(owing)

    def settle_together(self, num_owed: int) -> None:
        """The same for members of a group. Returns as soon as any of them is lost or interrupted."""
        num_before = len(self.living)
        while self._owing(num_owed):
            self._take_replies(self.living)
            if len(self.living) < num_before or any(one.is_interrupted for one in self.living):
                return

    def _owing(self, num_owed: int) -> list[Receiver]:
        return [receiver for receiver in self.living if receiver.num_owed > num_owed]

    def _take_replies(self, some: list[Receiver]) -> None:
        """Read what some of the samplers have sent. Those that owe and are silent for too long are lost."""
        readable, _, _ = select.select([one.connection.socket for one in some], [], [], PATIENCE_S)
        self.each(lambda one: _read(one, readable))
        if not readable:
            for one in self._owing(0):
                self.lose(one, f"the sampler was silent for {PATIENCE_S:g} s")

    def lose(self, receiver: Receiver, why: str) -> None:
        self.problems[receiver.place.socket] = why
        self.living.remove(receiver)
        receiver.connection.close()

    def close(self) -> None:
        for receiver in self.living:
            receiver.connection.close()


def _read(receiver: Receiver, readable: Sequence[object]) -> None:
    if receiver.connection.socket in readable:
        receiver.take_reply()


def _connected(place: SyncPlace, announcement: Announcement, secret: bytes | None) -> SyncConnection:
    if announcement.transport not in OVER_TCP:
        return connect_locally(place.socket)
    if place.address is None:
        raise SyncBroken("the sampler's host has no address for weights (LONGSHORE_SAMPLING__WEIGHTS_ADDRESS)")
    if secret is None:
        raise SyncBroken("this host has no key by which samplers of other machines would know it")
    return connect_sampler(place.address, announcement.run_id, secret)
