"""Episodes: gives each agent its own address, and answers its questions there.

The address holds the episode's secret, since some clients can send no key of their own. It is good for the episode's
questions alone, and until its end. The edge takes the secret out of the path (apis/edge.py), so that no log has it.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from functools import partial

from longshore.accounts import hash_key
from longshore.fields import Frozen
from longshore.views import EndedEpisode, EpisodeRequest, EpisodeSampling, EpisodeTurnView, EpisodeView
from service.accounts import audit
from service.accounts.keys import Principal
from service.accounts.tenants import Documents
from service.database.engine import KeyedLocks, Recent
from service.inference.questions import Inference, Reply, StreamedAnswer
from shared.chat import episodes
from shared.chat.episodes import IMPOSED, EpisodeTurn, TurnPlace, digest_of
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.errors import InvalidInput, NotFound
from shared.settings import Settings
from shared.storage.store import ObjectStore

AGENTS = "/agents/"
ADDRESS = re.compile(
    rf"{AGENTS}(?P<episode>ep-[0-9a-f]{{24}})/(?P<tenant>[^/~]{{1,48}})~(?P<secret>[A-Za-z0-9_-]{{43}})(?P<path>/.*)"
)
"""The path of a request to an episode's address."""
PATHS = frozenset(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"))
"""What an episode's address answers."""


class Episode(Frozen):
    """An episode as the database has it."""

    episode_id: str
    model: str
    sampling: EpisodeSampling
    max_turns: int
    seed: int
    secret_sha256: str
    created_at: float
    expires_at: float
    ended_at: float | None = None
    end: EndedEpisode | None = None


class Episodes:
    """The episodes of all tenants. No episode lasts longer than answers are kept."""

    def __init__(
        self, documents: Documents[Episode], inference: Inference, store: ObjectStore, settings: Settings
    ) -> None:
        self._documents = documents
        self._inference = inference
        self._store = store
        self._api_url = settings.api_url.rstrip("/")
        self._kept_s, self._max_bytes = settings.serving.answers_kept_s, settings.serving.answers_max_bytes
        self._recent = Recent[Episode]()
        self._locks = KeyedLocks()

    async def begin(self, tenant: str, request: EpisodeRequest) -> EpisodeView:
        """Make an episode. `url` of the answer is its address; nothing shows it again.

        Raises QuotaExceeded, InvalidInput.
        """
        if request.lasts_s > self._kept_s:
            raise InvalidInput(f"answers are kept for {self._kept_s:g} s here, and an episode no longer", "lasts_s")
        now, secret = time.time(), secrets.token_urlsafe(32)
        episode = Episode(
            episode_id=f"ep-{int(now):08x}{secrets.token_hex(8)}",
            model=request.model,
            sampling=request.sampling,
            max_turns=request.max_turns,
            seed=request.seed if request.seed is not None else secrets.randbits(61),
            secret_sha256=hash_key(secret),
            created_at=now,
            expires_at=now + request.lasts_s,
        )
        await self._documents.add(tenant, episode.episode_id, episode)
        audit.touched(episode.episode_id)
        url = f"{self._api_url}{AGENTS}{episode.episode_id}/{tenant}~{secret}"
        return _view(episode).model_copy(update={"url": url})

    async def show(self, tenant: str, episode_id: str) -> EpisodeView:
        """Show an episode. Raises NotFound."""
        return _view(await self._documents.get(tenant, episode_id))

    async def list(self, tenant: str, limit: int = 50, before: str | None = None) -> tuple[EpisodeView, ...]:
        """List episodes, newest first. `before`: the id of the last one of the previous page."""
        return tuple(map(_view, await self._documents.newest(tenant, limit, before)))

    async def turns(
        self, tenant: str, episode_id: str, first: int = 0, limit: int = 100
    ) -> tuple[EpisodeTurnView, ...]:
        """Show an episode's turns in order, from number `first` on. Raises NotFound."""
        await self._documents.get(tenant, episode_id)
        found = await asyncio.to_thread(episodes.turns_of, self._store, tenant, episode_id)
        return tuple(map(_shown_turn, found[first : first + limit]))

    async def end(self, tenant: str, episode_id: str) -> EpisodeView:
        """End an episode: its address answers nothing more, and it can be trained. Ending it again changes nothing.

        Raises NotFound, StoreUnavailable.
        """
        audit.touched(episode_id)
        now = time.time()
        await self._documents.change(
            tenant, episode_id, lambda e: e if e.ended_at else e.model_copy(update={"ended_at": now}), always=True
        )
        self._recent.forget(tenant, episode_id)
        end = await asyncio.to_thread(episodes.end_episode, self._store, tenant, episode_id)
        told = EndedEpisode(num_turns=len(end.answer_ids), **end.model_dump(exclude={"answer_ids"}))
        return _view(
            await self._documents.change(
                tenant, episode_id, lambda e: e if e.end else e.model_copy(update={"end": told}), always=True
            )
        )

    async def principal(self, tenant: str, episode_id: str, secret: str) -> Principal | None:
        """Return who asks at an episode's address; None if there is no such episode, or it is over.

        Raises DatabaseUnavailable.
        """
        episode = await self._known(tenant, episode_id)
        if episode is None or not hmac.compare_digest(episode.secret_sha256, hash_key(secret)) or _is_over(episode):
            return None
        return Principal(tenant=tenant, key_id=episode_id, title="an episode", scopes=frozenset({"inference"}))

    async def _known(self, tenant: str, episode_id: str) -> Episode | None:
        find = partial(self._documents.find, tenant, episode_id)
        return await self._recent.of(tenant, episode_id, find=find)

    async def answer(
        self, asking: Principal, asked: ChatRequest, draft: StreamedAnswer | None
    ) -> Reply[ChatCompletion]:
        """Answer a turn of the episode whose address was asked, or the same as before to the same question.

        Raises NotFound: the episode is gone; and what `Inference.chat` raises.
        """
        if (episode := await self._known(asking.tenant, asking.key_id)) is None:
            raise NotFound("the episode is gone")
        if asked.n not in (None, 1):
            raise InvalidInput("one answer a question: an episode goes on from one", "n")
        drawn = _imposed(asked, episode)
        digest = digest_of(drawn)
        is_side = asked.model != episode.model or asked.has_forced_form
        place = TurnPlace(episode=episode.episode_id, digest=digest, is_side=is_side, max_turns=episode.max_turns)
        seed = int(hashlib.sha256(f"{episode.seed} {digest}".encode()).hexdigest()[:15], 16)
        drawn = drawn.model_copy(update={"seed": seed})
        async with self._locks.of(episode.episode_id, digest):  # a client that did not wait long enough asks again
            return await self._inference.chat(asking.tenant, drawn, draft, turn=place)

    async def count(self, asking: Principal, asked: ChatRequest) -> int:
        """Return the number of tokens of a question's prompt."""
        episode = await self._documents.get(asking.tenant, asking.key_id)
        return await self._inference.count(asking.tenant, asked.model_copy(update={"model": episode.model}))

    async def prune(self) -> None:
        """Delete episodes that are too old, and what is kept of them beyond a tenant's bytes."""
        before = time.time() - self._kept_s
        await self._documents.delete_older(self._kept_s)
        await asyncio.to_thread(self._delete_before, before)

    def _delete_before(self, before: float) -> None:
        for key in episodes.expired_keys(self._store, before, self._max_bytes):
            self._store.delete(key)


def _imposed(asked: ChatRequest, episode: Episode) -> ChatRequest:
    """Return a question with the model and the settings of the episode, and the shorter of both lengths."""
    sampling = episode.sampling
    lengths = [length for length in (asked.most_tokens, sampling.max_tokens) if length is not None]
    return asked.model_copy(
        update=dict.fromkeys(IMPOSED)
        | {
            "model": episode.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "max_tokens": min(lengths) if lengths else None,
            "max_completion_tokens": None,
            "ignore_eos": None,
            "stop_token_ids": None,
        }
    )


def _shown_turn(turn: EpisodeTurn) -> EpisodeTurnView:
    [choice] = turn.answer.choices
    return EpisodeTurnView(
        answer_id=turn.answer.id,
        answer=choice.message.model_dump(mode="json", exclude_none=True),
        finish_reason=choice.finish_reason,
        num_tokens=turn.answer.usage.completion_tokens,
        **turn.model_dump(exclude={"answer"}),
    )


def _is_over(episode: Episode) -> bool:
    return episode.ended_at is not None or time.time() > episode.expires_at


def _view(episode: Episode) -> EpisodeView:
    state = "ended" if episode.ended_at is not None else "expired" if _is_over(episode) else "open"
    shown = episode.model_dump(exclude={"seed", "secret_sha256"})
    return EpisodeView.model_validate(shown | {"state": state})
