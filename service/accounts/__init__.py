"""Tenants, keys, sessions, quotas, limits and the audit log."""
