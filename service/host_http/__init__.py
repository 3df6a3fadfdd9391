"""HTTP between the web service and hosts."""
