"""The tokens with which a model's answers end: those that its files name, and those that training puts there.

A base model's files name the end of a text, and its chat template ends turns with another token: that is what it is
trained to end its answers with.
"""

from functools import lru_cache
from typing import TypeVar

from activities.host_context import HostContext
from activities.tokenizing.template_process import TemplateProcess
from activities.tokenizing.tokenizer import TokenizerFiles, tokenizer_files
from longshore.fields import Artifact
from shared.chat.completions import CompletionRequest, Sampling
from shared.errors import InvalidInput
from shared.models.end_tokens import GENERATION, read_end_ids
from shared.serving import SamplerPlace, ServedSampler

AskedT = TypeVar("AskedT", Sampling, CompletionRequest)
_KEPT = 256  # models whose end tokens a host remembers


def end_ids_of(host: HostContext, model: Artifact) -> tuple[int, ...]:
    """Return the ids that end a model's answers. Raises CorruptArtifact where its files have changed."""
    named = read_end_ids(host.stage(model, only=(GENERATION, "config.json")))
    return tuple(dict.fromkeys([*named, *_trained(host, model)]))


def stops_of(place: SamplerPlace, host: HostContext, model: Artifact) -> tuple[int, ...]:
    """Return the stop tokens that a sampler must be asked for. One that we start knows the model's end tokens."""
    return end_ids_of(host, model) if isinstance(place, ServedSampler) else ()


def stopping_at(asked: AskedT, end_ids: tuple[int, ...]) -> AskedT:
    """Return a request with more stop tokens, unless it is to go on behind the model's own end."""
    if asked.ignore_eos or not end_ids:
        return asked
    return asked.model_copy(update={"stop_token_ids": [*dict.fromkeys([*(asked.stop_token_ids or ()), *end_ids])]})


@lru_cache(maxsize=_KEPT)
def _trained(host: HostContext, model: Artifact) -> tuple[int, ...]:
    """Return the ids that training puts at the ends of answers; none without a tokenizer or template to learn from."""
    try:
        return host.confined(trained_end_ids, tokenizer_files(host, model))
    except InvalidInput:  # such a model answers too: with texts, or to token ids
        return ()


def trained_end_ids(files: TokenizerFiles) -> tuple[int, ...]:
    """Load a tokenizer and its template in a confined process. Raises InvalidInput where they cannot be used."""
    tokenizer = files.load()
    if tokenizer.template is None:
        return tokenizer.end_ids()
    with TemplateProcess(tokenizer.template, tokenizer.place) as process:
        return tokenizer.end_ids(process.stops)
