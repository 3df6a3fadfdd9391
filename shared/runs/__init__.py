"""What users ask for and what becomes of it: runs, their events, schedules and webhooks."""
