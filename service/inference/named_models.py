"""Replaces published names of models and adapters in requests by the URIs that they refer to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from longshore.fields import Frozen
from longshore.losses import Distillation
from longshore.training import Lora, SessionRun
from service.inference.published_models import PublishedModel, PublishedModels
from shared.errors import InvalidInput, NotFound
from shared.grading.graders import Grader, MultiGrader, RewardModelGrader, chosen_scalar
from shared.runs.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from shared.runs.previews import PreviewRequest
from shared.runs.requests import RLRun, Run
from shared.storage.checkpoints import CheckpointName, is_name

R = TypeVar("R", bound=Frozen)
_UNKNOWN = "you have published nothing of this name, and it is no folder, URI or hub id (organisation/name)"
_TWICE = "model names an adapter, which the run goes on from: leave out initial_adapter, or name the base model"


@dataclass(frozen=True)
class StartingPoint:
    """The model and adapter that a name refers to. `lora`: the shape of that adapter."""

    model: str
    initial_adapter: str | None = None
    lora: Lora | None = None


def one_form(text: str) -> str:
    """Return the file URI of a folder path, so that a path and its URI name the same model."""
    is_path = text.startswith("/") and not text.startswith("//")
    text = Path(text).as_uri() if is_path else text
    return f"file:///{text[8:].rstrip('/')}" if text.startswith("file:///") else text


class NamedModels:
    """Looks up names of a tenant's published models. Blocking."""

    def __init__(self, published: PublishedModels) -> None:
        self._published = published

    def starting_point(
        self, tenant: str, model: str, place: str = "model", may_have_head: bool = False
    ) -> StartingPoint:
        """Return the model and adapter that a run on this name starts from. Paths, URIs and hub ids stay unchanged.

        Raises InvalidInput: nothing is published under this name; or it is a reward model, unless it is an adapter and
        may have such a head.
        """
        if not is_name(model):
            return StartingPoint(one_form(model))
        found = self._find(tenant, model, place)
        self._refuse_scalars(tenant, found, place, may_have_head and found.kind != "models")
        artifact = self._published.artifact(tenant, found)
        if found.kind == "models":
            return StartingPoint(artifact.uri)
        run = self._published.record(tenant, found).run
        return StartingPoint(run.model, artifact.uri, run.trainable if isinstance(run.trainable, Lora) else None)

    def resolved(self, tenant: str, request: R, below: str = "") -> R:
        """Return a request with URIs in place of the names of its model, first adapter, reference and teacher.

        If `model` names an adapter, the run starts from it, and takes its shape unless the run sets one.

        `below`: path of the request's fields in the client's request, such as `run.`.

        Raises InvalidInput: nothing is published under a name, or it is of another kind.
        """
        match request:
            case PreviewRequest():
                model = self.starting_point(tenant, request.model_uri, f"{below}model_uri").model
                changes: dict[str, Any] = {"model_uri": model}
            case SFTRun() | DPORun() | DistillRun() | RewardRun() | RLRun() | SessionRun():
                changes = self._changes(tenant, request, below)
            case _:
                return request
        changes = {name: value for name, value in changes.items() if value != getattr(request, name)}
        return request.model_copy(update=changes) if changes else request

    def _changes(self, tenant: str, run: Run, below: str) -> dict[str, Any]:
        may_have_head = isinstance(run, RewardRun | SessionRun)
        start = self.starting_point(tenant, run.model, f"{below}model", may_have_head)
        changes: dict[str, Any] = {"model": start.model}
        if run.initial_adapter is not None:
            if start.initial_adapter is not None:
                raise InvalidInput(_TWICE, f"{below}initial_adapter")
            place = f"{below}initial_adapter"
            changes["initial_adapter"] = self._adapter(tenant, run.initial_adapter, place, may_have_head)
        elif start.initial_adapter is not None:
            if run.trainable.kind == "full":
                rule = "full training starts from a whole model, and this names an adapter: name its base model"
                raise InvalidInput(rule, f"{below}model")
            changes["initial_adapter"] = start.initial_adapter
            if isinstance(run, RewardRun):  # it has its head there, and so always the field
                is_default = run.trainable == Lora(head=run.head)
                if start.lora is not None and start.lora.head != run.head:
                    raise InvalidInput(f"its head is not {run.head}: name the model that it is on", f"{below}model")
            else:
                is_default = "trainable" not in run.model_fields_set
            if is_default and start.lora is not None:
                changes["trainable"] = start.lora
        match run:
            case DPORun(reference=str(reference)) if reference != "base":
                changes["reference"] = self._adapter(tenant, reference, f"{below}reference")
            case DistillRun(teacher=teacher, teachers=more):
                named = {"teacher": teacher} | {f"teachers.{name}": uri for name, uri in more}
                found = [u if u == "base" else self._adapter(tenant, u, f"{below}{at}") for at, u in named.items()]
                changes["teacher"] = found[0]
                changes["teachers"] = tuple(zip(run.named_teachers, found[1:], strict=True))
            case RLRun(loss=Distillation(teacher=str(teacher)) as loss) if teacher != "base":
                adapter = self._adapter(tenant, teacher, f"{below}loss.distillation.teacher")
                changes["loss"] = loss.model_copy(update={"teacher": adapter})
            case RLRun(loss=loss) if not isinstance(loss, Distillation) and (
                (kl := loss.kl) is not None and isinstance(kl.reference, str) and kl.reference != "base"
            ):
                adapter = self._adapter(tenant, kl.reference, f"{below}loss.{loss.kind}.kl.reference")
                changes["loss"] = loss.model_copy(update={"kl": kl.model_copy(update={"reference": adapter})})
        if isinstance(run, RLRun):
            changes["rollouts"] = self.with_rewards(tenant, run, f"{below}rollouts.grader").rollouts
        return changes

    def with_rewards(self, tenant: str, run: RLRun, place: str) -> RLRun:
        """Return a run with URIs in place of the names of the reward models that grade it. Raises as `resolved` does.

        Args:
            place: path of its grader in the request.
        """
        if run.rollouts is None:
            return run
        grader = self._grader(tenant, run.rollouts.grader, place)
        return run.model_copy(update={"rollouts": run.rollouts.model_copy(update={"grader": grader})})

    def _grader(self, tenant: str, grader: Grader, place: str) -> Grader:
        """Return a grader with URIs in place of the names of its reward models, and of the models that they are on."""
        if isinstance(grader, MultiGrader):
            parts = {name: self._grader(tenant, one, f"{place}.graders.{name}") for name, one in grader.graders.items()}
            return grader.model_copy(update={"graders": parts})
        if not isinstance(grader, RewardModelGrader):
            return grader
        base = grader.base and self.starting_point(tenant, grader.base, f"{place}.base").model
        if not is_name(grader.model):
            return grader.model_copy(update={"model": one_form(grader.model), "base": base})
        found = self._find(tenant, grader.model, f"{place}.model")
        head = self._published.head(tenant, found)
        if head is None or found.kind == "models":
            what = "language model" if head is None else "reward model of all weights"
            raise InvalidInput(f"{found.id} is a {what}, and a grader wants a reward model's adapter", f"{place}.model")
        chosen_scalar(grader, head.names, place)
        base = base or self._published.record(tenant, found).run.model
        return grader.model_copy(update={"model": self._published.artifact(tenant, found).uri, "base": base})

    def _adapter(self, tenant: str, text: str, place: str, may_have_head: bool = False) -> str:
        if not is_name(text):
            return one_form(text)
        found = self._find(tenant, text, place)
        if found.kind == "models":
            raise InvalidInput(f"{found.id} is a whole model, and an adapter is wanted", place)
        self._refuse_scalars(tenant, found, place, may_have_head)
        return self._published.artifact(tenant, found).uri

    def _refuse_scalars(self, tenant: str, found: PublishedModel, place: str, may_have_head: bool) -> None:
        head = self._published.head(tenant, found)
        if head is not None and not may_have_head:
            raise InvalidInput(f"{found.id} is a reward model ({head}): it has no head of a language model", place)

    def _find(self, tenant: str, name: str, place: str) -> PublishedModel:
        try:
            return self._published.find(tenant, name)
        except NotFound as error:
            raise InvalidInput(str(error) if CheckpointName.parse(name) else _UNKNOWN, place) from None
