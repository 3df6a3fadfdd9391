"""The values of a sweep's next trial: by Optuna's samplers, in a study that is rebuilt from the recorded trials."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from service.automation.sweep_views import Trial
from shared.automation.sweeps import Space, Sweep, Values, grid_values
from shared.storage.paths import content_key

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def may_start(sweep: Sweep, trials: Sequence[Trial]) -> bool:
    """True if the trial after these may begin: there is room, and those that its sampler is to know have ended."""
    has_room = sum(not trial.has_ended for trial in trials) < sweep.parallel
    is_known = sweep.sampler != "tpe" or all(trial.has_ended for trial in trials[: _num_known(sweep, len(trials))])
    return len(trials) < sweep.num_trials and has_room and is_known


def next_values(sweep: Sweep, trials: Sequence[Trial], attempt: int = 0) -> Values:
    """Return the values of the next trial. They depend on the trials alone, not on the time of the call.

    `attempt`: counts values that did not fit together.

    TPE sees the results of trials at least `parallel` before the next one, which have always ended; of later ones,
    which may or may not have ended, it sees the values. Blocking.
    """
    if sweep.sampler == "grid":
        return grid_values(sweep, len(trials))
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = int(content_key(f"{sweep.seed} {len(trials)} {attempt}")[:8], 16)
    samplers = optuna.samplers
    sampler = samplers.RandomSampler(seed) if sweep.sampler == "random" else samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, direction="maximize" if sweep.maximizes else "minimize")
    spaces = {path: _distribution(space) for path, space in sweep.parameters.items()}
    if sweep.sampler == "tpe":
        num_known = _num_known(sweep, len(trials))
        told = (_told(sweep, trial, spaces, trial.number < num_known) for trial in trials)
        study.add_trials([each for each in told if each is not None])
    drawn = study.ask(spaces).params
    return {path: _value(space, drawn[path]) for path, space in sweep.parameters.items()}


def _num_known(sweep: Sweep, number: int) -> int:
    return max(0, number - sweep.parallel + 1)


def _told(sweep: Sweep, trial: Trial, spaces: "dict[str, BaseDistribution]", is_known: bool) -> "FrozenTrial | None":
    """Return an Optuna trial; None if it has no information: it failed, or reported no number."""
    from optuna.trial import TrialState, create_trial

    value, state = trial.value(sweep.measured), TrialState.RUNNING
    if is_known and value is None:
        return None
    given: dict[str, Any] = {}
    if is_known and trial.pruned_by is not None:
        state, given = TrialState.PRUNED, {"intermediate_values": {trial.pruned_by.step: value}}
    elif is_known and trial.run.status.state == "succeeded":
        state, given = TrialState.COMPLETE, {"value": value}
    elif is_known:
        return None
    params = {path: _param(sweep.parameters[path], value) for path, value in trial.values.items()}
    return create_trial(state=state, params=params, distributions=spaces, **given)


def _distribution(space: Space) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices is not None:
        return CategoricalDistribution(range(len(space.choices)))  # by index: a choice may be a list or an object
    low, high = space.ends
    return (IntDistribution if space.integer else FloatDistribution)(low, high, log=space.log)  # type: ignore[arg-type]


def _value(space: Space, param: Any) -> Any:
    return param if space.choices is None else space.choices[param]


def _param(space: Space, value: Any) -> Any:
    return value if space.choices is None else [*map(json.dumps, space.choices)].index(json.dumps(value))
