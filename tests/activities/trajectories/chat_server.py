"""A chat server in small, which answers with ids of our choosing, and what of a trajectory was sampled."""

from pathlib import Path
from typing import Any

from activities.tokenizing.tokenizer import TokenizerFiles
from longshore.fields import Artifact
from shared.chat.trajectories import Trajectory
from shared.storage.artifacts import seal

ASKED = [{"role": "system", "content": "You count."}, {"role": "user", "content": "How many sacks are there?"}]
MAX_TOKENS = 500


class Server:
    """Answers as a chat server does, with ids of our choosing; keeps what it was asked and what it sampled."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.artifact = Artifact(uri=folder.as_uri(), sha256=seal(folder))
        self.turns: list[tuple[list[int], list[int]]] = []

    def answer(self, messages: list[dict[str, Any]], text: str, ending: str = "<|im_end|>", **more: Any) -> Any:
        """A choice: the tokens of a text and of its end, with logprobs, as vLLM gives them."""
        asked = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self.ids(text + ending)
        self.turns.append((self.ids(asked), ids))
        content = [self.token(i, -0.1 * k) for k, i in enumerate(ids, 1)]
        message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        return {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": {"content": content, "refusal": None},
            "message": message | more,
        }

    @property
    def files(self) -> TokenizerFiles:
        return TokenizerFiles(folder=self.folder, place=self.artifact.uri)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def sampled_ids(one: Trajectory) -> list[int]:
    return [i for i, is_sampled in zip(one.token_ids, one.sampled, strict=True) if is_sampled]
