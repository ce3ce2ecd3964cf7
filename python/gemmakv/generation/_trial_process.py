"""Compiles grammars to find out whether that ends, in a process that may die
of it. Run as a program by `_trial`: its arguments are the limits of a compiler
and the bytes of a stack. A job is a line at stdin, and a line at stdout says
that it ended.
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


def main() -> None:
    # Who started it ends it; a terminal's Ctrl-C is for others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import llguidance

    make, limits = llguidance.LLMatcher, json.loads(sys.argv[1])
    stack = int(sys.argv[2])
    # Bytes will do: what takes long does so before there are tokens.
    vocabulary = llguidance.LLTokenizer("byte")
    os.nice(10)
    threading.stack_size(stack)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _MEMORY_BYTES + stack
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def compile(job: dict[str, Any]) -> None:
        try:
            trial(job)
        except ValueError:
            pass  # refused, as it will be there
        except BaseException:
            os._exit(1)

    def trial(job: dict[str, Any]) -> None:
        source = job["text"]
        if job["kind"] == "json_schema":
            source = make.grammar_from_json_schema(
                source, overrides=job["overrides"]
            )
        elif job["kind"] == "regex":
            source = make.grammar_from_regex(source)
        core = make(
            vocabulary,
            source,
            log_level=0,
            limits=llguidance.LLParserLimits(**limits),
        )
        if not core.is_error():
            core.compute_bitmask()

    for line in sys.stdin:
        job = json.loads(line)
        # The system ends the process when it has used so many seconds.
        soft = int(time.process_time() + job["seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        thread = threading.Thread(target=compile, args=(job,))
        thread.start()
        thread.join()
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
