"""GRPO, written out: sample groups, grade them, learn from what was better than its group (arXiv:2402.03300).

The task needs no data: answer with odd token ids. The sampler is the trainer itself, a token a forward.

    python -m examples.trainer_rank_grpo MODEL [--steps 20]
    torchrun --nproc_per_node 2 -m examples.trainer_rank_grpo ...
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longshore.trainer_rank import ForwardInput, ForwardOutput, TrainerRank, start
from longshore.training import Adam, Lora

PROMPTS = [[5, 6, 7, 8], [30, 31, 32]]
COMPLETION_TOKENS = 3
CLIP = 0.2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-2)
    options = parser.parse_args(arguments)

    rank = start(options.model)
    rank.create_adapter("policy", Lora(rank=8, alpha=16), seed=0)
    generator = torch.Generator().manual_seed(0)  # the same on every rank, so that all know all groups
    for step in range(options.steps):
        groups = [[list(prompt) for _ in range(options.group_size)] for prompt in PROMPTS]
        old = sample(rank, [ids for group in groups for ids in group], generator)
        rewards_GS = torch.tensor([[reward(ids[-COMPLETION_TOKENS:]) for ids in group] for group in groups])
        deviation_G1 = rewards_GS.std(dim=1, keepdim=True)
        advantages_GS = (rewards_GS - rewards_GS.mean(dim=1, keepdim=True)) / (deviation_G1 + 1e-6)
        train_step(rank, groups, old.view(*rewards_GS.shape, -1), advantages_GS, options.learning_rate)
        if rank.facts.rank == 0:
            print(json.dumps({"step": step + 1, "reward": float(rewards_GS.mean())}), flush=True)


def sample(rank: TrainerRank, sequences: list[list[int]], generator: torch.Generator) -> Tensor:
    """Continue every sequence in place. Returns log-probabilities of the drawn tokens, [sequences, tokens]."""
    drawn_TS = []
    for _ in range(COMPLETION_TOKENS):
        inputs = [ForwardInput(ids, positions=[len(ids) - 1], logits=True) for ids in sequences]
        with torch.no_grad():
            outputs = rank.forward(inputs)
        logits_SV = torch.cat([output.logit_PV for output in outputs]).cpu()
        logprobs_SV = logits_SV.log_softmax(dim=-1)
        chosen_S1 = torch.multinomial(logprobs_SV.exp(), 1, generator=generator)
        drawn_TS.append(logprobs_SV.gather(1, chosen_S1)[:, 0])
        for ids, chosen in zip(sequences, chosen_S1[:, 0].tolist(), strict=True):
            ids.append(chosen)
    return torch.stack(drawn_TS, dim=1)


def reward(completion: Sequence[int]) -> float:
    return sum(token % 2 for token in completion) / len(completion)


def train_step(
    rank: TrainerRank, groups: list[list[list[int]]], old_GST: Tensor, advantages_GS: Tensor, learning_rate: float
) -> None:
    """One update from groups, each an item whose prompt is computed once."""

    def asked(ids: list[int]) -> ForwardInput:
        positions = range(len(ids) - COMPLETION_TOKENS - 1, len(ids) - 1)
        return ForwardInput(ids, positions=positions, target_logprobs=True)

    for micro_batch in rank.forward_micro_batches([[asked(ids) for ids in group] for group in groups]):
        loss = torch.zeros((), device=rank.facts.device)
        taught = micro_batch.select(list(zip(old_GST, advantages_GS, strict=True)))
        for outputs, (old_ST, advantages_S) in zip(micro_batch.outputs, taught, strict=True):
            for output, old_T, advantage in zip(outputs, old_ST, advantages_S, strict=True):
                loss = loss + clipped_loss(output, old_T.to(loss.device), float(advantage))
        rank.backward(loss)
    rank.optim_step(Adam(), learning_rate, denominator=float(advantages_GS.numel() * COMPLETION_TOKENS))


def clipped_loss(output: ForwardOutput, old_T: Tensor, advantage: float) -> Tensor:
    ratio_T = (output.target_logprob_P - old_T).exp()
    return -torch.minimum(ratio_T * advantage, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()


if __name__ == "__main__":
    main()
