"""Tests that the C++ tests go on with what pip has compiled.

Configures a copy of the tree as `pip install` does, then as run_tests.py does,
and compares the commands that compile the Python module. Compiles nothing.

Usage: built_once_test.py SOURCE WORK CMAKE_ARGUMENT...
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE, WORK, ARGUMENTS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
sys.path.insert(0, str(SOURCE / "tools"))

import run_tests  # noqa: E402

COPIED = ("CMakeLists.txt", "CMakePresets.json", "cmake")
LINKED = ("cpp", "include", "tests", "tools", "examples")


def run(*command):
    """Runs a command; ends the test with its output if it fails."""
    result = subprocess.run(command, text=True, capture_output=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{result.stdout}{result.stderr}")
    return result.stdout


def commands(ninja, tree):
    """The commands that make the Python module, which pip runs."""
    folder = str(tree / "build" / "release")
    return run(ninja, "-C", folder, "-t", "commands", "_core").splitlines()


def main():
    shutil.rmtree(WORK, ignore_errors=True)
    tree = WORK / "tree"
    tree.mkdir(parents=True)
    for name in COPIED:
        path = SOURCE / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tree / name)
    for name in LINKED:
        (tree / name).symlink_to(SOURCE / name)
    # In place of pybind11's headers, which are found and copied.
    header = WORK / "isolated" / "pybind11" / "pybind11.h"
    header.parent.mkdir(parents=True)
    header.touch()

    run_tests.ROOT = tree
    os.chdir(tree)
    tools = run_tests.tools_for("release")
    run(
        tools["cmake"],
        *("-S", str(tree / "cmake" / "wheel"), "-B", str(WORK / "pip")),
        *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}"),
        *(
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
        ),
        f"-DCMAKE_INCLUDE_PATH={WORK / 'isolated'}",
        *ARGUMENTS,
    )
    pip = commands(tools["ninja"], tree)
    if len(pip) < 20:
        sys.exit(f"found {len(pip)} commands, expected those of the core")

    tools = run_tests.tools_for("release")
    configure = run_tests.configure_command("release", tools)
    run(*configure)
    tests = commands(tools["ninja"], tree)
    if tests != pip:
        differ = [(a, b) for a, b in zip(pip, tests) if a != b]
        sys.exit(
            f"pip has {len(pip)} commands, the tests {len(tests)}; the first "
            "that differs:\n" + "\n".join(differ[0] if differ else ())
        )
    # Another flag would show.
    run(*configure, "-DCMAKE_CXX_FLAGS=-DANOTHER")
    if commands(tools["ninja"], tree) == pip:
        sys.exit("another flag changes no command, expected all")
    print(f"{len(pip)} commands are the same")


if __name__ == "__main__":
    main()
