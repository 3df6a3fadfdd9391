"""Name by which the launcher tells its ranks where they meet: apart from torch, which the launcher never loads."""

RENDEZVOUS_VARIABLE = "LONGSHORE_RENDEZVOUS"
