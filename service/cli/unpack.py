"""Download what a run published: unpack the tar beside its target, check it against the manifest, rename it."""

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.exits import Stop
from shared.storage.artifacts import Manifest, sha256_file
from shared.storage.paths import MANIFEST

if TYPE_CHECKING:
    from service.cli.client import Client


def fetch(client: "Client", run_id: str, target: Path) -> Manifest:
    """Make `target` with the files that a run published. Nothing is left behind when it fails.

    Raises:
        Stop: the run published nothing, or a file does not have the hash that the manifest gives it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tar = temporary / "download.tar"
        client.save(f"/runs/{run_id}/download", tar)
        with tarfile.open(tar) as archive:
            archive.extractall(temporary, filter="data")
        folder = temporary / run_id
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        for entry in manifest.files:
            if sha256_file(folder / entry.path) != entry.sha256:
                raise Stop(f"{entry.path}: the SHA-256 is not the manifest's", advice="try the download again")
        folder.rename(target)
        return manifest
    except (tarfile.TarError, FileNotFoundError) as error:
        raise Stop(f"the download is incomplete: {error}", advice="try it again") from None
    finally:
        shutil.rmtree(temporary)
