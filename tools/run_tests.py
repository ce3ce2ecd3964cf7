#!/usr/bin/env python3
"""Builds and runs all tests: the C++ ones with CTest, then those of Python.

Run it with the Python that gemmakv[demo,test] is installed in. The C++ tests of
the preset release take what pip has compiled. Exits with 1 if any test fails,
after all have run.

Usage: run_tests.py [--preset release|dev|tsan] [--cpp | --python | --fast]
                    [--only LAYER/NAME ...] [--build | --no-build] [--jobs N]

--fast runs the Python tests without those marked `slow` and compiles nothing.
--only builds and runs some C++ test programs: engine/stress is that of
tests/cpp/engine/stress_test.cc. --build builds the C++ tests and runs nothing;
--no-build runs them as an earlier run has built them.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cached(preset):
    """Reads the entries of CMake's cache; none before the first build."""
    try:
        text = (ROOT / "build" / preset / "CMakeCache.txt").read_text("utf-8")
    except OSError:
        return {}
    entries = (line.partition("=") for line in text.splitlines())
    return {key.partition(":")[0]: value for key, _, value in entries}


def program(name, kept):
    """The path of a tool: the one of the build so far, if it is still there.

    Another version of CMake or Ninja may compile all again. Those that pip had
    in an isolated environment are gone with it.
    """
    if kept and Path(kept).is_file():
        return kept
    return shutil.which(name, path=environment()["PATH"])


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


def tools_for(preset):
    """The paths of the tools that build and run the C++ tests."""
    cache = cached(preset)
    return {
        "cmake": program("cmake", cache.get("CMAKE_COMMAND")),
        "ctest": program("ctest", cache.get("CMAKE_CTEST_COMMAND")),
        "ninja": program("ninja", cache.get("CMAKE_MAKE_PROGRAM")),
    }


def configure_command(preset, tools):
    """The command that adds the tests to a preset's build folder."""
    command = [tools["cmake"], "--preset", preset, "-DGEMMAKV_BUILD_TESTS=ON"]
    if tools["ninja"] != cached(preset).get("CMAKE_MAKE_PROGRAM"):
        command.append(f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}")
    return command


@contextlib.contextmanager
def alone_in(folder):
    """Keeps other runs from building in the folder; waits for one that does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run_tests.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"== waiting: another run builds in {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_cpp(preset, jobs, tools, programs):
    """Builds the C++ tests, or some of their programs."""
    configure = configure_command(preset, tools)
    build = [tools["cmake"], "--build", "--preset", preset, "-j", str(jobs)]
    if programs:
        build += ["--target", *programs]
    with alone_in(ROOT / "build" / preset):
        return run("configure", *configure) and run("build", *build)


def run_cpp(preset, jobs, only, *, builds, runs):
    """Builds and runs the C++ tests, or does one of the two."""
    tools = tools_for(preset)
    for name, path in tools.items():
        if not path:
            print(f"== {name} not found: pip install '.[test]' brings it")
            return False
    programs = [name.replace("/", "_") + "_test" for name in only or []]
    if builds and not build_cpp(preset, jobs, tools, programs):
        return False
    if not runs:
        return True
    built = [ROOT / "build" / preset / name for name in programs]
    for path in built or [ROOT / "build" / preset / "CTestTestfile.cmake"]:
        if not path.exists():
            print(f"== {path} is not built yet: run without --no-build")
            return False
    if programs:
        return all(
            [run("C++ test", f"build/{preset}/{name}") for name in programs]
        )
    tests = ["--preset", preset, "-j", str(jobs), "--no-tests=error"]
    return run("C++ tests", tools["ctest"], *tests)


def run_python(jobs, fast):
    for module in ("pytest", "xdist", "gemmakv"):
        if importlib.util.find_spec(module) is None:
            print(
                f"== {sys.executable} has no module {module}: run this with "
                "the Python that '.[demo,test]' is installed in"
            )
            return False
    # Each worker takes half of the list and steals from the other's end when
    # it is through with its own, so tests of one file mostly stay together and
    # share their models.
    pytest = [sys.executable, "-m", "pytest", "-n", str(jobs)]
    pytest += ["--dist", "worksteal", "--durations", "25"]
    if fast:
        pytest += ["-m", "not slow"]
    return run("Python tests", *pytest)


def positive(text):
    """Reads a number that is at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f"expected a number of at least 1, found {text!r}"
        )
    return int(text)


def test_program(text):
    """Reads the name of a C++ test program, as --only takes it."""
    if not (ROOT / "tests" / "cpp" / f"{text}_test.cc").is_file():
        raise argparse.ArgumentTypeError(
            f"expected LAYER/NAME of a file tests/cpp/LAYER/NAME_test.cc, "
            f"found {text!r}"
        )
    return text


def parse(arguments=None):
    """Reads the flags; ends the program with one line where they are wrong."""
    parser = argparse.ArgumentParser(
        "run_tests.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--preset", default="release", choices=["release", "dev", "tsan"]
    )
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--cpp", action="store_true", help="C++ tests only")
    half.add_argument("--python", action="store_true", help="Python tests only")
    half.add_argument(
        "--fast",
        action="store_true",
        help="Python tests only, without those marked slow",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        type=test_program,
        metavar="LAYER/NAME",
        help="these C++ tests only",
    )
    stage = parser.add_mutually_exclusive_group()
    stage.add_argument(
        "--build", action="store_true", help="build the C++ tests, run nothing"
    )
    stage.add_argument(
        "--no-build", action="store_true", help="run the C++ tests as they are"
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count() or 1,
        help="compilers or tests at a time; default the processors",
    )
    args = parser.parse_args(arguments)
    if (args.python or args.fast) and (args.only or args.build):
        parser.error(
            "--only and --build are of the C++ tests, found --python or "
            "--fast; one Python file: python -m pytest FILE"
        )
    return args


def main():
    args = parse()
    good = True
    if not args.python and not args.fast:
        good = run_cpp(
            args.preset,
            args.jobs,
            args.only,
            builds=not args.no_build,
            runs=not args.build,
        )
    if not args.cpp and not args.only and not args.build:
        good = run_python(args.jobs, args.fast) and good
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("== interrupted")
        sys.exit(130)
