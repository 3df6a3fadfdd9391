"""Who asks, and what they may: tenants, keys, quotas, and the log of what they did."""
