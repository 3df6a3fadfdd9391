"""Adapters on a sampler: a run's newest is loaded under a name that says what is in it, its old ones are unloaded."""

import re
from pathlib import Path

from activities.sampling.client import Sampler
from activities.sampling.samplers import OpenSampler
from shared.contract import Artifact
from shared.errors import InvalidInput, SamplerUnavailable
from shared.settings import S3Settings
from shared.storage.artifacts import stage

_DIGITS = 16


def adapter_name(run_id: str, adapter: Artifact) -> str:
    """What requests call an adapter. By content: the same name never means other weights."""
    return f"{run_id}-{adapter.sha256[:_DIGITS]}"


def use_adapter(
    opened: OpenSampler,
    run_id: str,
    adapter: Artifact | None,
    keep: tuple[Artifact, ...],
    cache: Path,
    s3: S3Settings,
) -> str:
    """Make a sampler serve an adapter of a run, or its model alone, and return the name to ask for.

    This run's adapters that are neither it nor in `keep` are unloaded; other runs' stay. The adapter's files are given
    to the sampler as a folder of this machine, so a served sampler must see the host's disk.

    Raises:
        InvalidInput: the sampler refuses the adapter. CorruptArtifact: its files are not what they were.
        SamplerUnavailable: the sampler does not answer.
    """
    sampler = opened.client
    wanted = {adapter_name(run_id, one) for one in (adapter, *keep) if one is not None}
    present = set(sampler.models())
    for name in sorted(present - wanted):
        if re.fullmatch(rf"{re.escape(run_id)}-[0-9a-f]{{{_DIGITS}}}", name):
            sampler.unload_adapter(name)
    if adapter is None:
        return opened.model
    if (name := adapter_name(run_id, adapter)) not in present:
        sampler.load_adapter(name, str(stage(adapter, cache, s3)))
    return name


def refusal(sampler: Sampler, model: str, error: InvalidInput, place: str) -> InvalidInput | SamplerUnavailable:
    """What to raise for a refused request: a server that was started anew knows no adapter, and will be asked again."""
    if model in sampler.models():
        return InvalidInput(error.message, place)
    return SamplerUnavailable(f"the sampler serves {model} no longer: {error.message}")
