"""Chat and completion requests, and the trajectories made from them."""
