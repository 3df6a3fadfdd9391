"""Decides if an installation accepts a run, and chooses its precision."""

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from longshore.dataset_runs import DistillRun, DPORun, GradedSamples, RewardRun, SFTRun, TrainedRun
from longshore.grading import GRADER_TYPES, Grader, RewardModelGrader, reward_graders
from longshore.losses import Distillation, reference_uri
from longshore.runs import Precision, RLRun, Rollouts, Run
from longshore.training import DtypeChoice, Lora
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.jobs.job import check_nodes, check_ranks
from shared.models.peft import not_in_vllm
from shared.settings import Settings
from shared.storage.host_states import read_fast_bf16, read_offer
from shared.storage.store import ObjectStore

_VLLM_MAX_RANK = 512
_SERVED = "this installation's sampler is a server behind a URL"
_ITSELF = "the student begins as the base itself: name an initial_adapter, or another teacher"


def check_startable(run: Run, settings: Settings, below: str = "") -> None:
    """Refuse runs that no host could start, data-parallel ranks without work, and features that a sampling server
    behind a URL lacks: full training, several samplers, sleep, or a host's own vLLM.

    Args:
        below: the prefix of the run's fields in the request, such as `run.`.

    Raises:
        InvalidInput: names the field and the rule.
    """
    check_ranks(run.layout, settings.max_ranks, below)
    check_nodes(run.layout, settings.max_hosts, below)
    match run:
        case DistillRun(teacher="base", initial_adapter=None, teachers=()):
            raise InvalidInput(_ITSELF, f"{below}teacher")
        case RLRun(initial_adapter=None, loss=Distillation(teacher="base")):
            raise InvalidInput(_ITSELF, f"{below}loss.distillation.teacher")
        case RLRun(initial_adapter=None, advantages="none", loss=loss) if (
            reference_uri(loss) is None
        ):  # it learns only by its kl
            raise InvalidInput(_ITSELF, f"{below}loss.{loss.kind}.kl.reference")
        case SFTRun() | DPORun() | DistillRun() | RewardRun():
            if run.rollouts is not None:
                _check_samplers(run, run.rollouts, settings, below)
            if run.batch_size is None:
                return
            examples = run.batch_size
            examples_named = f"batch_size {examples}"
        case RLRun(rollouts=Rollouts() as rollouts):
            _check_samplers(run, rollouts, settings, below)
            if rollouts.colocate and settings.sampling.url is not None:
                raise InvalidInput(f"{_SERVED}, which does not sleep", f"{below}rollouts.colocate")
            if rollouts.weight_sync.in_flight == "continue" and settings.sampling.url is not None:
                rule = f"{_SERVED}: samples end on the weights they began on"
                raise InvalidInput(rule, f"{below}rollouts.weight_sync.in_flight")
            backend, is_served = rollouts.weight_sync.backend, rollouts.sampler_url or settings.sampling.url
            if backend not in ("auto", "store") and is_served is not None:
                rule = f"a sampler behind a URL loads weights from the store: {backend} needs one that a host leases"
                raise InvalidInput(f"{rule}; possible are auto and store", f"{below}rollouts.weight_sync.backend")
            examples = rollouts.prompts_per_step * rollouts.group_size
            examples_named = f"the {examples} samples of a step"
        case _:
            return
    if run.layout.dp > examples:
        rule = f"dp={run.layout.dp} ranks would share out {examples_named}: dp may be {examples} at most"
        raise InvalidInput(rule, f"{below}layout.dp")


def check_offered(run: Run, settings: Settings, store: ObjectStore, below: str = "") -> None:
    """Refuse a run with more ranks than any running GPU host takes. If none is running, only the setting counts,
    because hosts yet to be started have reported nothing.

    Raises InvalidInput: names the field, and both numbers.
    """
    if (offer := read_offer(store, settings.shape)) is not None:
        check_ranks(run.layout, offer.max_ranks, below, f"(its GPU hosts of shape {settings.shape} that are up)")


