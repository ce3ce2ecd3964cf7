"""What the scripts of coding agents share."""

import os
import subprocess

from cases import case, expect

# Asks for what proxy.py has the agent do.
READ = "Read the file /notes.txt. What does it say?"


def run(*command, **variables):
    """Runs a program, which is to end without an error."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=1000,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    said = (done.stdout + done.stderr)[-300:]
    expect(done.returncode == 0, f"exit code {done.returncode}: {said}")


def try_tool(*command, **variables):
    """Has an agent call a tool, send the result back, and answer."""
    with case("tool"):
        run(*command, READ, **variables)
