"""The GPU worker: the only place where torch exists. Imports nothing of ours but `shared`."""
