"""Marks that are set into messages before rendering, so that the text shows where each message's content ends."""

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from activities.tokenizing.template_environment import Refused

_FIRST, _LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")


@dataclass(frozen=True)
class Marks:
    """Private-use characters: no template knows them, and no case or whitespace rule touches them.

    Mark i is the character `first + i`, of message i; two more are of `{% generation %}` blocks.
    """

    first: int
    num_messages: int

    @classmethod
    def beside(cls, text: str, num_messages: int) -> Self:
        """Choose marks that do not occur in a text. Raises Refused if there are not enough of them."""
        first = _FIRST
        for used in sorted({ord(character) for character in _PRIVATE.findall(text)}):
            if used >= first + num_messages + 2:
                break
            first = used + 1
        if first + num_messages + 1 > _LAST:
            raise Refused("the conversation has too many messages, or characters from U+F0000 to U+10FFFD")
        return cls(first, num_messages)

    @cached_property
    def of_blocks(self) -> tuple[str, str]:
        return chr(self.first + self.num_messages), chr(self.first + self.num_messages + 1)

    @cached_property
    def any(self) -> re.Pattern[str]:
        """Matches any mark, and captures it."""
        return re.compile(f"([{chr(self.first)}-{self.of_blocks[1]}])")

    def index_of(self, mark: str) -> int:
        return ord(mark) - self.first

    def marked(
        self, messages: list[dict[str, Any]], chosen: Container[int], at_the_end: bool = False
    ) -> list[dict[str, Any]]:
        """Return the messages, the chosen ones with a mark after the last character that is not space.

        `at_the_end`: behind the space of a content that ends with its thoughts, since templates cut there.
        """
        return [
            {**message, "content": self._with_mark(message["content"], i, at_the_end)}
            if i in chosen and message.get("content")
            else message
            for i, message in enumerate(messages)
        ]

    def _with_mark(self, text: str, i: int, at_the_end: bool) -> str:
        core = text.rstrip()
        if at_the_end and core.endswith("</think>"):
            core = text
        return f"{core}{chr(self.first + i)}{text[len(core) :]}" if core else text
