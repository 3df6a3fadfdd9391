"""Our additions to vLLM's server: `POST /v1/load_weights`, and a key for every request.

vLLM imports this file (`--middleware longshore_weights.Gate`, `--worker-extension-cls longshore_weights.Weights`), so
it imports neither Longshore nor vLLM. vLLM's endpoints for changing weights need its development mode, which lets any
client call any method of a worker: that stays off.
"""

import asyncio
import hmac
import json
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_PASSED_ON = {
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
_MAX_REQUEST_BYTES, _MAX_HEADER_BYTES = 64 << 10, 100 << 20
_HEAD = "lm_head.weight"


class Refused(Exception):
    """A request is refused: a status, and a message in OpenAI's error shape."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Weights:
    """Methods that vLLM's workers get."""

    def replace_weights(self, folder: str) -> None:
        """Load a folder's weights in place of those that are served, on this worker."""
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        model = worker.get_model()
        head, embeddings = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
        if head is not None and getattr(head, "weight", None) is getattr(embeddings, "weight", None):
            # On a CPU each linear keeps a reordered copy of its matrix. vLLM renews the copies of tensors that it
            # reads, but it does not read a head that is tied to the embeddings.
            head.quant_method.process_weights_after_loading(head)


class Gate:
    """ASGI middleware: it checks the key, passes on the few requests that samplers get, and replaces weights.

    Weights are replaced while nothing is drawn. They get a new name, which requests must give: a request with another
    name is answered 404. If replacing fails, nobody knows which weights vLLM computes with: every answer is 503 from
    then on, to health checks too, so that the process is ended.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        self._one_load = asyncio.Lock()
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._num_served = 0
        self._broken: str | None = None
        self._tensors: dict[str, Any] | None = None  # of the model's folder, read before others take their place
        self._is_open.set()
        self._is_idle.set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            await self._serve(scope, receive, send)
        except Refused as error:
            detail = {"message": str(error), "type": "invalid_request_error", "code": error.status}
            await _answer(send, error.status, {"error": detail})

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        asked = scope.get("method", ""), scope["path"]
        if asked == ("GET", "/health"):
            self._refuse_broken()
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._key):
            raise Refused(401, "the bearer key is missing or wrong")
        if asked == ("POST", "/v1/load_weights"):
            name, folder = _name_and_folder(await _body(receive))
            async with self._one_load, self._alone():
                await self._replace(scope["app"].state, name, folder)
            await _answer(send, 200, {"message": f"the weights of {folder} are served as {name}"})
        elif asked in _PASSED_ON:
            async with self._together():
                await self._app(scope, receive, send)
        else:
            raise Refused(404, f"there is no {asked[0]} {asked[1]}")

    @asynccontextmanager
    async def _together(self) -> AsyncIterator[None]:
        """Wait until no weights are being replaced, and keep who would replace them waiting."""
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._refuse_broken()
        self._num_served += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_served -= 1
            if not self._num_served:
                self._is_idle.set()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let no other request begin, and wait until running ones have ended."""
        self._is_open.clear()
        try:
            while self._num_served:
                await self._is_idle.wait()
            self._refuse_broken()
            yield
        finally:
            self._is_open.set()

    async def _replace(self, state: Any, name: str, folder: Path) -> None:
        served = state.openai_serving_models.base_model_paths
        if state.args.enable_lora:
            raise Refused(400, "this server is one for adapters: its weights stay as they are")
        if self._tensors is None:
            self._tensors = tensors_of(Path(served[0].model_path))
        if tensors_of(folder) != self._tensors:
            raise Refused(400, f"the tensors of {folder} are not those of the model, by name and shape")
        entry = type(served[0])(name=name, model_path=str(folder))
        served.clear()
        try:
            await state.engine_client.pause_generation(
                mode="abort", clear_cache=True
            )  # keys and values of the old ones
            await state.engine_client.collective_rpc("replace_weights", args=(str(folder),))
            await state.engine_client.resume_generation()
        except Exception as error:
            self._broken = f"the weights of {folder} could not be loaded: {type(error).__name__}: {error}"
            raise Refused(503, self._broken) from error
        served.append(entry)

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise Refused(503, self._broken)


def tensors_of(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of a Hugging Face folder's tensors by name. A head that is tied to the embeddings is left out.

    Raises Refused: the folder cannot be read.
    """
    shapes: dict[str, list[int]] = {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            shapes |= {name: entry["shape"] for name, entry in _header(path).items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise Refused(400, f"{folder} is no folder of a model: {error}") from error
    if config.get("tie_word_embeddings"):
        shapes.pop(_HEAD, None)
    return shapes


def _header(path: Path) -> dict[str, Any]:
    """Read what a safetensors file says of its tensors: the length in eight bytes, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {length:,} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def _name_and_folder(body: bytes) -> tuple[str, Path]:
    try:
        asked = json.loads(body)
        name, folder = asked["name"], asked["path"]
    except (ValueError, LookupError, TypeError) as error:
        raise Refused(400, "name and path: these two are asked for, as JSON") from error
    if not (isinstance(name, str) and isinstance(folder, str) and name):
        raise Refused(400, "name and path: both are texts")
    return name, Path(folder)


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_REQUEST_BYTES:
            raise Refused(413, f"a body may have {_MAX_REQUEST_BYTES} bytes")
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return body


async def _answer(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
