"""Requests and results of sampling: which prompts are sampled, their seeds, and files with the samples of each prompt.

Pure functions; the requests to samplers are made in activities/sampling/sample.py.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from activities.sampling.client import Completion
from activities.tokenizing.render_prompts import PromptRow
from longshore.fields import Frozen
from shared.chat.completions import DrawnBy
from shared.errors import InvalidInput
from shared.grading.graders import SampledItem
from shared.jobs import bins as packing

COMPLETIONS, SAMPLES = "completions.jsonl", "samples.jsonl"
_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_SEED_BITS = 62  # seed + j stays below 2**63, the largest that samplers take


class Rows(Frozen):
    """A selection of prompts: `count` of them, from number `first` on, of the epochs' orders one after another.

    Each epoch is a shuffle of all prompts by (seed, epoch). Without `count`: each prompt once, in the data's order, as
    for held-out prompts.
    """

    first: int = Field(default=0, ge=0, description="counted from the beginning of the first epoch")
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _all_or_some(self) -> "Rows":
        if self.count is None and (self.first or self.seed):
            raise ValueError("without count all prompts are asked for, in order: first and seed would be ignored")
        return self


class Sample(Frozen):
    """One answer. `logprobs`: the sampler's, in nats, one for each of `token_ids`. `length`: it was cut off.

    `policy_versions`: each token's, if not all are the group's. `routes`: the bytes of its tokens' experts, without the
    last token's (activities/sampling/routes.py), or `block`, their place in the file beside.
    """

    model_config = _BYTES
    token_ids: tuple[int, ...] = Field(min_length=1)
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    policy_versions: tuple[int, ...] = ()
    routes: bytes = b""
    block: int | None = None


class SampledGroup(Frozen):
    """The samples of one prompt. `group`: its index in the request; `row`: its index among all prompts.

    `place`: the file and line of its row in the dataset, for messages. `policy_version`: the oldest that may have drawn
    them. `drawn_by`: the weights that did, if the sampler says it. `prompt_routes`, `prompt_block`: as those of a
    sample; for all samples, as the sampler reports them for the first.
    """

    model_config = _BYTES
    group: int
    row: int
    place: str
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
    """Return the indices of the selected prompts, in order. A prompt occurs once in each epoch."""
    if rows.count is None:
        return list(range(num_prompts))
    places = (divmod(at, num_prompts) for at in range(rows.first, rows.first + rows.count))
    return [_epoch(num_prompts, rows.seed, epoch)[offset] for epoch, offset in places]


@lru_cache(maxsize=2)
def _epoch(num_prompts: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = packing.epoch_order(num_prompts, seed, epoch).tolist()
    return order


def sample_seed(seed: int, group: int) -> int:
    """Return the seed of a prompt's first sample, 62 bits. Sample j has this seed plus j."""
    digest = hashlib.sha256(f"sample {seed} {group}".encode()).digest()
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
        told = {"output_text": sample.text, "finish_reason": sample.finish_reason, "num_tokens": len(sample.token_ids)}
        yield SampledItem(sample=told, item=prompt.item)


def read_sampled_groups(folder: Path) -> Iterator[SampledGroup]:
    """The groups of a folder of completions, one at a time."""
    with (folder / COMPLETIONS).open("rb") as file:
        for line in file:
            yield SampledGroup.model_validate_json(line)
