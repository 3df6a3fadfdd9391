"""Schedules and webhooks."""
