"""The page: what a browser shows of runs and schedules. Its scripts are clients of the native API."""
