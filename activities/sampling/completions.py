"""Requests and results of sampling: which prompts are sampled, their seeds, and files with the samples of each prompt.

Pure functions; the requests to samplers are made in activities/sampling/sample.py.
"""

import base64
import binascii
import hashlib
import io
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, JsonValue, model_validator

from activities.sampling.client import Completion
from activities.tokenizing.render_prompts import PromptRow
from longshore.environments import Course
from longshore.fields import Frozen, added
from longshore.grading import SampledItem
from longshore.views import SourceShare
from shared.chat.completions import MAX_SAMPLES, DrawnBy, Sampling
from shared.errors import InvalidInput
from shared.jobs import bins as packing
from shared.jobs.packed import RouteShape

COMPLETIONS = "completions.jsonl"
_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_SEED_BITS = 62  # seed + j stays below 2**63, the largest that samplers take


class Rows(Frozen):
    """A selection of prompts: `count` of them, from number `first` on, of the epochs' orders one after another.

    Each epoch is a shuffle of all prompts by (seed, epoch); with `sources`, those of a mixture take turns. Without
    `count`: each prompt once, in the data's order, as for held-out prompts.
    """

    first: int = Field(default=0, ge=0, description="counted from the beginning of the first epoch")
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    sources: tuple[SourceShare, ...] = added(())

    @model_validator(mode="after")
    def _all_or_some(self) -> "Rows":
        if self.count is None and (self.first or self.seed):
            raise ValueError("without count all prompts are asked for, in order: first and seed would be ignored")
        return self


class Drawing(Frozen):
    """Options for drawing the samples of each prompt; `policy_version` is written beside them.

    `routes`: the shape of the model's experts; if given, each token's experts are written, too.
    """

    group_size: int = Field(ge=1, le=MAX_SAMPLES, description="samples of each prompt")
    sampling: Sampling
    seed: int = Field(ge=0, lt=2**63)
    policy_version: int = Field(ge=0)
    routes: RouteShape | None = None

    @property
    def route_bytes(self) -> int:
        """The most bytes of a token's experts in an answer; 0 if none are wanted."""
        return sent_bytes(self.routes) if self.routes is not None else 0

    def routes_of(self, completion: Completion, num_prompt: int, place: str) -> bytes:
        """Return the experts of prompt and completion, without the last token's; empty if none are wanted.

        Raises InvalidInput as `read_answer`.
        """
        if self.routes is None:
            return b""
        num_tokens = num_prompt + len(completion.token_ids) - 1
        return read_answer(completion.routed_experts, num_tokens, self.routes, place)

    def weights_of(self, completion: Completion) -> list[DrawnBy]:
        """Return the weights that drew a completion: the policy's version, unless the sampler says another."""
        version = self.policy_version
        return [one if one.policy_version is not None else one.of_version(version) for one in completion.drawn_by]


class SampledTokens(Frozen):
    """Ids behind a prompt: an answer, or the answers of an episode with what the environment said between them.

    `logprobs`: the sampler's, in nats, one for each of `token_ids`; None for those that were not drawn. `finish_reason`
    `length`: the last answer was cut off. `policy_versions`: each id's, if not all are the group's. `routes`: the bytes
    of the ids' experts, without the last one's, or `block`, their place in the file beside.
    """

    model_config = _BYTES
    token_ids: tuple[int, ...] = Field(min_length=1)
    logprobs: tuple[float | None, ...]
    finish_reason: Literal["stop", "length"]
    policy_versions: tuple[int | None, ...] = ()
    routes: bytes = b""
    block: int | None = None


class Branch(SampledTokens):
    """A further sequence of an episode, whose prompt does not begin with the ids before it: the template rewrote them.

    `prompt_routes`, `prompt_block`: as the group's.
    """

    prompt_ids: tuple[int, ...]
    prompt_routes: bytes = b""
    prompt_block: int | None = None


class Sample(SampledTokens):
    """One answer, or one episode. `text`: of the last answer."""

    text: str
    branches: tuple[Branch, ...] = added(())
    course: Course | None = added(None, description="of an episode")

    @property
    def num_drawn(self) -> int:
        """The number of tokens that the policy drew."""
        return sum(logprob is not None for one in (self, *self.branches) for logprob in one.logprobs)


