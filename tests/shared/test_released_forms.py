"""Files of the store as the last release writes them are read: jobs, events, records, states, commands. And the last
release reads what this code writes, as long as nobody asks for what is new.

`python -m tests.shared.releases` keeps what these tests compare with, when a release is made (CONTRIBUTING.md).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from activities.grading.grade import GradeSummary
from activities.hosts.lease import LeaseRecord
from activities.publishing.publish import Claim
from activities.records import _Start
from activities.sampling.completions import SampledGroup
from activities.sampling.sample import SampledSummary
from activities.tokenizing.render_prompts import PromptsReport
from activities.trajectories.group_samples import GroupsMade
from longshore.commands import CommandResult
from longshore.events import parse_event
from longshore.fields import Frozen, added
from longshore.grading import SampleGrade
from longshore.runs import RunRecord
from longshore.views import PlanHeader, RunStatus, StepStatus
from megatron_worker.training.checkpoint import CheckpointState
from shared.chat.trajectories import AnswerRecord
from shared.jobs.commands import read_command
from shared.jobs.job import Job
from shared.jobs.packed import UnitsHeader
from shared.storage.artifacts import Manifest
from shared.storage.host_states import HostAddress
from tests.shared.releases import exchanged

FIELDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("released_fields.json").read_text())
FILES: dict[str, str] = json.loads(Path(__file__).with_name("released_files.json").read_text())
Read = Callable[[bytes], object]


def lines_of(read: Read) -> Read:
    return lambda data: [read(line) for line in data.splitlines()]


READERS: dict[str, Read] = {
    r"/run\.json": RunRecord.model_validate_json,
    r"/(previous_)?result\.json": RunStatus.model_validate_json,
    r"/job\.json": Job.model_validate_json,
    r"/(log|N)\.jsonl": lines_of(parse_event),
    r"/state\.json": CheckpointState.model_validate_json,
    r"/manifest\.json|/began_with/\w+\.json": Manifest.model_validate_json,
    r"/(steps/N|step_keys/HASH)\.json": StepStatus.model_validate_json,
    r"/commands/N\.json": read_command,
    r"/results/N\.json": CommandResult.model_validate_json,
    r"/leases/eN-a01\.json": LeaseRecord.model_validate_json,
    r"/starts/HASH\.json": _Start.model_validate_json,
    r"session-ID/host\.json": HostAddress.model_validate_json,
    r"/claims/vN\.json": Claim.model_validate_json,
    r"answers/.*\.json": AnswerRecord.model_validate_json,
    r"packed/HASH/plan\.json": PlanHeader.model_validate_json,
    r"tokenized/HASH/units\.json": UnitsHeader.model_validate_json,
    r"graded/HASH/summary\.json": GradeSummary.model_validate_json,
    r"graded/HASH/grades\.jsonl": lines_of(SampleGrade.model_validate_json),
    r"sampled/HASH/completions/completions\.jsonl": lines_of(SampledGroup.model_validate_json),
    r"sampled/HASH/completions/summary\.json": SampledSummary.model_validate_json,
    r"grouped/HASH/report\.json": GroupsMade.model_validate_json,
    r"prompts/HASH/report\.json": PromptsReport.model_validate_json,
}


@pytest.mark.parametrize("kind", FILES)
def test_what_the_last_release_writes_is_read(kind: str) -> None:
    [read] = [reader for pattern, reader in READERS.items() if re.search(f"{pattern}($| )", kind)]
    assert read(FILES[kind].encode("latin-1"))


def test_each_kind_of_file_is_there() -> None:
    """So that no pattern reads nothing."""
    for pattern in READERS:
        assert any(re.search(f"{pattern}($| )", kind) for kind in FILES), pattern


def test_a_field_that_is_new_is_left_out_where_it_has_its_default() -> None:
    """Otherwise no host of the last release could continue a run of this one, when an installation goes back."""
    known = {name: models for name, models in exchanged().items() if name in FIELDS}
    assert len(known) > len(FIELDS) / 2, "models were renamed: keep their fields anew"
    for name, models in known.items():
        for model in models:
            for each in model.model_fields.keys() - set(FIELDS[name]):
                field, told = model.model_fields[each], f"{name}.{each} is new: use longshore.fields.added"
                assert not field.is_required() and field.exclude_if is not None, told
                assert field.exclude_if(field.get_default(call_default_factory=True)), told


def test_the_last_release_reads_what_has_no_part_in_what_is_new() -> None:
    class Before(Frozen):
        steps: int

    class After(Before):
        nodes: int = added(1, ge=1)

    assert Before.model_validate_json(After(steps=3).model_dump_json()) == Before(steps=3)
    assert After.model_validate_json('{"steps":3}') == After(steps=3, nodes=1)
    with pytest.raises(ValidationError, match="nodes"):
        Before.model_validate_json(After(steps=3, nodes=2).model_dump_json())
