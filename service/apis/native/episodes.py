"""The native API's episodes: addresses at which agents ask a model, whose answers are kept to be trained on."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from longshore.views import EpisodeRequest, EpisodeTurnView, EpisodeView
from service.accounts import audit
from service.accounts.keys import BEARER, Asking, require
from service.apis.bodies import JsonBody, JsonRoute
from service.apis.errors import RESPONSES
from service.backend import Backed

router = APIRouter(
    route_class=JsonRoute,
    prefix="/api/v1/episodes",
    dependencies=[*BEARER, Depends(require("inference"))],
    responses=RESPONSES,
)


@router.post("", status_code=201)
async def begin_episode(request: JsonBody[EpisodeRequest], asking: Asking, backend: Backed) -> EpisodeView:
    """Make an episode. `url` of the answer is its address; nothing shows it again."""
    episode = await backend.episodes.begin(asking.tenant, request)
    audit.touched(episode.episode_id)
    return episode


@router.get("")
async def list_episodes(
    asking: Asking, backend: Backed, limit: Annotated[int, Query(ge=1, le=100)] = 50, before: str | None = None
) -> tuple[EpisodeView, ...]:
    """List episodes, newest first. `before`: the id of the last one of the previous page."""
    return await backend.episodes.list(asking.tenant, limit, before)


@router.get("/{episode_id}")
async def get_episode(episode_id: str, asking: Asking, backend: Backed) -> EpisodeView:
    """Show an episode."""
    return await backend.episodes.show(asking.tenant, episode_id)


@router.get("/{episode_id}/turns")
async def get_turns(
    episode_id: str,
    asking: Asking,
    backend: Backed,
    first: Annotated[int, Query(ge=0, le=1024)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
) -> tuple[EpisodeTurnView, ...]:
    """Show an episode's turns in order, from number `first` on."""
    return await backend.episodes.turns(asking.tenant, episode_id, first, limit)


@router.post("/{episode_id}/end")
async def end_episode(episode_id: str, asking: Asking, backend: Backed) -> EpisodeView:
    """End an episode: its address answers nothing more, and it can be trained. Ending it again changes nothing."""
    audit.touched(episode_id)
    return await backend.episodes.end(asking.tenant, episode_id)