class SampledGroup(Frozen):
    """The samples of one prompt. `group`: its index in the request; `row`: its index among all prompts.

    `place`: the file and line of its row in the dataset, for messages. `source`: the name of its source in a mixture.
    `policy_version`: the oldest that may have drawn them. `drawn_by`: the weights that did, if the sampler says it.
    `prompt_routes`, `prompt_block`: as those of a sample; for all samples, as the sampler reports them for the first.
    """

    model_config = _BYTES
    group: int
    row: int
    place: str
    source: str = added("")
    prompt_ids: tuple[int, ...]
    policy_version: int
    samples: tuple[Sample, ...] = Field(min_length=1)
    drawn_by: tuple[DrawnBy, ...] = ()
    prompt_routes: bytes = b""
    prompt_block: int | None = None

    def encoded(self) -> bytes:
        """Return the group as a line of JSON, without fields at their defaults."""
        return self.model_dump_json(exclude_defaults=True).encode()


def numbers_of(rows: Rows, num_prompts: int) -> list[int]:
    """Return the indices of the selected prompts, in order. Without a mixture a prompt occurs once in each epoch."""
    if rows.count is None:
        return list(range(num_prompts))
    if rows.sources:
        drawn: list[int] = packing.mixture_draws(rows.sources, rows.seed, rows.first, rows.count).tolist()
        return drawn
    places = (divmod(at, num_prompts) for at in range(rows.first, rows.first + rows.count))
    return [_epoch(num_prompts, rows.seed, epoch)[offset] for epoch, offset in places]


