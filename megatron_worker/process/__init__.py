"""The worker's processes: launch, ranks, job queue, event log, staging of inputs, watchdog."""
