"""What a control plane and a worker say to each other: the job, its packed data, its events, its layout."""
