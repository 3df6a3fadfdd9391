"""The types that rows of datasets are parsed into, whatever their format: training examples and rollout prompts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as chat templates take it; `weights[i]` is message i's loss weight, 0 unless an assistant's."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    weights: list[float]


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt and what is learned as its answer. `weight`: the example's loss weight, here and below."""

    place: str
    prompt: str
    completion: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A text; every token is trained."""

    place: str
    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An example that was tokenized elsewhere: int64 [T] each; a label of -100 is not learned."""

    place: str
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One prompt with its preferred and its rejected answer, each as a complete example."""

    place: str
    chosen: Chat | PromptCompletion
    rejected: Chat | PromptCompletion


Example = Chat | PromptCompletion | Text | TokenIds | PreferencePair
MASKED_LABEL = -100
"""The label, in TokenIds, of a token that is not learned."""


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation whose last message the model is to answer. `text`: the prompt, if the row has a plain text.

    `had_answer`: the row ended in an answer, which is left out of the messages. `hidden_thoughts`: messages whose
    thoughts the chat template leaves out, once it is rendered.
    """

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    item: dict[str, Any]
    text: str | None = None
    had_answer: bool = False
    hidden_thoughts: int = 0
