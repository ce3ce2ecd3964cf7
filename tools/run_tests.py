#!/usr/bin/env python3
"""Builds and runs all tests: the C++ ones with CTest, then those of Python.

Run it with the Python that gemmakv[demo,test] is installed in. Exits with 1 if
any test fails, after all have run.

Usage: run_tests.py [--preset release|dev|tsan] [--cpp | --python] [--jobs N]
                    [--only LAYER/NAME ...]

--only builds and runs some C++ test programs: engine/stress is that of
tests/cpp/engine/stress_test.cc.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment():
    """The environment with this Python's own cmake and ninja found first."""
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"]}


def run(what, *command):
    """Runs a command to its end; returns whether it succeeded."""
    print(f"== {what}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    result = subprocess.run(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL
    )
    seconds = time.monotonic() - start
    outcome = "done" if result.returncode == 0 else "FAILED"
    print(f"== {what}: {outcome} after {seconds:.0f} s", flush=True)
    return result.returncode == 0


def run_cpp(preset, jobs, only):
    for tool in ("cmake", "ctest", "ninja"):
        if not shutil.which(tool, path=environment()["PATH"]):
            print(f"== {tool} not found: pip install '.[test]' brings it")
            return False
    if not run("configure", "cmake", "--preset", preset):
        return False
    build = ["cmake", "--build", "--preset", preset, "-j", jobs]
    if only:
        programs = [name.replace("/", "_") + "_test" for name in only]
        return run("build", *build, "--target", *programs) and all(
            [run("C++ test", f"build/{preset}/{name}") for name in programs]
        )
    tests = ["ctest", "--preset", preset, "-j", jobs, "--no-tests=error"]
    return run("build", *build) and run("C++ tests", *tests)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preset", default="release", choices=["release", "dev", "tsan"]
    )
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--cpp", action="store_true", help="C++ tests only")
    half.add_argument("--python", action="store_true", help="Python tests only")
    parser.add_argument(
        "--only", nargs="+", metavar="LAYER/NAME", help="these C++ tests only"
    )
    parser.add_argument("--jobs", default=str(os.cpu_count() or 1))
    args = parser.parse_args()

    good = True
    if not args.python:
        good = run_cpp(args.preset, args.jobs, args.only)
    if not args.cpp and not args.only:
        # A file's tests share models, so they stay together. Those of few
        # tests are often the longest: they are not left for the end.
        parallel = ["-n", args.jobs, "--dist", "loadfile"]
        parallel += ["--no-loadscope-reorder", "--durations", "25"]
        pytest = [sys.executable, "-m", "pytest", *parallel]
        good = run("Python tests", *pytest) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
