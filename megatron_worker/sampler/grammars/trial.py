"""Compiles a user's grammar in a separate process, before the sampler compiles it.

    python trial.py < grammar

Status 0: it compiles. 3: it does not, and why is printed. Any other: it broke the process.

llguidance counts its work, and gives up beyond LIMITS. It does not count its stack: a schema of 50 kB whose references
make a chain of a thousand ends the process with SIGSEGV. So this process has less stack than any thread of the sampler:
a grammar that compiles here compiles there too. It imports nothing of ours, so that it starts fast.
"""

import os
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Bounds of work (and so of time and memory) of a compilation, and of each token. Their units are llguidance's."""
REFUSED = 3
CPU_S, MEMORY_BYTES = 2, 1 << 30
_STACK_BYTES = 1 << 20  # glibc gives threads 2 MiB at least if the stack is not limited, else 8 MiB


class _Bytes:
    """A tokenizer of 256 bytes and an end token, in the form that llguidance takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: "str | bytes") -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def problem_of(grammar: str) -> str:
    """Compile a grammar and compute its first mask. Returns what is wrong with it, or nothing."""
    matcher = LLMatcher(LLTokenizer(_Bytes()), grammar, log_level=0, limits=LIMITS)  # type: ignore[arg-type]
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # what draws tokens goes first
    threading.stack_size(_STACK_BYTES)
    found: list[str] = []
    grammar = sys.stdin.buffer.read().decode()
    thread = threading.Thread(target=lambda: found.append(problem_of(grammar)))
    thread.start()
    thread.join()
    if not found:
        return 1
    sys.stdout.buffer.write(found[0].encode())
    return REFUSED if found[0] else 0


if __name__ == "__main__":
    sys.exit(main())
