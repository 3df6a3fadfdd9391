"""The name under which the launcher tells its ranks where they meet. Apart from torch, which the launcher never loads."""

RENDEZVOUS_VARIABLE = "LONGSHORE_RENDEZVOUS"
