"""Supervised fine-tuning, written out: chats in, an adapter or a model out. One process, or as many as torchrun starts.

python -m examples.trainer_rank_sft MODEL CHATS.jsonl ADAPTER [--steps 30] [--full]
torchrun --nproc_per_node 2 -m examples.trainer_rank_sft ...
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from longshore.trainer_rank import ForwardInput, TrainerRank, start
from longshore.training import Adam, Lora


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("chats", type=Path, help='lines of {"messages": [...]}, the last of each the answer')
    parser.add_argument("adapter", type=Path, help="folder to write")
    parser.add_argument("--full", action="store_true", help="train every weight, and write a model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    options = parser.parse_args(arguments)

    rank = start(options.model)
    if options.full:
        rank.train_base()
    else:
        rank.create_adapter("answers", Lora(rank=8, alpha=16), seed=0)
    examples = read_examples(options.model, options.chats)
    for number, batch in enumerate(batches(examples, options.batch_size, options.steps)):
        loss = train_step(rank, batch, options.learning_rate)
        if rank.facts.rank == 0:
            print(json.dumps({"step": number + 1, "loss": loss}), flush=True)
    rank.export(rank.active_adapter, options.adapter)


def read_examples(model: Path, chats: Path) -> list[ForwardInput]:
    """Score only the positions of a chat that predict its answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    examples = []
    for line in chats.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        asked = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert text.startswith(asked)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        answer = [position for position in range(len(ends) - 1) if ends[position + 1] > len(asked)]
        examples.append(ForwardInput(encoded["input_ids"], positions=answer, target_logprobs=True))
    return examples


def batches(examples: Sequence[ForwardInput], size: int, steps: int) -> Iterator[list[ForwardInput]]:
    """Shuffle in every epoch, in the same order on every rank."""
    order: list[int] = []
    generator = random.Random(0)
    for _ in range(steps):
        if len(order) < size:
            order += generator.sample(range(len(examples)), len(examples))
        yield [examples[place] for place in order[:size]]
        order = order[size:]


def train_step(rank: TrainerRank, batch: Sequence[ForwardInput], learning_rate: float) -> float:
    """The mean negative log-likelihood of a token; all ranks go by the same sums."""
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for micro_batch in rank.forward_micro_batches(batch):
        loss = torch.zeros((), device=rank.facts.device)
        for output in micro_batch.outputs:
            loss = loss - output.target_logprob_P.sum()
            count += len(output.target_logprob_P)
        rank.backward(loss)
        total += loss.detach().cpu()
    sums = rank.reduce({"loss": total, "tokens": count})
    rank.optim_step(Adam(), learning_rate, denominator=sums["tokens"])
    return sums["loss"] / sums["tokens"]


if __name__ == "__main__":
    main()
