"""A host's endpoints for session notices: commands from the web service, results to it (activities/bells.py).

POST /sessions/RUN/bell?number=N ──► 204, or 404 if the session is not active here. Its body: command N, or empty
GET /sessions/RUN/results ──► a line whenever results are stored: the number of the next command without a result,
then the JSON of the result before that, if it is small
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from activities.bells import Bells

SIGN_OF_LIFE_S = 1.0


def bell_routes(bells: Bells) -> list[Route]:
    async def ring(request: Request) -> Response:
        if (session := bells.find(request.path_params["run_id"])) is None:
            return Response(status_code=404)
        if "number" in request.query_params and (command := await request.body()):
            session.bring(int(request.query_params["number"]), command)
        session.rung.set()
        return Response(status_code=204)

    async def results(request: Request) -> Response:
        if (session := bells.find(request.path_params["run_id"])) is None:
            return Response(status_code=404)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int | None, bytes | None]]()
        end = session.listen(lambda *told: loop.call_soon_threadsafe(news.put_nowait, told))
        return StreamingResponse(_lines(news, end), media_type="text/plain")

    return [
        Route("/sessions/{run_id}/bell", ring, methods=["POST"]),
        Route("/sessions/{run_id}/results", results, methods=["GET"]),
    ]


async def _lines(
    news: "asyncio.Queue[tuple[int | None, bytes | None]]", end: Callable[[], None]
) -> AsyncIterator[bytes]:
    try:
        while True:
            try:
                next, result = await asyncio.wait_for(news.get(), SIGN_OF_LIFE_S)
            except TimeoutError:
                yield b"\n"
                continue
            if next is None:
                return
            yield b"%d %b\n" % (next, result or b"")
    finally:
        end()
