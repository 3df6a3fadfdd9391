"""Opens and checks a job's data before any step."""

from contextlib import ExitStack

from megatron_worker.losses import check_columns
from megatron_worker.process.staging import Folders
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.evaluation import Evaluator, held_out_loss, read_prompts
from shared.errors import InvalidInput
from shared.jobs.job import JobPlan, PackedData


def open_data(plan: JobPlan, folders: Folders, open_files: ExitStack) -> tuple[PackedBatches, Evaluator]:
    """Open training and held-out data, until `open_files` is closed.

    Raises:
        InvalidInput: it has too few steps, lacks a column that the loss needs, or is damaged.
    """

    def open_packed(data: PackedData) -> PackedBatches:
        return open_files.enter_context(PackedBatches.open(folders[data.units], folders[data.plan]))

    training, held_out, loss = open_packed(plan.data), plan.evaluation.data, held_out_loss(plan.loss)
    check_columns(training.units, plan.loss)
    if plan.num_steps > training.num_steps:
        raise InvalidInput(f"the job has {plan.num_steps} steps, its data {training.num_steps}", "num_steps")
    if held_out is None:
        return training, Evaluator(plan.evaluation, None, [], folders[plan.model], loss)
    evaluated, prompts = open_packed(held_out), read_prompts(folders[held_out.units])
    check_columns(evaluated.units, loss)
    return training, Evaluator(plan.evaluation, evaluated, prompts, folders[plan.model], loss)


def check_probe(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidInput, which names the place, where the model has no such token."""
    for place, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidInput(f"token {token_id} is outside the vocabulary of {vocab_size}", f"probe[{place}]")
