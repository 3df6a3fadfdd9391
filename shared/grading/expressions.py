"""Arithmetic over named numbers, such as `0.8 * exact + 0.2 * max(0, style)`: parsed once, computed for many samples.

Numbers, names, `+ - * / ^`, parentheses, and min, max, abs, floor, ceil, exp, sqrt, log (natural). `^` binds tighter
than a sign and groups to the right, so -2^2 is -4 and 2^3^2 is 512. An expression becomes postfix; nothing is ever
evaluated as code.

Python's `ast` does not fit: it refuses graders named `is` or `lambda`, accepts 1_000 and 0x1F, does not report the
position of the error in `(1` or `1 +`, and may fail on a sum of 1,900 terms, depending on the caller's stack depth.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MAX_EXPRESSION_CHARS = 4_000
_MAX_DEPTH = 50
_TOKEN = re.compile(
    # Possessive quantifiers: they do not backtrack, so matching takes linear time.
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
    """An expression cannot be parsed, or has no finite value."""


@dataclass(frozen=True)
class _Apply:
    """Pop `arity` values from the stack, and push `function` of them."""

    symbol: str
    function: Callable[..., float]
    arity: int


_Step = float | str | _Apply  # a number, a name, or a function of the values before it
_Token = tuple[str, str, int]  # its kind (number, name, end, or the operator itself), its text, its position

# By binary operator: its precedence, and the least precedence that operators within its right operand must have.
_BINDS: Mapping[str, tuple[int, int]] = {"+": (1, 2), "-": (1, 2), "*": (3, 4), "/": (3, 4), "^": (6, 5)}
_NEGATION_BINDS = 5


@dataclass(frozen=True)
class Expression:
    """An expression in postfix form."""

    text: str
    steps: tuple[_Step, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(step for step in self.steps if isinstance(step, str))

    def value(self, values: Mapping[str, float]) -> float:
        """Compute the value in float64.

        Raises:
            ExpressionError: a division by zero, a logarithm of zero, a root of a negative number, or an overflow.
        """
        stack: list[float] = []
        for step in self.steps:
            match step:
                case float():
                    stack.append(step)
                case str():
                    stack.append(float(values[step]))
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
    """Parse an expression. Raises ExpressionError, with the position of the error."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionError(f"an expression has at most {MAX_EXPRESSION_CHARS:,} characters")
    parser = _Parser(_tokens(text))
    parser.operand_and_signs(0, 0)
    parser.expect("end")
    return Expression(text, tuple(parser.steps))


def _tokens(text: str) -> Iterator[_Token]:
    end = 0
    length = len(text.rstrip())
    while end < length:
        match = _TOKEN.match(text, end)
        if match is None:
            place = len(text) - len(text[end:].lstrip())
            raise ExpressionError(f"character {place + 1} ({text[place]!r}) has no meaning here")
        kind = str(match.lastgroup)
        yield match[kind] if kind == "sign" else kind, match[kind], match.start(kind)
        end = match.end()
    yield "end", "the end", len(text)


class _Parser:
    """A parser by precedence climbing (Pratt 1973). `depth` is the depth of nesting, which is bounded."""

    def __init__(self, tokens: Iterator[_Token]) -> None:
        self._tokens = tokens
        self._next = next(tokens)
        self.steps: list[_Step] = []

    def operand_and_signs(self, binding: int, depth: int) -> None:
        """Read an operand and the operators after it of precedence `binding` or higher, with their right operands."""
        self._operand(depth)
        while _BINDS.get(self._next[0], (-1, -1))[0] >= binding:
            sign = self._take()[0]
            self.operand_and_signs(_BINDS[sign][1], depth + (sign == "^"))
            self.steps.append(_Apply(sign, _BINARY[sign], 2))

    def expect(self, kind: str) -> None:
        found, text, place = self._take()
        if found != kind:
            wanted = "the end" if kind == "end" else f"'{kind}'"
            raise ExpressionError(f"character {place + 1}: {wanted} is missing before {text!r}")

    def _operand(self, depth: int) -> None:
        token = kind, text, place = self._take()
        if depth > _MAX_DEPTH:
            raise ExpressionError(f"character {place + 1}: nested deeper than {_MAX_DEPTH} levels")
        match kind:
            case "number":
                self.steps.append(_number(token))
            case "name" if self._next[0] == "(":
                self._call(token, depth)
            case "name":
                self.steps.append(text)
            case "(":
                self.operand_and_signs(0, depth + 1)
                self.expect(")")
            case "+" | "-":
                self.operand_and_signs(_NEGATION_BINDS, depth + 1)
                self.steps += [_Apply("-", operator.neg, 1)] if kind == "-" else []
            case _:
                raise ExpressionError(f"character {place + 1}: a number or a name is missing before {text!r}")

    def _call(self, function: _Token, depth: int) -> None:
        self.expect("(")
        self.operand_and_signs(0, depth + 1)
        arity = 1
        while self._next[0] == ",":
            self._take()
            self.operand_and_signs(0, depth + 1)
            arity += 1
        self.expect(")")
        self.steps.append(_function(function, arity))

    def _take(self) -> _Token:
        token = self._next
        self._next = next(self._tokens, token)
        return token


def _number(token: _Token) -> float:
    _, text, place = token
    value = float(text)
    if not math.isfinite(value):
        raise ExpressionError(f"character {place + 1}: {text} is beyond what a float holds")
    return value


def _function(token: _Token, arity: int) -> _Apply:
    _, name, place = token
    if name in _UNARY_FUNCTIONS and arity == 1:
        return _Apply(name, _UNARY_FUNCTIONS[name], 1)
    if name in _VARIADIC_FUNCTIONS and arity >= 2:
        return _Apply(name, _VARIADIC_FUNCTIONS[name], arity)
    if name in FUNCTIONS:
        wanted = "one argument" if name in _UNARY_FUNCTIONS else "two or more arguments"
        raise ExpressionError(f"character {place + 1}: {name} takes {wanted}")
    known = ", ".join(sorted(FUNCTIONS))
    raise ExpressionError(f"character {place + 1}: there is no function '{name}'; there are {known}")
