"""The native API, `/api/v1`."""
