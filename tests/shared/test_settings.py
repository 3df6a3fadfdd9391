"""Where a setting comes from: argument, environment, the project's file, the user's file, the default."""

from pathlib import Path

import pytest

from shared.settings import S3Settings, Settings, user_config_path
from shared.storage.store import LocalStore, open_store


def test_the_nearer_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    assert Settings().api_url == "http://127.0.0.1:8484"
    user_config_path().parent.mkdir(parents=True)
    user_config_path().write_text('api_url = "http://user"\nwandb_project = "mine"\n')
    assert Settings().api_url == "http://user"
    Path("longshore.toml").write_text('api_url = "http://project"\n')
    assert Settings().api_url == "http://project"
    assert Settings().wandb_project == "mine"
    monkeypatch.setenv("LONGSHORE_API_URL", "http://environment")
    assert Settings().api_url == "http://environment"
    assert Settings(api_url="http://argument").api_url == "http://argument"


def test_nested_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_DOWNLOAD__MAX_BYTES", "10")
    monkeypatch.setenv("LONGSHORE_S3__ENDPOINT_URL", "http://127.0.0.1:9")
    assert Settings().download.max_bytes == 10
    assert Settings().s3.endpoint_url == "http://127.0.0.1:9"


def test_the_store_is_below_the_root_unless_told(tmp_path: Path) -> None:
    assert Settings(root=tmp_path).store == f"file://{tmp_path}/store"
    odd = tmp_path / "a b%20c#d?e"
    assert open_store(Settings(root=odd).store, S3Settings()).uri == LocalStore(odd / "store").uri
    assert Settings(root=tmp_path, store_uri="s3://bucket/x").store == "s3://bucket/x"
