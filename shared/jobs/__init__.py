"""The protocol between control plane and worker: the job, its packed data, its events, its layout."""
