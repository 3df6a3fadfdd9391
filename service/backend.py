"""The internal service layer behind every API."""

from typing import Annotated

from fastapi import Depends, Header, Request

from service.accounts.audit import Audit
from service.accounts.keys import Keys, SignInLinks, SignIns
from service.accounts.limits import FairShare, SignInLimit
from service.accounts.tenants import Access, Documents, Quotas, Tenants
from service.automation.retention import Garbage, Removals, Retention
from service.automation.schedules import ScheduledRuns, Schedules
from service.automation.sweeps import Sweeps, SweepState
from service.automation.webhooks import Webhooks
from service.database.engine import Database
from service.decoding import Decoding
from service.files import Files, Uploads, uploads_folder
from service.host_http.connections import HostClients, SessionHosts
from service.inference.art_models import ArtModel, ArtModels, UntrainedModels
from service.inference.episodes import Episode, Episodes
from service.inference.published_models import Exports, NamedModels, PublishedModels
from service.inference.questions import IdleEviction, Inference
from service.runs.estimates import Checks, Estimates
from service.runs.files import Histories, InstallationGauges, Overviews, RunFiles, RunReader
from service.runs.rows import Records, RunRows, Uses, serve
from service.runs.runs import FirstRequest, Runs, RunStates
from service.runs.sessions import Sessions, TrainSteps
from service.temporal import Temporal
from shared.automation import ScheduleRecord, SweepRef
from shared.settings import Settings
from shared.storage.store import ObjectStore
from workflows.policies import service_queue


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
        self.states = RunStates(store, rows, temporal)
        uses = Uses(database)
        self.records = Records(store, rows, uses, self.quotas, temporal, settings.control_queue)
        access = self.access = Access(settings, store)
        limits = settings.tenant_limits
        checks = FairShare("checks of data and graders", limits.checks, limits.patience_s)
        questions = FairShare("questions", limits.questions, limits.patience_s)
        idempotency_keys = Documents(database, self.quotas, "idempotency key", FirstRequest)
        self.runs = Runs(settings, store, rows, self.states, temporal, access, self.quotas, uses, idempotency_keys)
        self.gauges = InstallationGauges(settings, database, temporal)
        sweeps = Documents(database, self.quotas, "sweep", SweepState)
        self.removals = Removals(self.runs, store, database, uses, self.quotas, sweeps)
        self.garbage = Garbage(settings, temporal)
        self.retention = Retention(store, database, self.quotas, settings.retention)
        self.steps = TrainSteps(self.runs, store, temporal)
        self.hosts = HostClients(settings, settings.heartbeat_timeout_s)
        session_hosts = SessionHosts(store, self.hosts)
        self.sessions = Sessions(
            self.runs, rows, store, temporal, self.quotas, uses, session_hosts, settings.session_results_days
        )
        self.reader = RunReader(store)
        self.histories = Histories(self.reader)
        self.run_files = RunFiles(store, settings.s3, self.quotas)
        self.files = Files(store, database, self.quotas, uploads_folder(settings.root_path))
        self.uploads = Uploads(store, database, self.files, self.quotas, uploads_folder(settings.root_path))
        self.checks = Checks(self.runs, temporal, checks, self.quotas)
        self.estimates = Estimates(self.checks, rows, self.histories, settings.prices)
        self.decoding = Decoding(settings)
        self.published = PublishedModels(store)
        self.names = NamedModels(self.published)
        self.exports = Exports(settings, store, temporal, self.published, self.quotas)
        self.untrained = UntrainedModels(settings, temporal, store, self.quotas)
        art_models = Documents(database, self.quotas, "model", ArtModel)
        self.art_models = ArtModels(store, art_models, self.published, self.untrained)
        self.inference = Inference(
            settings, self.store, self.published, self.art_models, self.untrained, temporal, questions, self.hosts
        )
        open_episodes = Documents(database, self.quotas, "episode", Episode)
        self.episodes = Episodes(open_episodes, self.inference, store, settings)
        self.eviction = IdleEviction(settings, rows, temporal, self.inference.leases.waiting)
        self.keys = Keys(settings, database)
        self.sign_ins = SignIns(database, self.keys)
        self.sign_in_links = SignInLinks()
        self.sign_in_limit = SignInLimit(settings.rate_limit)
        self.overviews = Overviews(database, store, self.histories)
        self.tenants = Tenants(database)
        self.audit = Audit(database, settings.audit_days)
        self.webhooks = Webhooks(settings, database, temporal, self.quotas)
        schedules = Documents(database, self.quotas, "schedule", ScheduleRecord)
        self.schedules = Schedules(settings, temporal, access, self.quotas, schedules)
        open_sweeps = Documents(database, self.quotas, "open sweep", SweepRef)
        self.sweeps = Sweeps(
            settings,
            sweeps,
            open_sweeps,
            temporal,
            self.runs,
            self.names,
            self.histories,
            access,
            self.quotas,
            self.decoding,
        )
        self.scheduled_runs = ScheduledRuns(store, self.runs, self.published, self.names, schedules, self.quotas)

    async def serve_workflows(self) -> None:
        """Do what workflows and hosts ask of the process that has the database, until cancelled."""
        await self.records.restore_uses()  # before anything is deleted, and before any use is newer than the lost ones
        activities = (*self.records.activities, self.scheduled_runs.accept_scheduled, *self.sweeps.activities)
        queue = service_queue(self.settings.control_queue)
        await serve(self.temporal, queue, *activities, self.retention.collect)


async def _backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


Backed = Annotated[Backend, Depends(_backend)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=256)]
