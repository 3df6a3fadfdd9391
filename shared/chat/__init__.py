"""Chat and completion requests, and the trajectories that are made of them."""
