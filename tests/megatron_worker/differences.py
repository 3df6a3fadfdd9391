"""How far results of several ranks are from those of one: notes, checkpoints, gradients; and what rounding allows."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from longshore.training import Layout

GRADIENTS = "gradients.safetensors"


def notes(folder: Path, name: str) -> list[Any]:
    """What each rank noted, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files of a checkpoint."""
    merged: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        merged |= load_file(path)
    assert merged
    return merged


def furthest(folder: Path, other: Path) -> float:
    """The largest difference of any tensor of two checkpoints."""
    ours, theirs = tensors(folder), tensors(other)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def furthest_gradient(path: Path, other: Path) -> float:
    """The largest norm of a tensor's difference, by the tensor's norm."""
    ours, theirs = load_file(path), load_file(other)
    assert set(ours) == set(theirs)
    return max(float((ours[n] - t).norm() / t.norm().clamp(min=1e-7)) for n, t in theirs.items())


def relative(path: Path, other: Path) -> float:
    """The norm of the difference of two gradients, all tensors together, by the other's norm."""
    ours, theirs = load_file(path), load_file(other)
    difference = sum(float((ours[name].double() - t.double()).square().sum()) for name, t in theirs.items())
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in theirs.values()))


def scores_of(noted: list[list[list[float]]], column: int) -> torch.Tensor:
    """Of all bins that a rank noted, one after another: log-probabilities (column 0) or entropies (1)."""
    return torch.tensor([value for batch in noted for value in batch[column]], dtype=torch.float64)


def logprobs(folder: Path) -> torch.Tensor:
    """As rank 0 knows them."""
    return scores_of(notes(folder, "scores")[0], 0)


def from_one_rank(ours: Path, theirs: Path) -> dict[str, float | bool]:
    """What `parallel_ranks.measure` found: the largest differences over ranks, tokens, steps and tensors."""
    expected = torch.tensor(notes(theirs, "history")[0], dtype=torch.float64)
    histories = torch.tensor(notes(ours, "history"), dtype=torch.float64)
    loss, norm = (histories / expected - 1).abs().amax((0, 1)).tolist()
    noted = [path.name for path in theirs.iterdir() if path.name.isdigit()]
    files = [path.relative_to(ours / "end") for path in (ours / "end").rglob("*") if path.is_file()]
    return {
        "logprob": max(furthest_score(ours / step, theirs / step, 0) for step in noted),
        "entropy": max(furthest_score(ours / step, theirs / step, 1) for step in noted),
        "loss": loss,
        "norm": norm,
        "gradient": max(furthest_gradient(ours / step / GRADIENTS, theirs / step / GRADIENTS) for step in noted),
        "weights": furthest(ours / "end" / "weights", theirs / "end" / "weights"),
        "moments": furthest(ours / "end" / "optimizer", theirs / "end" / "optimizer"),
        "resumes": all((ours / "end" / f).read_bytes() == (ours / "again" / f).read_bytes() for f in files),
    }


def furthest_score(ours: Path, theirs: Path, column: int) -> float:
    expected = scores_of(notes(theirs, "scores")[0], column)
    return max(float((scores_of(noted, column) - expected).abs().max()) for noted in notes(ours, "scores"))


def rounding(layout: Layout, ours: Path, one: Path, exact: Path) -> dict[str, float]:
    """bfloat16's errors, of a layout and of one rank: root mean square in nats, and of the gradient, relative."""
    rms = [float((logprobs(folder) - logprobs(exact)).square().mean().sqrt()) for folder in (ours, one)]
    gradient = [relative(folder / GRADIENTS, exact / GRADIENTS) for folder in (ours, one)]
    return {
        "logprob": rms[0],
        "one_rank_logprob": rms[1],
        "gradient": gradient[0],
        "one_rank_gradient": gradient[1],
        "bound": bound(layout, len(logprobs(exact))),
    }


def bound(layout: Layout, num_targets: int) -> float:
    """How many times one rank's error a layout's may be, by how bfloat16 rounds.

    Where one rank rounds a sum once, n ranks round n parts of it, whose errors' variances together are as the sum's,
    and then n - 1 partial sums, none with more than the sum's: at most n times the variance, and only where a sum is
    split, by tp, cp or etp. What ranks of dp, pp and ep bring together was rounded on its own before, or is float32.
    A root mean square of N errors is itself uncertain by a part in sqrt(2 N), the quotient of two by one in sqrt(N):
    three of those on top.
    """
    n = min(layout.tp * layout.cp * layout.etp, layout.world_size)
    return math.sqrt(n) * (1 + 3 / math.sqrt(num_targets))
