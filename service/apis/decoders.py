"""Imports the decoders of request bodies in the process that forks children for large ones."""

from service.apis.art import sent_groups, training_jobs, wandb_artifacts
from service.apis.native import automation, codec, models, runs, tenants
from service.apis.openai import chat, files
from service.apis.openai.fine_tuning import jobs
from service.apis.tinker import routes, samples, translation

LOADED = (
    *(automation, chat, codec, files, jobs, models, routes, runs, samples, sent_groups, tenants),
    *(training_jobs, translation, wandb_artifacts),
)
