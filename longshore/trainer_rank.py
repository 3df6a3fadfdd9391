"""TrainerRank for training code of your own (docs/trainer_rank.md): `pip install longshore[worker]`.

A process that imports this has Longshore's packages `shared` and `megatron_worker`, and no others of these names.
"""

from longshore.server import importable

with importable("shared", "megatron_worker"):
    from megatron_worker.trainer_rank import *  # noqa: F403 (what that package names in `__all__`)
