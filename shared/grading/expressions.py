"""Arithmetic over named numbers, such as `0.8 * exact + 0.2 * max(0, style)`: read once, computed for many samples.

Numbers, names, `+ - * / ^`, parentheses, and min, max, abs, floor, ceil, exp, sqrt, log (natural). `^` binds tighter
than a sign and groups to the right, so -2^2 is -4 and 2^3^2 is 512. An expression becomes postfix; nothing is ever
evaluated as code.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MAX_EXPRESSION_CHARS = 4_000
_MAX_DEPTH = 50
_TOKEN = re.compile(
    # Possessive, so that nothing is read twice.
    r"\s*+(?:(?P<number>(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+)(?![\w.])|(?P<name>[A-Za-z_]\w*+)"
    r"|(?P<sign>[-+*/^(),]))"
)
_BINARY: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": math.pow,
}
_UNARY_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "abs": abs,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_VARIADIC_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max}
FUNCTIONS = frozenset(_UNARY_FUNCTIONS) | frozenset(_VARIADIC_FUNCTIONS)


class ExpressionError(ValueError):
    """An expression that cannot be read, or has no finite value."""


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass(frozen=True)
class _Apply:
    """Take `arity` values from the stack, put `function` of them back."""

    symbol: str
    function: Callable[..., float]
    arity: int


_Step = float | _Name | _Apply


@dataclass(frozen=True)
class Expression:
    """An expression in postfix."""

    text: str
    steps: tuple[_Step, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(step.name for step in self.steps if isinstance(step, _Name))

    def value(self, values: Mapping[str, float]) -> float:
        """Computed in float64.

        Raises:
            ExpressionError: a division by zero, a logarithm of zero, a root of a negative number, or an overflow.
        """
        stack: list[float] = []
        for step in self.steps:
            match step:
                case float():
                    stack.append(step)
                case _Name(name):
                    stack.append(float(values[name]))
                case _Apply(symbol, function, arity):
                    arguments = stack[-arity:]
                    del stack[-arity:]
                    stack.append(_applied(symbol, function, arguments))
        [result] = stack
        return result


def _applied(symbol: str, function: Callable[..., float], arguments: list[float]) -> float:
    try:
        result = function(*arguments)
    except (ArithmeticError, ValueError) as error:
        raise ExpressionError(f"{symbol} of {_listed(arguments)} has no value") from error
    if not math.isfinite(result):
        raise ExpressionError(f"{symbol} of {_listed(arguments)} is not finite")
    return result


def _listed(arguments: list[float]) -> str:
    return " and ".join(f"{argument:g}" for argument in arguments)


def parse_expression(text: str) -> Expression:
    """Raises ExpressionError, with the character where it goes wrong."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionError(f"an expression has at most {MAX_EXPRESSION_CHARS:,} characters")
    parser = _Parser(list(_tokens(text)))
    parser.sum(0)
    parser.expect("end")
    return Expression(text, tuple(parser.steps))


@dataclass(frozen=True)
class _Token:
    kind: str  # number, name, end, or the sign itself
    text: str
    place: int


def _tokens(text: str) -> Iterator[_Token]:
    end = 0
    length = len(text.rstrip())
    while end < length:
        match = _TOKEN.match(text, end)
        if match is None:
            place = len(text) - len(text[end:].lstrip())
            raise ExpressionError(f"character {place + 1} ({text[place]!r}) has no meaning here")
        kind = str(match.lastgroup)
        word = match[kind]
        yield _Token(word if kind == "sign" else kind, word, match.start(kind))
        end = match.end()
    yield _Token("end", "the end", len(text))


class _Parser:
    """Recursive descent, one method a level of precedence; `depth` bounds what recursion hostile input can cause."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self.steps: list[_Step] = []

    def sum(self, depth: int) -> None:
        self._left_grouped(("+", "-"), self._product, depth)

    def expect(self, kind: str) -> None:
        token = self._take()
        if token.kind != kind:
            wanted = "the end" if kind == "end" else f"'{kind}'"
            raise ExpressionError(f"character {token.place + 1}: {wanted} is missing before {token.text!r}")

    def _product(self, depth: int) -> None:
        self._left_grouped(("*", "/"), self._signed, depth)

    def _left_grouped(self, signs: tuple[str, ...], operand: Callable[[int], None], depth: int) -> None:
        operand(depth)
        while self._peek().kind in signs:
            sign = self._take().kind
            operand(depth)
            self.steps.append(_Apply(sign, _BINARY[sign], 2))

    def _signed(self, depth: int) -> None:
        token = self._peek()
        if depth > _MAX_DEPTH:
            raise ExpressionError(f"character {token.place + 1}: nested deeper than {_MAX_DEPTH} levels")
        if token.kind not in ("+", "-"):
            self._power(depth)
            return
        self._take()
        self._signed(depth + 1)
        if token.kind == "-":
            self.steps.append(_Apply("-", operator.neg, 1))

    def _power(self, depth: int) -> None:
        self._atom(depth)
        if self._peek().kind == "^":
            self._take()
            self._signed(depth + 1)
            self.steps.append(_Apply("^", _BINARY["^"], 2))

    def _atom(self, depth: int) -> None:
        token = self._take()
        match token.kind:
            case "number":
                self.steps.append(_number(token))
            case "name" if self._peek().kind == "(":
                self._call(token, depth)
            case "name":
                self.steps.append(_Name(token.text))
            case "(":
                self.sum(depth + 1)
                self.expect(")")
            case _:
                raise ExpressionError(
                    f"character {token.place + 1}: a number or a name is missing before {token.text!r}"
                )

    def _call(self, function: _Token, depth: int) -> None:
        self.expect("(")
        self.sum(depth + 1)
        arity = 1
        while self._peek().kind == ",":
            self._take()
            self.sum(depth + 1)
            arity += 1
        self.expect(")")
        self.steps.append(_function(function, arity))

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token


def _number(token: _Token) -> float:
    value = float(token.text)
    if not math.isfinite(value):
        raise ExpressionError(f"character {token.place + 1}: {token.text} is beyond what a float holds")
    return value


def _function(token: _Token, arity: int) -> _Apply:
    name = token.text
    if name in _UNARY_FUNCTIONS and arity == 1:
        return _Apply(name, _UNARY_FUNCTIONS[name], 1)
    if name in _VARIADIC_FUNCTIONS and arity >= 2:
        return _Apply(name, _VARIADIC_FUNCTIONS[name], arity)
    if name in FUNCTIONS:
        wanted = "one argument" if name in _UNARY_FUNCTIONS else "two or more arguments"
        raise ExpressionError(f"character {token.place + 1}: {name} takes {wanted}")
    raise ExpressionError(
        f"character {token.place + 1}: there is no function '{name}'; there are {', '.join(sorted(FUNCTIONS))}"
    )
