#!/usr/bin/env python3
"""Runs all tests many times on a machine that is kept busy.

Run it after run_tests.py, which builds what it runs. A test that fails here and
not on an idle machine waits for a while instead of for what happens. Exits with
1 if any run fails.

Usage: repeat_tests.py [--runs N] [--load N] [--at-once N] [--logs FOLDER]
                       [-- ARGUMENTS OF run_tests.py]

--load is how many processes keep the machine busy beside each run. With
--at-once the other runs are part of that load: each counts as its number of
jobs, and idle loops make up the rest.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import run_tests

ROOT = Path(__file__).resolve().parents[1]
JOBS = os.cpu_count() or 1

# A line of CTest or of pytest that names a failed test.
FAILED = re.compile(
    r"^\s*\d+ - .*\((?:Failed|Timeout|.*Exception.*)\).*|^(?:FAILED|ERROR) .*",
    re.M,
)


RUNNING: list[subprocess.Popen] = []  # each leads a group of processes


def end_all():
    """Ends the runs with all that they started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in list(RUNNING):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        end = time.monotonic() + 10
        while RUNNING and time.monotonic() < end:
            time.sleep(0.1)


@contextlib.contextmanager
def busy(processes):
    """Keeps so many processes computing."""
    loop = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(loop) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def list_cpp_tests(preset):
    """Has CTest find the tests of programs that are new since it last did: it
    writes files for that, which runs at the same time would break.
    """
    tools = run_tests.tools_for(preset)
    subprocess.run(
        [tools["ctest"], "--preset", preset, "-N"],
        cwd=ROOT,
        env=run_tests.environment(),
        stdout=subprocess.DEVNULL,
        check=True,
    )


def run(number, arguments, logs):
    """Runs all tests once; returns the lines that name what failed."""
    log = logs / f"run-{number}.log"
    command = [sys.executable, str(ROOT / "tools/run_tests.py"), "--no-build"]
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.append(process)
        code = process.wait()
        RUNNING.remove(process)
    text = log.read_text("utf-8", errors="replace")
    failed = [line.strip() for line in FAILED.findall(text)]
    if code != 0 and not failed:
        failed = [f"exit code {code}: see {log.name}"]
    seconds = time.monotonic() - start
    load = os.getloadavg()[1]
    outcome = f"{len(failed)} failed" if failed else "green"
    print(
        f"run {number}: {outcome} after {seconds:.0f} s, load {load:.1f}",
        *failed,
        sep="\n  ",
        flush=True,
    )
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=int, default=10, help="how many; default 10"
    )
    parser.add_argument(
        "--load",
        type=int,
        default=6,
        help="processes that compute beside each run; default 6",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs at the same time"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=ROOT / "build/repeats",
        help="folder of the output of each run; default build/repeats",
    )
    parser.add_argument(
        "arguments", nargs="*", help="flags of run_tests.py, after --"
    )
    args = parser.parse_args()
    if args.runs < 1 or args.load < 0 or args.at_once < 1:
        parser.error("--runs and --at-once are at least 1, --load at least 0")
    tests = run_tests.parse(args.arguments)
    try:
        args.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs: {error}")
    if not tests.python and not tests.fast:
        list_cpp_tests(tests.preset)

    others = (args.at_once - 1) * JOBS
    with (
        busy(max(0, args.load - others)),
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        numbers = range(1, args.runs + 1)
        futures = [
            pool.submit(run, n, args.arguments, args.logs) for n in numbers
        ]
        try:
            failed = [future.result() for future in futures]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            print("interrupted")
            return 130
    green = failed.count([])
    print(f"{green} of {args.runs} runs are green")
    return 0 if green == args.runs else 1


def interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
