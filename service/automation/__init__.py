"""What acts without being asked each time: schedules, and webhooks."""
