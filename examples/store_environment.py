"""An environment of twenty turns: a store that the policy keeps, with a calculator as its tool (docs/agents.md).

The store asks what its stock and a delivery come to. The policy may call `add`, and answers. A right answer earns a
tenth; the stock then is what is right, less what was sold.
"""

import random
from typing import Any

TASKS = 10


class Environment:
    def reset(self, item: dict[str, Any], seed: int) -> str:
        self.chance = random.Random(seed)
        self.stock = {goods: self.chance.randint(10, 49) for goods in item["goods"]}
        self.left = TASKS
        return self.asks()

    def asks(self) -> str:
        self.goods, self.delivered = self.chance.choice(sorted(self.stock)), self.chance.randint(10, 49)
        return f"{self.stock[self.goods]} {self.goods} and {self.delivered}?"

    def step(self, answer: Any) -> dict[str, Any]:
        for call in answer["tool_calls"]:
            return {"observation": added(call["arguments"])}
        total = self.stock[self.goods] + self.delivered
        is_right = answer["content"].strip() == str(total)
        self.stock[self.goods] = max(10, total - self.chance.randint(20, 60))
        self.left -= 1
        done = self.left == 0
        return {"observation": None if done else self.asks(), "reward": is_right / TASKS, "done": done}


def added(arguments: object) -> str:
    match arguments:
        case {"a": int(a), "b": int(b)}:
            return str(a + b)
    return "a and b are numbers"
