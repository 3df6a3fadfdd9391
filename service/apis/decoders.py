"""Imports the decoders of request bodies in the process that forks children for large ones."""

from service.apis.art import models, sent_groups, training_jobs, wandb_artifacts
from service.apis.native import automation, codec, data, exports, run_files, runs, sessions, tenants
from service.apis.openai import chat, files, graders, responses
from service.apis.openai.fine_tuning import jobs
from service.apis.tinker import rest, results, samples, training, translation
from service.apis.tinker import sessions as tinker_sessions

LOADED = (
    *(automation, chat, codec, data, exports, files, graders, jobs, models, responses, rest, results, run_files, runs),
    *(samples, sent_groups, sessions, tenants, tinker_sessions, training, training_jobs, translation, wandb_artifacts),
)
