"""Our additions to vLLM's server: `POST /v1/load_weights` and `/v1/update_weights`, and a key for every request.

vLLM imports this file (`--middleware longshore_weights.Gate`, `--worker-extension-cls longshore_weights.Weights`), so
it imports neither Longshore nor vLLM. vLLM's endpoints for changing weights need its development mode, which lets any
client call any method of a worker: that stays off.
"""

import asyncio
import copy
import hmac
import json
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from contextvars import ContextVar
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
_HEAD, _LINEAR = "lm_head.weight", ".o_proj.weight"
_SAYS_NO_VERSIONS = "does not say which weights drew a token, as 0.32 does: set weight_sync.in_flight to finish"

# The choices of the request in progress: for each, the versions that drew its tokens, with their first and last + 1.
_spans: ContextVar[dict[int, list[tuple[str, int, int]]]] = ContextVar("_spans")


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


class Watched:
    """vLLM's engine, as its completions see it. It also notes which versions of the weights drew a request's tokens.

    vLLM counts them itself, with each engine step's tokens (vllm/v1/engine/output_processor.py), but its completions
    leave them out.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **how: Any) -> AsyncIterator[Any]:
        first = int(request_id.rpartition("-")[2]) * sampling_params.n  # it ends with the prompt's number
        async with aclosing(self._engine.generate(prompt, sampling_params, request_id, **how)) as outputs:
            async for output in outputs:
                for each in output.outputs:
                    if each.weight_versions is not None:
                        spans = [(one.version, one.start, one.end) for one in each.weight_versions]
                        _spans.get()[first + each.index] = spans
                yield output


class Gate:
    """ASGI middleware: it checks the key, passes on the few requests that samplers get, and replaces weights.

    Weights are replaced while nothing is drawn. They get a new name, which requests must give: a request with another
    name is answered 404. If replacing fails, nobody knows which weights vLLM computes with: every answer is 503 from
    then on, to health checks too, so that the process is ended.

    The versions of one policy replace each other under one name while samples are drawn: between two tokens, and what
    vLLM has computed of these samples is computed again. Answers under this name say which version drew each token.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        self._one_load = asyncio.Lock()
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._num_served = 0
        self._broken: str | None = None
        self._tensors: dict[str, Any] | None = None  # of the model's folder, read before others take their place
        self._newest: tuple[str, int] | None = None  # the name of a policy, and its version
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
        elif asked == ("POST", "/v1/update_weights"):
            update = _update_of(await _body(receive))
            async with self._one_load:
                self._refuse_broken()
                await self._update(scope, send, *update)
        elif asked in _PASSED_ON:
            async with self._together():
                await self._told(scope, receive, send)
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

    async def _update(self, scope: Message, send: Send, name: str, version: int, folder: Path | None) -> None:
        """Serve a policy's version under its name, unless a newer one is served; `folder` None: the unchanged model."""
        state = scope["app"].state
        engine, models, serving = state.engine_client, state.openai_serving_models, state.openai_serving_completion
        is_there = name in models.lora_requests or name == models.base_model_paths[0].name
        if is_there and self._newest is not None and self._newest[0] == name and self._newest[1] >= version:
            await _answer(send, 200, {"message": f"{name} is not older"})
            return
        if not hasattr(engine, "update_weight_version"):
            raise Refused(400, f"this vLLM {_SAYS_NO_VERSIONS}")
        if state.args.enable_return_routed_experts:
            raise Refused(400, "routes of samples that go on under new weights are of these: set routing_replay to off")
        if not isinstance(serving.engine_client, Watched):
            serving.engine_client = Watched(engine)
        if not state.args.enable_lora:
            if folder is None:
                raise Refused(400, "path: only an adapter may be none")
            async with AsyncExitStack() as stack:
                if not is_there:
                    await stack.enter_async_context(self._alone())
                await self._replace(state, name, folder, version)
        elif is_there and folder is not None:
            newer = copy.copy(models.lora_requests[name])
            newer.load_inplace = True  # which requests must not have: it would be read at each of their steps
            async with self._paused(engine, "keep", folder, version):
                _point_at(folder)
                await engine.add_lora(newer)
        else:
            # vLLM reads an adapter again if it had to make room. A path that stays then leads to the newest one.
            folder = folder or _no_adapter(Path(models.base_model_paths[0].model_path))
            async with self._paused(engine, "keep", folder, version):
                asked = {"lora_name": name, "lora_path": str(_point_at(folder))}
                self._newest = name, version
                await self._app(scope | {"path": "/v1/load_lora_adapter"}, _receives(json.dumps(asked).encode()), send)
            return
        self._newest = name, version
        await _answer(send, 200, {"message": f"{name} is version {version}"})

    async def _replace(self, state: Any, name: str, folder: Path, version: int | None = None) -> None:
        """Replace the weights. If they are a newer version of those of this name, samples in progress continue."""
        served = state.openai_serving_models.base_model_paths
        if state.args.enable_lora:
            raise Refused(400, "this server is one for adapters: its weights stay as they are")
        if self._tensors is None:
            self._tensors = tensors_of(Path(served[0].model_path))
        if tensors_of(folder) != self._tensors:
            raise Refused(400, f"the tensors of {folder} are not those of the model, by name and shape")
        entry = type(served[0])(name=name, model_path=str(folder))
        goes_on = version is not None and name == served[0].name
        if not goes_on:
            served.clear()
        async with self._paused(state.engine_client, "keep" if goes_on else "abort", folder, version):
            await state.engine_client.collective_rpc("replace_weights", args=(str(folder),))
        served[:] = [entry]

    @asynccontextmanager
    async def _paused(self, engine: Any, mode: str, folder: Path | None, version: int | None) -> AsyncIterator[None]:
        """Change weights in a `with` block: nothing is computed, and keys and values of the old ones are dropped.

        The pause waits for what is being computed, so that the block is between two tokens of each sample.
        """
        try:
            await engine.pause_generation(mode=mode, clear_cache=True)
            yield
            if version is not None:
                await engine.update_weight_version(str(version))
            await engine.resume_generation()
        except Exception as error:
            self._broken = f"the weights of {folder} could not be loaded: {type(error).__name__}: {error}"
            raise Refused(503, self._broken) from error

    async def _told(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on. Its answer also says the versions of the policy, if it is about one that is updated."""
        kept: list[Message] = []

        async def take(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if kept or (is_start and self._newest and (b"content-type", b"application/json") in message["headers"]):
                kept.append(message)
            else:  # other answers, among them streams of events
                await send(message)

        _spans.set({})
        await self._app(scope, receive, take)
        if kept:
            body = b"".join(message.get("body", b"") for message in kept)
            if kept[0]["status"] == 200 and self._newest is not None:
                body = _with_versions(body, *self._newest)
            others = [each for each in kept[0]["headers"] if each[0] != b"content-length"]
            await send(kept[0] | {"headers": [*others, (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise Refused(503, self._broken)


def _point_at(folder: Path) -> Path:
    """Have the path of the newest adapter lead to a folder. Returns this path."""
    own = Path(os.environ["VLLM_RPC_BASE_PATH"])
    (own / "next").unlink(missing_ok=True)
    (own / "next").symlink_to(folder)
    return (own / "next").replace(own / "newest")


def _no_adapter(model: Path) -> Path:
    """Write an adapter that changes nothing: zeros for one linear, as vLLM reads none without tensors.

    Raises Refused: the model has no such linear.
    """
    folder = Path(os.environ["VLLM_RPC_BASE_PATH"]) / "no_adapter"
    found = next(((name, shape) for name, shape in tensors_of(model).items() if name.endswith(_LINEAR)), None)
    if found is None:
        raise Refused(400, f"{model} has no {_LINEAR}: begin with an initial_adapter, or set in_flight to finish")
    name, (num_out, num_in) = found
    module, entries = f"base_model.model.{name.removesuffix('.weight')}", dict[str, Any]()
    for factor, shape, start in (("A", [1, num_in], 0), ("B", [num_out, 1], num_in)):
        offsets = [4 * start, 4 * (start + shape[0] * shape[1])]
        entries[f"{module}.lora_{factor}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    header = json.dumps(entries).encode()
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    data = struct.pack("<Q", len(header)) + header + bytes(4 * (num_in + num_out))
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder


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


def _update_of(body: bytes) -> tuple[str, int, Path | None]:
    try:
        asked = json.loads(body)
        name, version, path = asked["name"], asked["version"], asked.get("path")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(400, "name, version and path: these are asked for, as JSON") from error
    if not (isinstance(name, str) and name and type(version) is int and isinstance(path, str | None)):
        raise Refused(400, "name and path are texts, version is a number")
    return name, version, None if path is None else Path(path)


def _with_versions(body: bytes, name: str, version: int) -> bytes:
    """Return an answer with the versions that drew a policy's samples, or with the version in its name's card.

    Raises Refused: vLLM has not said the version of some token.
    """
    answer = json.loads(body)
    if answer.get("object") == "list":
        for card in answer["data"]:
            if card["id"] == name:
                card["policy_version"] = version
    elif answer.get("model") == name:
        for choice in answer["choices"]:
            spans, ids = _spans.get().get(choice["index"]), choice.get("token_ids")  # these only if they were asked for
            versions = [int(drawn) for drawn, start, end in spans or () for _ in range(start, end)]
            if spans is None or (ids is not None and len(ids) != len(versions)):
                raise Refused(500, f"this vLLM {_SAYS_NO_VERSIONS}")
            choice["policy_versions"] = versions
        drawn_by = dict.fromkeys(each for choice in answer["choices"] for each in choice["policy_versions"])
        answer["drawn_by"] = [{"policy_version": each} for each in drawn_by]
    return json.dumps(answer).encode()


def _receives(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    return receive


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