@lru_cache(maxsize=2)
def _epoch(num_prompts: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = packing.epoch_order(num_prompts, seed, epoch).tolist()
    return order


def sample_seed(seed: int, *places: int) -> int:
    """Return the seed of a prompt's first sample, by its group's number, 62 bits. Sample j has this seed plus j.

    The seed of a later turn of an episode is by the numbers of group, sample and turn.
    """
    digest = hashlib.sha256(" ".join(["sample", str(seed), *map(str, places)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def sample_of(completion: Completion, place: str, policy_version: int, routes: bytes = b"") -> Sample:
    """Convert a completion to a Sample. Raises InvalidInput if it has no tokens, or not one logprob for each.

    Args:
        policy_version: of tokens whose version the sampler does not say.
        routes: of its tokens.
    """
    if not completion.token_ids or len(completion.logprobs) != len(completion.token_ids):
        raise InvalidInput(
            f"the sampler sent {len(completion.token_ids)} tokens with {len(completion.logprobs)} logprobs", place
        )
    versions = tuple(policy_version if one is None else one for one in completion.policy_versions)
    return Sample(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        text=completion.text,
        finish_reason="length" if completion.was_cut_off else "stop",
        policy_versions=versions if set(versions) - {policy_version} else (),
        routes=routes,
    )


def items_of(group: SampledGroup, prompt: PromptRow) -> Iterator[SampledItem]:
    """The samples as graders see them."""
    for sample in group.samples:
        told: dict[str, JsonValue] = {
            "output_text": sample.text,
            "finish_reason": sample.finish_reason,
            "num_tokens": sample.num_drawn,
        }
        if prompt.source:
            told["source"] = prompt.source
        if sample.course is not None:
            told["episode"] = sample.course.model_dump(mode="json")
        yield SampledItem(sample=told, item=prompt.item)


def read_sampled_groups(folder: Path) -> Iterator[SampledGroup]:
    """The groups of a folder of completions, one at a time."""
    with (folder / COMPLETIONS).open("rb") as file:
        for line in file:
            yield SampledGroup.model_validate_json(line)


# --- Routes of samples, the experts that a sampler chose ---
# Read from its answers, checked, and kept beside the samples.
#
# `routes.bin` consists of blocks: a digest, then the routes of some tokens of a sequence. The digest is of these
# routes and of the sequence's ids up to their last token, so that no sequence is trained with another's routes. A
# prompt's block serves all of its samples. The last token of a sequence has no route: it is not computed, and nothing
# is scored from it.
#
# Shape suffixes: T tokens, L layers with experts, K experts of a token.

ROUTES = "routes.bin"
_DIGEST_BYTES = 8
_ASK = "vLLM sends them with --enable-return-routed-experts; rollouts.routing_replay: off does without"


def sent_bytes(shape: RouteShape) -> int:
    """Return the most bytes of a token's routes in an answer: vLLM's have an entry for each layer."""
    return shape.dtype.itemsize * max(shape.num_layers, len(shape.has_experts)) // shape.num_layers


def read_answer(text: str | None, num_tokens: int, shape: RouteShape, place: str) -> bytes:
    """Return the routes of a sample as they are stored: [T, L, K] in the bytes of `shape.dtype`.

    `text`: a base64-encoded `.npy` file, as vLLM writes `routed_experts`.

    Raises InvalidInput: there are none, or for another number of tokens, or with experts that no token can have.
    """
    if text is None:
        raise InvalidInput(f"the sampler sends no routed_experts, which the trainer is to take ({_ASK})", place)
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        if npy.read_magic(file) != (1, 0):
            raise ValueError("not a .npy file of version 1.0")
        found, is_transposed, dtype = npy.read_array_header_1_0(file)
        if is_transposed or dtype.kind not in "iu":
            raise ValueError(f"{dtype} in Fortran's order")
        route_TLK = np.frombuffer(file.getbuffer()[file.tell() :], dtype).reshape(found)
    except (ValueError, binascii.Error) as error:
        raise InvalidInput(f"the sampler's routed_experts cannot be read: {error}", place) from error
    if route_TLK.shape[1:2] == (len(shape.has_experts),):
        route_TLK = route_TLK[:, list(shape.has_experts)]
    if route_TLK.shape != (expected := (num_tokens, shape.num_layers, shape.per_token)):
        what = "tokens, layers with experts, and experts of a token"
        raise InvalidInput(f"the sampler's routed_experts are {route_TLK.shape}: {what} are {expected}", place)
    if (problem := impossible(route_TLK, shape)) is not None:
        raise InvalidInput(f"the sampler's routed_experts are impossible: {problem}", place)
    return route_TLK.astype(shape.dtype.base).tobytes()


def impossible(route_TLK: NDArray[np.integer], shape: RouteShape) -> str | None:
    """Return the first choice that a model cannot have made; None without one."""
    sorted_TLK = np.sort(route_TLK, axis=-1)
    unknown_TL = (sorted_TLK[..., 0] < 0) | (sorted_TLK[..., -1] >= shape.num_experts)
    twice_TL = (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any(-1)
    bad = np.argwhere(unknown_TL | twice_TL)
    if not len(bad):
        return None
    token, layer = bad[0].tolist()
    rule = f"the model has {shape.num_experts}" if unknown_TL[token, layer] else "one of them is there twice"
    return f"token {token} has the experts {route_TLK[token, layer].tolist()} in layer {layer}, and {rule}"


class RoutesWriter:
    """Writes the file of a folder; none before there is a block to write. Leave its `with` block to close it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROUTES
        self._file: BinaryIO | None = None

    def without_bytes(self, group: SampledGroup) -> SampledGroup:
        """Write the routes of a group's samples. Returns the group with their places in the file instead."""
        if not group.prompt_routes:
            return group
        ids = group.prompt_ids
        return group.model_copy(
            update={
                "prompt_routes": b"",
                "prompt_block": self._append(ids, group.prompt_routes),
                "samples": tuple(self._sample(ids, sample) for sample in group.samples),
            }
        )

    def _sample(self, prompt_ids: tuple[int, ...], sample: Sample) -> Sample:
        block = self._append((*prompt_ids, *sample.token_ids[:-1]), sample.routes)
        branches = tuple(map(self._branch, sample.branches))
        return sample.model_copy(update={"routes": b"", "block": block, "branches": branches})

    def _branch(self, branch: Branch) -> Branch:
        places = {
            "prompt_block": self._append(branch.prompt_ids, branch.prompt_routes),
            "block": self._append((*branch.prompt_ids, *branch.token_ids[:-1]), branch.routes),
        }
        return branch.model_copy(update=places | {"routes": b"", "prompt_routes": b""})

    def _append(self, ids: Sequence[int], routes: bytes) -> int:
        if self._file is None:
            self._file = self._path.open("wb")
        place = self._file.tell()
        self._file.write(_digest(ids, routes) + routes)
        return place

    def __enter__(self) -> "RoutesWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def routes_starts(folders: Sequence[Path]) -> list[int]:
    """Return where each folder's blocks begin when the files are concatenated."""
    sizes = [path.stat().st_size if (path := folder / ROUTES).exists() else 0 for folder in folders]
    return [sum(sizes[:number]) for number in range(len(sizes))]


class RoutesFile:
    """The blocks of folders' files, concatenated."""

    def __init__(self, folders: Sequence[Path], shape: RouteShape) -> None:
        self._shape, self._starts = shape, routes_starts(folders)
        self._files: list[bytes | mmap.mmap] = [_mapped(folder / ROUTES) for folder in folders]

    def of_sequence(self, token_ids: Sequence[int], num_prompt: int, blocks: tuple[int, int]) -> NDArray[np.integer]:
        """Return the routes of a sequence, [T, L, K]. Its last token gets those of the token before it.

        `blocks`: the places of the prompt's block, and of that of the other tokens.

        Raises InvalidInput: a block is of another sequence.
        """
        prompt_TLK = self._block(token_ids[:num_prompt], num_prompt, blocks[0])
        drawn_TLK = self._block(token_ids[:-1], len(token_ids) - 1 - num_prompt, blocks[1])
        computed_TLK = np.concatenate([prompt_TLK, drawn_TLK])
        return np.concatenate([computed_TLK, computed_TLK[-1:]])

    def with_bytes(self, group: SampledGroup) -> SampledGroup:
        """Return a group with its routes' bytes instead of their places: as `RoutesWriter.without_bytes` took it."""
        if group.prompt_block is None:
            return group
        samples = tuple(
            sample.model_copy(
                update=self._bytes_of(group.prompt_ids, sample)
                | {"branches": tuple(map(self._branch_with_bytes, sample.branches))}
            )
            for sample in group.samples
        )
        return group.model_copy(update=self._prompt_bytes(group.prompt_ids, group.prompt_block) | {"samples": samples})

    def _branch_with_bytes(self, branch: Branch) -> Branch:
        prompt = self._prompt_bytes(branch.prompt_ids, branch.prompt_block)
        return branch.model_copy(update=prompt | self._bytes_of(branch.prompt_ids, branch))

    def _prompt_bytes(self, ids: Sequence[int], block: int | None) -> dict[str, Any]:
        assert block is not None
        return {"prompt_block": None, "prompt_routes": self._block(ids, len(ids), block).tobytes()}

    def _bytes_of(self, prompt_ids: Sequence[int], one: SampledTokens) -> dict[str, Any]:
        assert one.block is not None
        computed = (*prompt_ids, *one.token_ids[:-1])
        return {"block": None, "routes": self._block(computed, len(one.token_ids) - 1, one.block).tobytes()}

    def _block(self, ids: Sequence[int], num_tokens: int, place: int) -> NDArray[np.integer]:
        number = bisect_right(self._starts, place) - 1
        file, first = self._files[number], place - self._starts[number]
        start, dtype = first + _DIGEST_BYTES, self._shape.dtype
        routes = file[start : start + num_tokens * dtype.itemsize]
        if file[first:start] != _digest(ids, routes):
            raise InvalidInput("its routes are those of another sequence", ROUTES)
        return np.frombuffer(routes, dtype)


def _mapped(path: Path) -> bytes | mmap.mmap:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _digest(ids: Sequence[int], routes: bytes) -> bytes:
    digest = hashlib.blake2b(np.asarray(ids, dtype="<u4").tobytes(), digest_size=_DIGEST_BYTES)
    digest.update(routes)
    return digest.digest()
