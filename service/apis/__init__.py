"""Every door of the web service: one folder an API, and what all requests pass."""
