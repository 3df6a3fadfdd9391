"""What keeps a stack from starting."""

from shared.errors import LongshoreError


class DevError(LongshoreError):
    """The stack cannot start, in words for its user."""
