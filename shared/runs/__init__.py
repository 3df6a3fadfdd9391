"""Runs as users request them, their status and events, schedules, webhooks, previews, questions to models."""
