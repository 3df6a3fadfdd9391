"""What tests of the worker share: a model and adapters that none of them changes, and the table of engines."""

from pathlib import Path
from typing import get_args

import pytest

from longshore.training import EngineName
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.workshop import Workshop, make_workshop


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distinct_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """With the tiny engine's model. Files whose jobs have other data or another engine have one of their own."""
    return make_workshop(tmp_path)


@pytest.fixture(params=get_args(EngineName))
def engine(request: pytest.FixtureRequest) -> str:
    """A line of the table."""
    return request.param


@pytest.fixture(scope="session")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The adapters that a TrainerRank loads beside the model, by name."""
    from tests.megatron_worker.ranks import write_adapters  # and with it megatron-core, which many tests do without

    return write_adapters(model, tmp_path_factory.mktemp("adapters"))
