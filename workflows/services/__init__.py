"""Short workflows: previews, questions, trials of graders, webhooks, schedules, tracking."""
