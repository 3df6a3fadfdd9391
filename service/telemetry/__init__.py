"""What a process shows of itself: traces, metrics, ids in its log. Both traces and metrics are off unless asked for."""
