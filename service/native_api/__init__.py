"""The native API, `/api/v1`: typed endpoints, each a call of what stands behind every API."""
