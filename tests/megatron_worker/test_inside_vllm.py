"""What our vLLM servers let in, and when weights are replaced. Of vLLM (tests/vllm) a few methods stand here alone."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from megatron_worker.sampler.inside_vllm.longshore_weights import Gate
from tests.activities.sampling.injected import write_weights

KEY = "key-of-this-test"
COMPLETIONS, LOAD = "/v1/completions", "/v1/load_weights"


@dataclass
class Named:
    name: str
    model_path: str


@dataclass
class Vllm:
    """The few attributes and methods of vLLM's application that the middleware uses, behind one that it is in."""

    served: list[Named]
    done: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False

    def __post_init__(self) -> None:
        self.may_answer.set()
        models, args = SimpleNamespace(base_model_paths=self.served), SimpleNamespace(enable_lora=False)
        self.state = SimpleNamespace(openai_serving_models=models, args=args, engine_client=self)
        self.gate = Gate(self.answer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.gate(scope | {"app": self}, receive, send)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.done.append(f"{scope['path']} begins")
        self.has_begun.set()
        await self.may_answer.wait()
        self.done.append(f"{scope['path']} ends")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert clear_cache, "or keys and values of old weights are used again"

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        assert self.served == [], "nobody can name weights that are half there"
        self.done.append(f"{method} {Path(*args).name}")
        if self.fails:
            raise OSError("read error")

    async def resume_generation(self) -> None:
        pass


@pytest.fixture
def vllm(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return Vllm([Named("base", str(tiny_model))])


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("other") / "other", tiny_model, 1)


def client_of(vllm: Vllm, key: str = KEY) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(vllm), base_url="http://vllm", headers=headers)


async def test_only_what_samplers_are_asked_is_let_in_and_only_with_the_key(vllm: Vllm) -> None:
    async with client_of(vllm, "another") as stranger, client_of(vllm) as client:
        for path in (COMPLETIONS, LOAD, "/invocations", "/collective_rpc", "/v1//completions"):
            assert (await stranger.post(path, json={})).status_code == 401
        for path in ("/invocations", "/collective_rpc", "/update_weights", "/sleep", "/v1//completions", "/metrics"):
            assert (await client.post(path, json={})).status_code == 404
        assert vllm.done == []
        assert (await stranger.get("/health")).status_code == 200
        assert (await client.post(COMPLETIONS, json={})).status_code == 200
        for body in (b"", b"[]", b"{}", b'{"name": "", "path": "/"}', b'{"name": 1, "path": "/"}'):
            assert (await client.post(LOAD, content=body)).status_code == 400
        assert (await client.post(LOAD, content=b" " * (65 << 10))).status_code == 413
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await vllm({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
        assert [message["type"] for message in sent] == ["websocket.close"]


async def test_weights_are_replaced_while_nothing_is_drawn(vllm: Vllm, other: Path) -> None:
    vllm.may_answer.clear()
    async with client_of(vllm) as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await vllm.has_begun.wait()
        load = asyncio.create_task(client.post(LOAD, json={"name": "new", "path": str(other)}))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await asyncio.sleep(0.05)
        assert vllm.done == [f"{COMPLETIONS} begins"]
        vllm.may_answer.set()
        assert [(await each).status_code for each in (first, load, second)] == [200, 200, 200]
    one = [f"{COMPLETIONS} begins", f"{COMPLETIONS} ends"]
    assert vllm.done == [*one, "replace_weights other", *one]
    assert vllm.served == [Named("new", str(other))]


async def test_other_tensors_are_refused_and_half_read_weights_are_never_used(
    vllm: Vllm, other: Path, tmp_path: Path
) -> None:
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "norm" in name)
    for number, wrong in enumerate(({name: tensors[name][:-1]}, {"more": tensors[name].clone()}, {})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_bytes((other / "config.json").read_bytes())
        changed = {key: tensor for key, tensor in tensors.items() if key != name or wrong} | wrong
        save_file(changed, folder / "model.safetensors")
        async with client_of(vllm) as client:
            refused = await client.post(LOAD, json={"name": "new", "path": str(folder)})
        assert refused.status_code == 400 and "not those of the model" in refused.text
    assert vllm.done == [] and [one.name for one in vllm.served] == ["base"]
    vllm.fails = True
    async with client_of(vllm) as client:
        assert (await client.post(LOAD, json={"name": "new", "path": str(other)})).status_code == 503
        vllm.fails = False
        for path in (COMPLETIONS, LOAD):
            refused = await client.post(path, json={"name": "new", "path": str(other)})
            assert refused.status_code == 503 and "OSError: read error" in refused.text
        assert (await client.get("/health")).status_code == 503
    assert vllm.done == ["replace_weights other"] and vllm.served == []
