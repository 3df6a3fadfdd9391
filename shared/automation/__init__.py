"""Automation around runs: schedules, sweeps, webhooks, and garbage collection."""
