"""What ART's clients send, and a model that they send it for."""

from typing import Any

from service.inference.art_models import ArtModel, ArtSettings, new_model

QUESTION = {"role": "user", "content": "How many crates?"}
CHOICE = {"finish_reason": "stop", "index": 0, "logprobs": {"content": []}, "message": {"role": "assistant"}}


def model(**settings: Any) -> ArtModel:
    return new_model("acme", "dock", "Harbour", "Quay Clerk", "tiny/model", ArtSettings(**settings), "float32")


def group(**changes: Any) -> dict[str, Any]:
    """As the client's `model_dump` writes it."""
    trajectory = {
        "messages_and_choices": [QUESTION, CHOICE],
        "tools": None,
        "additional_histories": [],
        "reward": 1.0,
        "initial_policy_version": 7,
        "final_policy_version": None,
        "metrics": {"is_short": True},
        "metadata": {"quay": 3},
        "logs": ["asked"],
    }
    whole = {"trajectories": [trajectory], "exceptions": [], "metadata": {}, "metrics": {"tries": 2}, "logs": ["done"]}
    return whole | changes
