"""The parent of every model that crosses a process edge."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, and strict about names: a field that nobody reads is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
