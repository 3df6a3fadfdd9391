"""What starts and tells of runs by itself: schedules and webhooks."""
