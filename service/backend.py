"""The internal service layer behind every API."""

from typing import Annotated

from fastapi import Depends, Header, Request

from service.accounts.audit import Audit
from service.accounts.keys import Keys, SignInLinks, SignIns
from service.accounts.limits import FairShare, SignInLimit
from service.accounts.tenants import Access, Quotas, Tenants
from service.automation.schedules import ScheduledRuns, Schedules
from service.automation.sweeps import Sweeps
from service.automation.upkeep import Garbage, Removals, SpendingLimits
from service.automation.webhooks import Webhooks
from service.database.engine import Database
from service.decoding import Decoding
from service.files import Files, Uploads, uploads_folder
from service.host_http.clients import HostClients, SessionBells
from service.inference.art_models import ArtModels, UntrainedModels
from service.inference.exports import Exports
from service.inference.published_models import NamedModels, PublishedModels
from service.inference.questions import IdleEviction, Inference
from service.runs.estimates import Checks, Estimates
from service.runs.files import RunFiles
from service.runs.history import Histories, RunReader
from service.runs.overview import InstallationGauges, Overviews
from service.runs.rows import RunRows
from service.runs.runs import Runs, RunStates, Watch
from service.runs.sessions import Sessions, TrainSteps
from service.temporal import Temporal
from shared.settings import Settings
from shared.storage.store import ObjectStore


class Backend:
    """All parts of one service process. Store, database and Temporal are only accessed when they are used."""

    def __init__(self, settings: Settings, store: ObjectStore, database: Database) -> None:
        temporal = Temporal(settings)
        self.settings = settings
        self.temporal = temporal
        self.store = store
        self.database = database
        self.quotas = Quotas(settings.quotas, store, database, settings.prices, settings.clients)
        rows = RunRows(database, self.quotas)
        states = RunStates(store, rows, temporal)
        access = self.access = Access(settings, store)
        limits = settings.tenant_limits
        checks = FairShare("checks of data and graders", limits.checks, limits.patience_s)
        questions = FairShare("questions", limits.questions, limits.patience_s)
        self.runs = Runs(settings, store, rows, states, temporal, access, self.quotas)
        self.watch = Watch(rows, states, temporal)
        self.gauges = InstallationGauges(settings, database, temporal)
        self.spending = SpendingLimits(self.runs, rows)
        self.removals = Removals(self.runs, store, database, self.quotas)
        self.garbage = Garbage(settings, temporal, self.quotas)
        self.steps = TrainSteps(self.runs, store, temporal)
        self.hosts = HostClients(settings, settings.heartbeat_timeout_s)
        bells = SessionBells(store, self.hosts)
        self.sessions = Sessions(self.runs, rows, store, temporal, self.quotas, bells, settings.session_results_days)
        self.reader = RunReader(store)
        self.histories = Histories(self.reader)
        self.run_files = RunFiles(store, settings.s3, self.quotas)
        self.files = Files(store, database, self.quotas, uploads_folder(settings.root_path))
        self.uploads = Uploads(store, self.files, self.quotas, uploads_folder(settings.root_path))
        self.checks = Checks(self.runs, temporal, checks)
        self.estimates = Estimates(self.checks, rows, self.histories, settings.prices)
        self.decoding = Decoding(settings)
        self.published = PublishedModels(store)
        self.names = NamedModels(self.published)
        self.exports = Exports(settings, store, temporal, self.published)
        self.untrained = UntrainedModels(settings, temporal, store)
        self.art_models = ArtModels(store, self.published, self.untrained, self.quotas)
        self.inference = Inference(
            settings, self.store, self.published, self.art_models, self.untrained, temporal, questions, self.hosts
        )
        self.eviction = IdleEviction(settings, rows, temporal, self.inference.leases.waiting)
        self.keys = Keys(settings, store, database)
        self.sign_ins = SignIns(database, self.keys)
        self.sign_in_links = SignInLinks()
        self.sign_in_limit = SignInLimit(settings.rate_limit)
        self.overviews = Overviews(database, store, self.histories)
        self.tenants = Tenants(store, database)
        self.audit = Audit(database, settings.audit_days)
        self.webhooks = Webhooks(settings, store, temporal, self.quotas)
        self.schedules = Schedules(settings, store, temporal, access, self.quotas)
        self.sweeps = Sweeps(
            settings, store, temporal, self.runs, self.names, self.histories, access, self.quotas, self.decoding
        )
        self.scheduled_runs = ScheduledRuns(settings, store, temporal, self.runs, states, self.published, self.names)


async def _backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


Backed = Annotated[Backend, Depends(_backend)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=256)]
