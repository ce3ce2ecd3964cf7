"""Compiles grammars to find out whether that ends, in a process that may die
of it. Run as a program by `_trial`: its arguments are the limits of a compiler
and the bytes of a stack. A job is a line at stdin, and a line at stdout says
of each of its grammars why the compiler refuses it, or null, and how many
seconds of a processor that took.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

_MEMORY_BYTES = 1 << 30  # beside the stack
_STEPS = 4  # tokens of a text, or forced runs of them, that are tried


def refusal(
    guidance: Any, vocabulary: Any, limits: Any, grammar: dict[str, Any]
) -> str | None:
    """Why llguidance refuses a grammar (its `kind` and `text`); None if it
    takes it, with the first mask, and the masks of a text that goes on after
    `begin` for some steps: some grammars have more states than there is room
    for, which the first of them shows.

    `lenient`: keywords of a JSON schema that it does not know are no reason.
    """
    try:
        core = matcher_of(guidance, vocabulary, limits, grammar)
    except ValueError as error:
        return str(error)
    if not core.is_error():
        core.compute_bitmask()
    begin = grammar.get("begin", "").encode()
    if begin and not core.is_error():
        # The vocabulary is one of bytes.
        core.consume_tokens(list(begin))
    for _ in range(_STEPS):
        if core.is_error() or core.is_stopped():
            break
        core.consume_tokens(_next_bytes(core))
    return str(core.get_error()) if core.is_error() else None


def _next_bytes(core: Any) -> list[int]:
    """The bytes that must come next, or one that may: the first of ASCII's
    that shows, if one of these may; none at the end of the text.
    """
    forced: list[int] = core.compute_ff_tokens()
    if forced or core.is_error():
        return forced
    mask = core.compute_bitmask()
    allowed = [
        byte
        for byte in (*range(0x20, 0x100), *range(0x20))
        if mask[byte // 8] >> byte % 8 & 1
    ]
    return allowed[:1]


def matcher_of(
    guidance: Any, vocabulary: Any, limits: Any, grammar: dict[str, Any]
) -> Any:
    """Has llguidance compile a grammar. Raises ValueError, or the matcher has
    an error, if it refuses that.
    """
    make, source = guidance.LLMatcher, grammar["text"]
    if grammar["kind"] == "json_schema":
        overrides = dict(grammar["overrides"], lenient=grammar["lenient"])
        source = make.grammar_from_json_schema(source, overrides=overrides)
    elif grammar["kind"] == "regex":
        source = make.grammar_from_regex(source)
    return make(vocabulary, source, log_level=0, limits=limits)


def main() -> None:
    # Who started it ends it; a terminal's Ctrl-C is for others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    stack = int(sys.argv[2])
    threading.stack_size(stack)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # One thread for all jobs: there is room for one such stack.
    thread = threading.Thread(target=_work, args=(stack,))
    thread.start()
    thread.join()


def _work(stack: int) -> None:
    """Does all jobs; the process ends with what is no refusal."""
    try:
        import llguidance

        limits = llguidance.LLParserLimits(**json.loads(sys.argv[1]))
        # Bytes will do: what takes long does so before there are tokens.
        vocabulary = llguidance.LLTokenizer("byte")
        most = _MEMORY_BYTES + stack
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for line in sys.stdin:
            job = json.loads(line)
            begin = time.process_time()
            # The system ends the process when it has used so many seconds.
            soft = int(begin + job["seconds"]) + 1
            resource.setrlimit(
                resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY)
            )
            found = [
                refusal(llguidance, vocabulary, limits, grammar)
                for grammar in job["grammars"]
            ]
            took = time.process_time() - begin
            answer = {"refusals": found, "seconds": took}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    except BaseException:
        os._exit(1)


if __name__ == "__main__":
    main()
