"""The web service's part in a run: its rows, in a database of the test's own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio.client import Client
from temporalio.worker import Worker

from service.backend import Backend
from service.database import engine
from service.database.engine import open_database
from shared.settings import Settings
from shared.storage.store import open_store
from workflows.policies import service_queue


@asynccontextmanager
async def recording(client: Client, settings: Settings) -> AsyncIterator[Backend]:
    """Do what workflows ask of the service."""
    backend = Backend(settings, open_store(settings.store, settings.s3), open_database(settings))
    engine.upgrade(backend.database)
    queue = service_queue(settings.control_queue)
    async with Worker(client, task_queue=queue, activities=backend.records.activities):
        yield backend
    backend.database.close()
