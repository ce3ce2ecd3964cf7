"""`gemmakv serve --profile`: /metrics says where the time of steps goes."""

from __future__ import annotations

import re
from pathlib import Path

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, make_app, post

SERIES = re.compile(
    r'gemmakv_step_seconds_total\{part="(\w+)",phase="(\w+)"\} (\S+)'
)
BODY = {"model": NAME, "messages": USER, "max_tokens": 8}


def test_time_of_steps_by_part(talker_path: Path) -> None:
    gemma = gemmakv.Gemma.load(talker_path, threads=2, profile=True)
    app = make_app(gemma)
    assert post(app, "/v1/chat/completions", BODY).status_code == 200
    text = get(app, "/metrics").text
    found = {(phase, part): float(s) for part, phase, s in SERIES.findall(text)}
    assert {phase for phase, _ in found} == {"prefill", "decode"}
    assert all(seconds > 0 for seconds in found.values())
    profile = gemma.profile()
    for name, phase in profile.phases():
        told = sum(s for (of, _), s in found.items() if of == name)
        assert told <= phase.seconds * 1.001
        assert f'gemmakv_steps_total{{phase="{name}"}} {phase.steps}' in text
        assert f'gemmakv_step_rows_total{{phase="{name}"}} {phase.rows}' in text
        assert f'gemmakv_step_loops_total{{phase="{name}"}} ' in text
    assert "# TYPE gemmakv_step_seconds_total counter" in text


def test_nothing_is_told_of_steps_that_are_not_timed(app: App) -> None:
    assert post(app, "/v1/chat/completions", BODY).status_code == 200
    text = get(app, "/metrics").text
    assert "# TYPE gemmakv_step_seconds_total counter" in text
    assert not re.search(r"^gemmakv_step", text, re.MULTILINE)


def test_threads_by_node(talker_path: Path, app: App) -> None:
    assert 'gemmakv_threads{node="any",pinned="false"} ' in (
        get(app, "/metrics").text
    )
    gemma = gemmakv.Gemma.load(talker_path, threads=1, pin_threads=True)
    node = gemma.thread_placement.nodes[0]
    line = f'gemmakv_threads{{node="{node}",pinned="true"}} 1'
    assert line in get(make_app(gemma), "/metrics").text
