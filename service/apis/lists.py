"""Lists in pages, in the shape that clients of OpenAI and of ART read."""

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, Self, TypeVar

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, ConfigDict

from shared.errors import InvalidInput

T = TypeVar("T", bound=BaseModel)
Seconds = Annotated[int, BeforeValidator(int)]
"""Whole seconds since 1970, of a time with fractions."""


RetryCount = Annotated[str | None, Header(alias="x-stainless-retry-count", include_in_schema=False)]
"""The number of times that a client has sent this request before."""


class RecordView(BaseModel):
    """A record as clients see it: the fields are read from its attributes, by their validation aliases."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, record: object) -> Self:
        return cls.model_validate(record)


class ListAnswer(BaseModel, Generic[T]):
    """A page. The `id` of its last item is the `after` of the next one."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


def page_of(items: Sequence[T], has_more: bool) -> ListAnswer[T]:
    ids = [str(item.id) for item in items]  # type: ignore[attr-defined]
    return ListAnswer(
        data=list(items), has_more=has_more, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None
    )


def page_after(items: Sequence[T], after: str | None, limit: int) -> ListAnswer[T]:
    """The page behind an id, of all items in order. Raises InvalidInput: none of them has the id."""
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]  # type: ignore[attr-defined]
        if not places:
            raise InvalidInput("there is no item of this id", "after")
        start = places[0] + 1
    return page_of(items[start : start + limit], has_more=start + limit < len(items))
