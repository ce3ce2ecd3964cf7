"""The contract tests that the clients of OpenAI and Anthropic come with, run
against `gemmakv serve`.

    python tools/clients/contract.py [--only openai] [-k create] [-v]

They are in the source distributions (tests/api_resources), which pip downloads
for the versions that are installed (the extra `clients`). Each sends every
field that there is, most with values that no model could follow, and checks the
answer against the client's own types, once strictly. A field that the server
refuses is left out (contract_plugin.py), and listed with how often that was.
Those of routes that this server has are run; contract.toml names those that are
left out, and why. It is an error if a test fails that is not there, and if one
passes that is.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from serving import NAME, serving

HERE = Path(__file__).resolve().parent
SUITES: dict[str, dict[str, Any]] = {
    "openai": {
        "base": "/v1",
        "files": [
            "chat/test_completions.py", "test_completions.py",
            "test_responses.py", "responses", "test_models.py",
            "test_embeddings.py", "test_conversations.py", "conversations",
        ],
    },
    "anthropic": {
        "base": "",
        "files": [
            "test_messages.py", "test_models.py", "beta/test_messages.py",
            "beta/test_models.py",
        ],
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SUITES, action="append")
    parser.add_argument("--archives", type=Path, metavar="FOLDER",
                        help="source distributions; pip downloads none then")
    parser.add_argument("-k", metavar="WORDS", help="only tests like these")
    parser.add_argument("-v", "--verbose", action="store_true")
    arguments = parser.parse_args()
    left_out = tomllib.loads((HERE / "contract.toml").read_text("utf-8"))
    bad = 0
    with serving("--default-max-tokens", "8") as url:
        for name in arguments.only or SUITES:
            with tempfile.TemporaryDirectory() as folder:
                source = unpacked(name, Path(folder), arguments.archives)
                outcomes, refused = run(
                    name, source, url, arguments.k, arguments.verbose
                )
            bad += report(
                name, outcomes, left_out.get(name, []), arguments.k is None
            )
            for field, count in sorted(refused.items()):
                print(f"  refused, {count}: {field}")
    return 1 if bad else 0


def unpacked(name: str, folder: Path, archives: Path | None = None) -> Path:
    """The source distribution of the version that is installed."""
    version = importlib.metadata.version(name)
    if archives is None:
        archives = folder
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "-q", "--no-deps",
                "--no-binary", name, f"{name}=={version}",
            ],
            cwd=folder,
            check=True,
        )  # fmt: skip
    with tarfile.open(archives / f"{name}-{version}.tar.gz") as file:
        file.extractall(folder, filter="data")
    return folder / f"{name}-{version}"


def run(
    name: str, source: Path, url: str, only: str | None, verbose: bool
) -> tuple[dict[str, str], dict[str, int]]:
    """Outcomes by the tests' names: passed, failed or skipped; and how often
    fields were refused.
    """
    suite = SUITES[name]
    found = source / "outcomes.json"
    plugin = HERE / "contract_plugin.py"
    (source / plugin.name).write_text(plugin.read_text("utf-8"))
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", plugin.stem, "-n", "0",
            "--tb", "short" if verbose else "no", "-q", "-W", "default",
            "--timeout", "120",
            *(f"tests/api_resources/{file}" for file in suite["files"]),
            *(["-k", only] if only else []),
        ],
        cwd=source,
        env={
            **os.environ,
            "TEST_API_BASE_URL": url + suite["base"],
            "CONTRACT_OUTCOMES": str(found),
            "CONTRACT_MODEL": NAME,
        },
        stdout=None if verbose else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: some failed
        sys.exit(f"pytest ended with {done.returncode}\n{done.stdout or ''}")
    kept = json.loads(found.read_text("utf-8"))
    return kept["outcomes"], kept["left_out"]


def report(
    name: str,
    outcomes: dict[str, str],
    left_out: list[dict[str, Any]],
    all_run: bool,
) -> int:
    """Prints what came out; how many tests did not end as the list says."""
    counts = Counter(outcomes.values())
    version = importlib.metadata.version(name)
    print(f"{name} {version}: {len(outcomes)} tests, {dict(counts)}")
    reasons = {
        pattern: entry["reason"]
        for entry in left_out
        for pattern in entry["tests"]
    }
    matched: Counter[str] = Counter()
    bad = []
    for test, outcome in outcomes.items():
        fits = [p for p in reasons if fnmatch.fnmatchcase(test, p)]
        matched.update(fits)
        if outcome == "failed" and not fits:
            bad.append(f"failed: {test}")
        elif outcome == "passed" and fits:
            bad.append(f"passed, and is left out by {fits[0]}: {test}")
    if all_run:
        bad += [f"no test is like {p}" for p in reasons if not matched[p]]
    for entry in left_out:
        count = sum(matched[p] for p in entry["tests"])
        print(f"  left out, {count}: {entry['reason']}")
    for line in bad:
        print(f"  {line}")
    return len(bad)


if __name__ == "__main__":
    sys.exit(main())
