"""The models that a sampler answers by: its weights under a name, and adapters. They come from folders or by a sync."""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from longshore.fields import Sha256
from longshore.training import Lora
from megatron_worker.offload import HostCopy
from megatron_worker.sampler.adapters import LoadedAdapter, adapter_of, adapter_shapes, load_adapter, versioned
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Generator
from megatron_worker.tensors.safetensors_files import file_sha256
from megatron_worker.weight_sync.bucket_reader import Receiving
from megatron_worker.weight_sync.buckets import Announcement, Assembly, SyncReply, shapes_sha256, weights_sha256
from megatron_worker.weight_sync.connections import SyncConnection
from shared.chat.completions import (
    DrawnBy,
    LoadAdapterRequest,
    LoadWeightsRequest,
    ModelCard,
    ModelList,
    NameWeightsRequest,
    PartMemory,
    SamplerMemory,
    SamplerRequest,
    SleepRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from shared.errors import InvalidInput
from shared.models import peft as peft_format

R = TypeVar("R", bound=SamplerRequest)


class RequestRefused(Exception):
    """A request is refused: an answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class SyncedWeights:
    """The weights that a sampler got by a weight sync: their run, the policy's version, and the weights' digest."""

    run_id: str
    version: int
    digest: Sha256


@dataclass
class SyncedAdapter:
    """An adapter that came by a weight sync, and that nobody has named yet.

    It is found by the digest of its sync, or by its content (`shared.models.peft.content_sha256`) once that is known.
    """

    adapter: LoadedAdapter
    digest: Sha256
    content: Sha256 | None = None


_MOST_SYNCED = 8  # runs whose newest such adapter is kept: those of others must be loaded from the store


class Models:
    """The models that requests can name. Its methods are called by many threads; the generator's alone changes weights.

    After a sync that broke, or a folder that could not be read to its end, no weights can be named until others are
    loaded.
    """

    def __init__(self, name: str, folder: Path, decoder: Decoder, generator: Generator, max_model_len: int) -> None:
        self._decoder = decoder
        self._base: LoadedAdapter | None = self._whole(name, str(folder))
        self._synced: SyncedWeights | None = None
        self._num_held = 0
        self._let_go = threading.Condition()
        self._renewed: LoadedAdapter | None = None  # weights being written; running samples will continue with them
        self._generator = generator
        self._max_model_len = max_model_len
        self._adapters: dict[str, LoadedAdapter] = {}
        self._synced_adapters: dict[str, SyncedAdapter] = {}  # by run, the newest last
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._created = int(time.time())
        self.is_asleep = False

    def cards(self) -> ModelList:
        with self._lock:
            base, adapters = self._base or self._renewed, list(self._adapters.values())
        if base is None:
            return ModelList(data=[])
        return ModelList(data=[self._card(base, None), *(self._card(adapter, base.name) for adapter in adapters)])

    def _card(self, adapter: LoadedAdapter, parent: str | None) -> ModelCard:
        about = {"parent": parent, "max_model_len": self._max_model_len} | adapter.drawn_by.model_dump()
        return ModelCard(id=adapter.name, created=self._created, root=adapter.folder, **about)

    def _whole(self, name: str, folder: str, version: int | None = None) -> LoadedAdapter:
        """Describe the decoder's weights as they lie in memory."""
        sha256 = weights_sha256(self._decoder.named_weights().items())
        return LoadedAdapter(name, folder, {}, DrawnBy(policy_version=version, weights_sha256=sha256))

    def find(self, name: str, *, scores: bool = False) -> LoadedAdapter:
        """Return the model that a request names. `scores`: it must be a reward model; otherwise it must not be one."""
        with self._lock:
            base = self._base or self._renewed
            adapter = base if base is not None and name == base.name else self._adapters.get(name)
        self._refuse_asleep()
        if base is None:
            raise RequestRefused(503, "the sampler's weights are not complete: load them again")
        if adapter is None:
            raise RequestRefused(404, f"The model `{name}` does not exist.", "model", "model_not_found")
        if scores != (adapter.head is not None):
            what = "has no head of scalars" if scores else "is a reward model: it scores (/v1/score) and writes nothing"
            raise RequestRefused(400, f"The model `{name}` {what}.", "model")
        return adapter

    # Sleep.

    def adapters(self) -> list[LoadedAdapter]:
        """Return all adapters, those without a name too."""
        with self._lock:
            return [*self._adapters.values(), *(synced.adapter for synced in self._synced_adapters.values())]

    def drop(self) -> tuple[LoadedAdapter | None, list[LoadedAdapter]]:
        """Forget the weights and all adapters. Returns those that came from folders, and can be read there again."""
        with self._lock:
            base, adapters = self._base, list(self._adapters.values())
            self._base = self._synced = None
            self._adapters.clear()
            self._synced_adapters.clear()
        kept = [adapter for adapter in adapters if Path(adapter.folder).is_dir()]
        return (base if base is not None and Path(base.folder).is_dir() else None), kept

    def restore(self, base: LoadedAdapter | None, adapters: list[LoadedAdapter]) -> None:
        """Serve again what `drop` returned, after it was read again."""
        with self._lock:
            self._base, self._adapters = base, {adapter.name: adapter for adapter in adapters}

    def _refuse_asleep(self) -> None:
        if self.is_asleep:
            raise RequestRefused(503, "the sampler is asleep: POST /v1/wake first")

    # Adapters.

    def load(self, body: bytes) -> str:
        request = parsed(LoadAdapterRequest, body)
        self._refuse_asleep()
        self._refuse_taken(request.lora_name)
        folder = Path(request.lora_path)
        if not (folder / peft_format.CONFIG).is_file():
            raise RequestRefused(404, f"no adapter is at {folder}: it has no {peft_format.CONFIG}", "lora_path")
        adapter = self._read_adapter(request.lora_name, folder, "lora_path")
        with self._lock:
            self._refuse_asleep()  # it may have fallen asleep since
            self._refuse_taken(request.lora_name)
            self._adapters[request.lora_name] = adapter
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    def _read_adapter(self, name: str, folder: Path, param: str, version: int | None = None) -> LoadedAdapter:
        try:
            return versioned(load_adapter(name, folder, self._decoder), version)
        except InvalidInput as error:
            raise RequestRefused(400, f"the adapter cannot be used: {error}", param) from error

    def _refuse_taken(self, name: str) -> None:
        if (self._base is not None and name == self._base.name) or name in self._adapters:
            raise RequestRefused(
                400, f"The lora adapter '{name}' has already been loaded: unload it first", "lora_name"
            )

    def unload(self, body: bytes) -> str:
        """Unload an adapter. Sequences that are being drawn from it continue."""
        name = parsed(UnloadAdapterRequest, body).lora_name
        with self._lock:
            if self._adapters.pop(name, None) is None:
                raise RequestRefused(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        return f"Success: LoRA adapter '{name}' removed successfully."

    # Weights.

    def load_weights(self, body: bytes) -> str:
        """Replace the model's weights by a folder's. Adapters are forgotten: they were another model's."""
        request = parsed(LoadWeightsRequest, body)
        self._read_weights(request.name, Path(request.path), again=request.again)
        return f"the weights of {request.path} are served as {request.name}"

    def _read_weights(self, name: str, folder: Path, version: int | None = None, again: bool = False) -> None:
        """Read a folder's weights, unless they are served already. With a version, samples of the name continue.

        `again`: read them in any case.
        """
        if not (folder / "config.json").is_file():
            raise RequestRefused(404, f"no model is at {folder}: it has no config.json", "path")

        def read() -> tuple[LoadedAdapter, None]:
            self._decoder.read_weights(folder)
            return self._whole(name, str(folder), version), None

        if not again and self._rename(name, str(folder), version):
            return
        try:
            self._change(read, None if version is None else name, version)
        except InvalidInput as error:
            raise RequestRefused(400, f"the weights cannot be used: {error}", "path") from error

    def _rename(self, name: str, folder: str, version: int | None) -> bool:
        """Give the weights another name and version, if they came from this folder. Returns whether they did."""
        with self._lock:
            if self._base is None or self._base.folder != folder:
                return False
            self._base.name, self._base.drawn_by = name, self._base.drawn_by.of_version(version)
        return True

    def update_weights(self, body: bytes) -> str:
        """Replace an older version of a policy by a newer one. Running samples continue with it."""
        request = parsed(UpdateWeightsRequest, body)
        if not self._is_newer(request.name, request.version):
            return f"{request.name} is not older"
        match request.lora, request.path:
            case True, None:
                self._put(versioned(LoadedAdapter(request.name, "", {}), request.version), request.version)
            case True, str(path):
                self._put(self._read_adapter(request.name, Path(path), "path", request.version), request.version)
            case False, str(path):
                self._read_weights(request.name, Path(path), request.version)
            case _:
                raise RequestRefused(400, "only an adapter may be none", "path")
        return f"{request.name} is version {request.version}"

    def _is_newer(self, name: str, version: int) -> bool:
        """Return True if a version is newer than the one served under a name, or if the name is free."""
        with self._lock:
            base = self._base or self._renewed
            held = base if base is not None and base.name == name else self._adapters.get(name)
        return held is None or held.drawn_by.policy_version is None or held.drawn_by.policy_version < version

    def _put(self, adapter: LoadedAdapter, version: int) -> None:
        """Put an adapter in the place of an older version under its name, between two tokens."""

        def change() -> None:
            self._refuse_asleep()
            if self._is_newer(adapter.name, version):
                with self._lock:
                    self._adapters.setdefault(adapter.name, adapter).become(adapter)

        self._generator.change(change, continues=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make a trainer's new weights wait until the block ends, unless running samples may continue with them."""
        with self._let_go:
            self._num_held += 1
        try:
            yield
        finally:
            with self._let_go:
                self._num_held -= 1
                self._let_go.notify_all()

    def name_weights(self, body: bytes) -> str:
        """Name what came by a sync, by its digest; an adapter also by its content. Doing it again changes nothing."""
        request = parsed(NameWeightsRequest, body)
        self._refuse_asleep()
        with self._lock:
            runs = [run for run, each in self._synced_adapters.items() if request.digest in (each.digest, each.content)]
            if runs:
                synced = self._synced_adapters.pop(runs[0])
                adapter = synced.adapter
                if synced.digest != request.digest:  # as if loaded from files, which tell no version
                    adapter.drawn_by = adapter.drawn_by.of_version(None)
                adapter.name, self._adapters[request.name] = request.name, adapter
            elif self._base is not None and self._synced is not None and self._synced.digest == request.digest:
                self._base.name = request.name
            elif request.name not in self._adapters:
                raise RequestRefused(
                    404, "no weights of this digest have come, or later ones have taken their place", "digest"
                )
        return f"served as {request.name}"

    def _change(
        self,
        write: Callable[[], tuple[LoadedAdapter, SyncedWeights | None]],
        name: str | None = None,
        version: int | None = None,
    ) -> None:
        """Write the weights between two tokens; `write` returns what they are. If it fails, the sampler has no weights.

        Args:
            name: running samples of this name continue with the new weights; samples of other names end first.
            version: of the new weights; if `name` is not older by then, nothing is written.
        """
        goes_on = self._base if name is not None and self._base is not None and self._base.name == name else None

        def change() -> None:
            self._refuse_asleep()
            if name and version is not None and not self._is_newer(name, version):
                return
            with self._lock:
                self._base = self._synced = None
                self._adapters.clear()
                self._synced_adapters.clear()
                self._renewed = goes_on
            self._generator.prefixes.forget()
            try:
                base, synced = write()
                if goes_on is not None:
                    goes_on.become(base)
                with self._lock:
                    self._base, self._synced = goes_on or base, synced
            finally:
                self._renewed = None

        self._generator.change(change, continues=goes_on is not None)

    def receive(self, connection: SyncConnection, announcement: Announcement) -> None:
        """Receive one version from a trainer; others wait. Errors are reported to the trainer."""
        with self._syncing:
            receiving: Receiving | None = None
            try:
                self._refuse_asleep()
                receiving = Receiving(connection, announcement, self._decoder.device)
                with torch.inference_mode():
                    if announcement.lora is None:
                        self._receive_weights(receiving)
                    else:
                        self._receive_adapter(receiving, announcement.lora)
            except (InvalidInput, RequestRefused) as error:
                connection.write(SyncReply(refused=str(error)))
            finally:
                if receiving is not None:
                    receiving.close()

    def _receive_adapter(self, receiving: Receiving, lora: Lora) -> None:
        shapes = adapter_shapes(self._decoder, lora)
        _check_shapes(receiving.announcement, shapes)
        receiving.begin(needs_all=True)
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
        assembly = Assembly(tensors)
        digest = receiving.put_into(assembly)
        told = receiving.announcement
        run_id, version, name = told.run_id, told.version, told.name
        adapter = versioned(adapter_of(name or f"sync-{digest}", digest, lora, self._decoder, tensors), version)
        synced = SyncedAdapter(adapter, digest)
        if name is not None:
            self._put(adapter, version)
        else:
            with self._lock:
                self._refuse_asleep()
                self._synced_adapters.pop(run_id, None)
                self._synced_adapters[run_id] = synced
                for oldest in list(self._synced_adapters)[:-_MOST_SYNCED]:
                    del self._synced_adapters[oldest]
        receiving.reply(SyncReply())
        if name is None:  # the trainer does not wait for it
            in_order = {each: tensors[each] for each in assembly.names}
            synced.content = peft_format.content_sha256(lora, file_sha256(in_order))

    def _receive_weights(self, receiving: Receiving) -> None:
        announcement, held = receiving.announcement, self._synced
        targets = self._decoder.named_weights()
        _check_shapes(announcement, {name: tuple(tensor.shape) for name, tensor in targets.items()})
        if held is not None and held.run_id == announcement.run_id and held.version > announcement.version:
            message = f"version {announcement.version} comes after version {held.version}"
            raise InvalidInput(message, "weight_sync.version")
        if announcement.name is None and not announcement.waits and self._num_held:
            raise InvalidInput("samples of a version before it are still to be drawn", "weight_sync.version")
        receiving.begin(needs_all=held is None or held.digest != announcement.base_digest)

        def write() -> tuple[LoadedAdapter, SyncedWeights]:
            receiving.go_on()
            digest, version = receiving.put_into(Assembly(targets)), announcement.version
            base = self._whole(announcement.name or f"sync-{digest}", digest, version)
            return base, SyncedWeights(announcement.run_id, version, digest)

        with receiving.waiting():
            if announcement.name is None:
                with self._let_go:
                    self._let_go.wait_for(lambda: not self._num_held)
            self._change(write, announcement.name)
        receiving.reply(SyncReply())


def parsed(model: type[R], body: bytes) -> R:
    """Read a request's body. Raises RequestRefused naming the field and the rule."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestRefused(400, f"{place}: {first['msg']}" if place else first["msg"], place or None) from error


def _check_shapes(announcement: Announcement, shapes: dict[str, tuple[int, ...]]) -> None:
    if announcement.shapes_sha256 != shapes_sha256(shapes.items()):
        raise InvalidInput("these weights are of another model than the sampler's", "weight_sync")


# --- Sleep ---
# A sampler gives its memory back while a trainer has the device, and takes it again when it is woken.
#
# Asleep it keeps its process, its address and its key; it refuses to draw, and to take other weights.


class Sleep:
    """Moves the weights of a decoder and of its adapters off the device and back. Caches go with their sequences.

    Level 1 keeps a copy of the weights in the host's memory. Level 2, and level 1 if the host's memory is the
    device, drops them: `wake` reads weights from their folders again, others must be sent or loaded anew.
    """

    def __init__(self, decoder: Decoder, models: Models, generator: Generator) -> None:
        self._decoder = decoder
        self._models = models
        self._generator = generator
        self._level: Literal[0, 1, 2] = 0
        self._weights = HostCopy(_whole(decoder.named_weights().values()))
        self._adapters: list[HostCopy] = []
        self._dropped: tuple[LoadedAdapter | None, list[LoadedAdapter]] | None = None

    def sleep(self, body: bytes) -> SamplerMemory:
        """Fall asleep, after the running sequences. A sampler that is asleep sleeps on, at the deeper level."""
        level = parsed(SleepRequest, body or b"{}").level
        self._generator.change(lambda: self._fall_asleep(level))
        return self.memory()

    def wake(self) -> SamplerMemory:
        """Take memory again and serve the same weights, except dropped ones that came from no folder.

        Raises RequestRefused: a folder cannot be read; the sampler sleeps on.
        """
        self._generator.change(self._wake)
        return self.memory()

    def memory(self) -> SamplerMemory:
        """Count the bytes of each part, on the device and in the host's memory."""
        adapters = sum(tensor.nbytes for adapter in self._models.adapters() for _, tensor in adapter.named_tensors())
        return SamplerMemory(
            asleep=self._level,
            weights=PartMemory(device=self._weights.device_bytes, host=self._weights.host_bytes),
            adapters=PartMemory(device=adapters, host=sum(copy.host_bytes for copy in self._adapters)),
            caches=PartMemory(device=self._generator.cache_bytes),
            prompt_tokens_computed=self._generator.prefixes.num_computed,
            prompt_tokens_reused=self._generator.prefixes.num_reused,
        )

    def _fall_asleep(self, level: Literal[1, 2]) -> None:
        if level <= self._level:
            return
        self._models.is_asleep = True
        self._generator.prefixes.forget()
        if level == 1 and self._decoder.device.type != "cpu":
            tensors = [[x for _, x in adapter.named_tensors()] for adapter in self._models.adapters()]
            self._adapters = [HostCopy(of_one) for of_one in tensors if of_one]
            for copy in (self._weights, *self._adapters):
                copy.offload()
        else:
            self._dropped = self._models.drop()
            self._weights.release()
            self._weights.forget()
            self._adapters = []
        self._level = level
        _give_back(self._decoder.device)

    def _wake(self) -> None:
        if self._dropped is not None:
            self._read_again(*self._dropped)
        elif self._level:
            for copy in (self._weights, *self._adapters):
                copy.reload()
        self._level, self._adapters, self._dropped = 0, [], None
        self._models.is_asleep = False

    def _read_again(self, base: LoadedAdapter | None, adapters: list[LoadedAdapter]) -> None:
        self._weights.restore()
        try:
            if base is not None:
                self._decoder.read_weights(Path(base.folder))
            read = [load_adapter(adapter.name, Path(adapter.folder), self._decoder) for adapter in adapters]
            for adapter, again in zip(adapters, read, strict=True):
                again.drawn_by = adapter.drawn_by
        except InvalidInput as error:
            self._weights.release()
            raise RequestRefused(503, f"the sampler cannot wake: {error}") from error
        self._models.restore(base, read if base is not None else [])


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor of each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def _give_back(device: torch.device) -> None:
    """Give freed memory that torch's allocator or the C library still holds back to the device and the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
