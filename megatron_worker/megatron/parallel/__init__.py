"""The mesh of ranks, and collectives, pipeline and expert dispatch over it."""