def _check_samplers(run: TrainedRun, rollouts: GradedSamples, settings: Settings, below: str) -> None:
    """Refuse samplers that this installation cannot give to a run. Raises InvalidInput."""
    is_served = settings.sampling.url is not None
    if run.trainable.kind == "full" and is_served:
        raise InvalidInput(f"{_SERVED}, which does not take whole weights: train a lora", f"{below}trainable")
    if rollouts.samplers > 1 and is_served:
        raise InvalidInput(f"{_SERVED}: samplers may be 1 at most", f"{below}rollouts.samplers")
    if reward_graders(rollouts.grader) and (rollouts.sampler_url is not None or is_served):
        rule = "reward models are scored on a sampler that a host leases, and here one is a server behind a URL"
        raise InvalidInput(rule, f"{below}rollouts.grader")
    if rollouts.sampler == "vllm" and (reason := _why_not_vllm(run, rollouts, settings)):
        raise InvalidInput(reason, f"{below}rollouts.sampler")


def _why_not_vllm(run: TrainedRun, rollouts: GradedSamples, settings: Settings) -> str | None:
    """Return why no host starts a vLLM for a run, if none does."""
    if rollouts.sampler_url is not None:
        return "vllm is started by a sampler host: drop it, or sampler_url"
    if settings.sampling.url is not None:
        return "this installation's sampler is a server behind a URL, and no host starts another: leave it out"
    if isinstance(run.trainable, Lora) and run.trainable.max_rank > _VLLM_MAX_RANK:
        return f"vllm serves adapters of a rank up to {_VLLM_MAX_RANK}: lower trainable.rank"
    if isinstance(run.trainable, Lora) and (rule := not_in_vllm(run.trainable)):
        return rule
    if isinstance(rollouts, Rollouts) and rollouts.colocate:
        return "vllm for CPUs does not sleep, and its sleep on GPUs was not tried: drop colocate, or sample with own"
    if isinstance(rollouts, Rollouts) and rollouts.weight_sync.backend not in ("auto", "store"):
        return "vllm loads from the store: weight_sync.backend may be auto or store"
    return None


def precision_of(asked: DtypeChoice, settings: Settings, store: ObjectStore) -> Precision:
    """Return the precision of a run that is accepted now: its own choice, else by the reports of the GPU hosts."""
    if asked == "auto" and settings.dtype != "auto":
        return Precision(dtype=settings.dtype, reason="it is this installation's LONGSHORE_DTYPE")
    is_fast = read_fast_bf16(store, settings.shape)
    if asked == "auto" and is_fast:
        return Precision(dtype="bfloat16", reason="it is fast on the GPU hosts")
    if asked == "auto":
        slow, unknown = "bfloat16 is slow on the GPU hosts", "no GPU host has said yet whether bfloat16 is fast there"
        return Precision(dtype="float32", reason=unknown if is_fast is None else slow)
    notice = None
    if asked == "bfloat16" and is_fast is False:
        notice = "bfloat16 is slow on the GPU hosts: on CPUs it takes up to 100 times as long as float32"
    if asked == "float32" and is_fast:
        notice = "bfloat16 is fast on the GPU hosts, and takes half of the memory for weights: float32 was asked for"
    return Precision(dtype=asked, notice=notice)


_GRADERS: TypeAdapter[Any] = TypeAdapter(Grader)


def parse_grader(fields: JsonValue) -> Grader:
    """Parse a grader that a user sent.

    Raises:
        InvalidInput: names the first wrong field, and the rule that it breaks.
    """
    try:
        grader: Grader = _GRADERS.validate_python(fields)
    except ValidationError as error:
        field, rule = first_error(error, GRADER_TYPES)
        raise InvalidInput(rule, f"grader.{field}".rstrip(".")) from error
    return grader


def chosen_scalar(grader: RewardModelGrader, names: Sequence[str], place: str = "grader") -> int:
    """Return the number of the scalar that grades. Raises InvalidInput if the reward model lacks it, or has several and
    none is named.
    """
    if grader.scalar is None and len(names) > 1:
        raise InvalidInput(f"the reward model gives {', '.join(names)}: say which as scalar", f"{place}.scalar")
    if grader.scalar is not None and grader.scalar not in names:
        raise InvalidInput(f"the reward model has no {grader.scalar!r}: it gives {', '.join(names)}", f"{place}.scalar")
    return 0 if grader.scalar is None else names.index(grader.scalar)
