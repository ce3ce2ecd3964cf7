"""The page at /, in Chromium with a real server."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.kept import KEYS
from support.raw_http import read_until, request_of, unread
from support.remote_tier import free_port
from support.server_process import ServerProcess
from support.waits import LIMIT_S

LIMIT_MS = 1000 * LIMIT_S
LONG = "Tell me about it, and leave nothing out, please. " * 20


@pytest.fixture(scope="module")
def server(
    talker_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with ServerProcess(
        "-m", talker_path, "--max-model-len", 400_000,
        "--default-max-tokens", 24, "--default-temperature", 0,
        "--sessions", tmp_path_factory.mktemp("page") / "kept",
    ) as found:  # fmt: skip
        yield found
        assert found.process.poll() is None, found.log


@pytest.mark.parametrize(
    "path",
    [
        "/page/", "/page", "/page/none.js", "/page/../_page.py",
        "/page/..%2f_page.py", "/page/%2e%2e/_page.py", "/page//main.js",
        "/page/..", "/../etc/passwd", "/page/%2fetc%2fpasswd",
        "/page/main.js/", "/index.html",
    ],
)  # fmt: skip
def test_no_other_files(server: ServerProcess, path: str) -> None:
    # As it is: other clients would put it right first.
    http = HTTPConnection("127.0.0.1", server.port)
    http.request("GET", path)
    answer = http.getresponse()
    said = answer.read()
    assert answer.status == 404, said
    assert json.loads(said)["error"]["message"]
    http.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    tools = pytest.importorskip(
        "playwright.sync_api", reason="Playwright drives the browser"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with tools.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=LIMIT_MS
        )
        yield found
        found.close()


Tab = Callable[..., Any]


@pytest.fixture(scope="module")
def usual(browser: Any) -> Iterator[Any]:
    """The browser that tests take one after the other."""
    context = browser.new_context()
    yield context
    context.close()


@pytest.fixture
def tab(browser: Any, usual: Any, server: ServerProcess) -> Iterator[Tab]:
    """Opens tabs: the first one in the usual browser, unless it has options,
    others in browsers of their own, or `beside` another. None may have an
    error in its console but for the statuses that are `allowed`.
    """
    contexts, pages, found = [], [], []

    def opened(
        path: str = "/",
        *,
        url: str = server.url,
        beside: Any = None,
        allowed: tuple[int, ...] = (),
        **options: Any,
    ) -> Any:
        if beside:
            context = beside.context
        elif options or pages:
            context = browser.new_context(**options)
            contexts.append(context)
        else:
            context = usual
        page = context.new_page()
        pages.append(page)
        page.set_default_timeout(LIMIT_MS)

        def note(message: Any) -> None:
            text = message.text
            status = re.search(r"responded with a status of (\d+)", text)
            gone = "net::ERR_" in text and 0 in allowed
            if message.type in ("error", "warning") and not gone and not (
                status and int(status[1]) in allowed
            ):
                found.append(f"{message.type}: {text}")

        page.on("console", note)
        page.on("pageerror", lambda error: found.append(str(error)))
        page.goto(url + path)
        return page

    yield opened
    for page in pages:
        if page.context is usual and not page.is_closed():
            page.evaluate("localStorage.clear()")
            page.close()
    for context in contexts:
        context.close()
    assert not found


def expect(of: Any) -> Any:
    from playwright.sync_api import expect

    expect.set_options(timeout=LIMIT_MS)
    return expect(of)


def say(page: Any, text: str) -> None:
    """Sends a message, and waits for the whole reply."""
    before = page.locator("#turns > .turn").count()
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    turn = page.locator("#turns > .turn").nth(before)
    expect(turn.locator(".tools")).to_be_visible()


def turns_of(page: Any) -> list[str]:
    replies = page.locator("#turns > .turn .said.model .markdown")
    return [text.strip() for text in replies.all_inner_texts()]


def begun(page: Any, *texts: str) -> str:
    """A new conversation with these messages; its id."""
    page.get_by_role("button", name="New conversation").click()
    for text in texts:
        say(page, text)
    return str(page.evaluate("location.hash.slice(1)"))


def session(server: ServerProcess, id: str) -> dict[str, Any]:
    return dict(server.get(f"/v1/sessions/{id}").json())


@pytest.mark.slow
def test_stream_and_reload(tab: Tab, server: ServerProcess) -> None:
    page = tab()
    page.evaluate("""() => {
      window.seen = new Set();
      new MutationObserver(() => {
        const last = [...document.querySelectorAll(".turn .markdown")].at(-1);
        if (last) window.seen.add(last.textContent.length);
      }).observe(document.getElementById("turns"),
                 {subtree: true, childList: true, characterData: true});
    }""")
    page.locator("#options summary").click()
    # A reply comes by and by; a busy browser takes in much of it at once.
    for tokens in (3_000, 30_000, 150_000):
        page.get_by_role("button", name="New conversation").click()
        page.get_by_label("What the model is told first").fill("Be brief.")
        page.evaluate("window.seen.clear()")
        page.get_by_label("Longest reply, tokens").fill(str(tokens))
        say(page, LONG)
        seen = page.evaluate("[...window.seen]")
        if any(0 < length < max(seen) for length in seen):
            break
    else:
        raise AssertionError(f"{tokens} tokens came at once")
    page.get_by_label("Longest reply, tokens").fill("30")
    say(page, "And then?")
    id = page.evaluate("location.hash.slice(1)")
    found = session(server, id)
    assert found["system"] == "Be brief." and LONG.startswith(found["name"])
    replies = [turn["reply"]["content"].strip() for turn in found["turns"]]
    assert turns_of(page) == replies
    spent = found["turns"][1]["spent"]
    used = found["turns"][1]["usage"]
    assert sum(spent["cached"].values()) == used["cached_tokens"] > 500
    cost = page.locator("#turns > .turn").nth(1).locator(".cost")
    expect(cost).to_contain_text(f"RAM {used['cached_tokens']:,}")
    took = page.locator("#turns > .turn").nth(1).locator(".took")
    expect(took).to_have_text(re.compile(
        rf"^{used['completion_tokens']} tokens, the first after \d.* m?s, then "
        r"[\d,.]+ a second\. Of the prompt’s "
        rf"{used['prompt_tokens']:,} tokens, the first "
        rf"{used['cached_tokens']:,} came from RAM and \d+ were "
        r"computed \(.+\)\.$"
    ))
    page.get_by_label("Your message").fill("not sent yet")
    page.reload()
    expect(page.get_by_label("Your message")).to_have_value("not sent yet")
    expect(page.locator("#turns > .turn")).to_have_count(2)
    assert turns_of(page) == replies
    expect(page.get_by_role("heading", level=2).first).to_have_text(
        found["name"]
    )
    page.locator("#told summary").click()
    expect(page.locator("#told p")).to_have_text("Be brief.")


@pytest.mark.slow
def test_fork_edit_rewind_compare(tab: Tab, server: ServerProcess) -> None:
    page = tab()
    id = begun(page, "first", "second", "third")
    page.get_by_role("button", name="Fork turn 2").click()
    expect(page.locator("#turns > .turn")).to_have_count(2)
    fork = page.evaluate("location.hash.slice(1)")
    assert fork != id and session(server, fork)["name"] == "first (2)"
    say(page, "another third")
    item = page.get_by_role("treeitem", name="first (2), fork of turn 2")
    expect(item).to_have_attribute("aria-level", "2")
    expect(item).to_have_attribute("aria-selected", "true")
    # From the turn where they part to the other one.
    page.get_by_role("button", name="Go to first", exact=True).click()
    expect(page.locator("#turns")).to_contain_text("third")
    expect(page.get_by_role("button", name="Go to first (2)")).to_be_visible()
    # What was said otherwise is another branch.
    page.get_by_role("button", name="Edit turn 2").click()
    field = page.get_by_label("Message of turn 2")
    expect(field).to_have_value("second")
    field.fill("second, otherwise")
    field.press("Enter")
    expect(page.get_by_role("heading", level=2).first).to_have_text("first (3)")
    turn = page.locator("#turns > .turn").nth(1)
    expect(turn).to_contain_text("second, otherwise")
    expect(turn.locator(".tools")).to_be_visible()
    edited = session(server, page.evaluate("location.hash.slice(1)"))
    said = [turn["messages"][0]["content"] for turn in edited["turns"]]
    assert said == ["first", "second, otherwise"]
    assert len(session(server, id)["turns"]) == 3
    # Side by side.
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Conversation", exact=True).select_option(value=id)
    page.get_by_role("dialog").get_by_role("button", name="Compare").click()
    expect(page.locator("#compare summary").first).to_have_text(
        "1 turn in common"
    )
    pairs = page.locator("#compare .pairs > .pair")
    expect(pairs).to_have_count(2)
    halves = pairs.first.locator(".half")
    expect(halves.nth(0)).to_contain_text("second, otherwise")
    expect(halves.nth(1)).to_contain_text("second")
    expect(pairs.nth(1)).to_contain_text("No turn 3.")
    boxes = [halves.nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.reload()
    expect(pairs).to_have_count(2)
    page.get_by_role("button", name="Go on with first", exact=True).click()
    # Back, after a question.
    page.get_by_role("button", name="Rewind turn 1").click()
    expect(page.get_by_role("dialog")).to_contain_text("2 turns after it")
    page.get_by_role("button", name="Cancel").click()
    assert len(session(server, id)["turns"]) == 3
    page.get_by_role("button", name="Rewind turn 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Rewind").click()
    expect(page.locator("#turns > .turn")).to_have_count(1)
    assert len(session(server, id)["turns"]) == 1
    # In place of what was there.
    page.get_by_role("button", name="Edit turn 1").click()
    page.get_by_label("Message of turn 1").fill("first of all")
    page.get_by_role("button", name="Replace").click()
    expect(page.locator(".said.user").first).to_contain_text("first of all")
    expect(page.get_by_role("button", name="Copy turn 1")).to_be_visible()
    assert page.evaluate("location.hash.slice(1)") == id
    # A name, a file, and the end.
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name", exact=True).fill("Trip")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("treeitem", name="Trip, 1 turn")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "Trip.json"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    item = page.get_by_role("treeitem", name="Trip, 1 turn")
    expect(item).to_have_count(0)
    assert server.get(f"/v1/sessions/{id}").status_code == 404
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(download.value.path())
    expect(item).to_have_attribute("aria-selected", "true")
    expect(page.locator(".said.user").first).to_contain_text("first of all")
    expect(page.locator("#error")).to_be_hidden()
    edited = json.loads(Path(download.value.path()).read_text("utf-8"))
    edited["turns"][0]["messages"][0]["content"] = "something else"
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files({
        "name": "edited.json", "mimeType": "application/json",
        "buffer": json.dumps(edited).encode(),
    })  # fmt: skip
    expect(page.locator(".said.user").first).to_contain_text("something else")
    expect(page.locator("#error")).to_contain_text("Turn 1 of edited.json was")


def name_of(page: Any) -> Any:
    return page.get_by_role("heading", level=2).first


@pytest.mark.slow
def test_again(tab: Tab, server: ServerProcess) -> None:
    """Another reply comes into the place of the last one, which a fork has."""
    page = tab()
    page.locator("#options summary").click()
    page.get_by_label("Temperature").fill("1.5")
    page.get_by_label("Seed").fill("3")
    id = begun(page, "river", "second")
    before = session(server, id)["turns"]
    expect(page.get_by_role("button", name="Again turn 1")).to_have_count(0)
    page.get_by_role("button", name="Again turn 2").click()
    former = page.get_by_role("button", name="Go to river (2)")
    expect(former).to_be_visible()
    expect(page.locator("#turns > .turn")).to_have_count(2)
    expect(page.locator("#turns > .turn").last).to_be_focused()
    now = session(server, id)["turns"]
    assert now[0] == before[0] and now[1]["parent"] == before[0]["id"]
    assert now[1]["messages"] == before[1]["messages"]
    assert now[1]["reply"] != before[1]["reply"]
    assert turns_of(page)[1] == now[1]["reply"]["content"].strip()
    # A draft is nobody's business.
    page.get_by_label("Your message").fill("a draft")
    former.click()
    expect(name_of(page)).to_have_text("river (2)")
    fork = page.evaluate("location.hash.slice(1)")
    assert session(server, fork)["turns"] == before
    page.get_by_role("button", name="Go to river", exact=True).click()
    expect(page.get_by_label("Your message")).to_have_value("a draft")
    # So it is with the first turn, where they have none in common.
    page.get_by_label("Your message").fill("")
    alone = begun(page, "alone")
    page.keyboard.press("Escape")
    page.keyboard.press("a")
    page.get_by_role("button", name="Go to alone (2)").click()
    expect(name_of(page)).to_have_text("alone (2)")
    item = page.get_by_role("treeitem", name="alone (2), fork at the beginning")
    expect(item).to_have_attribute("aria-level", "2")
    page.get_by_role("button", name="Go to alone", exact=True).click()
    expect(name_of(page)).to_have_text("alone")
    # The same reply again is told, and kept once.
    page.get_by_label("Temperature").fill("0")
    say(page, "cold")
    page.get_by_role("button", name="Again turn 2").click()
    expect(page.get_by_role("alert")).to_contain_text("came out the same")
    expect(page.get_by_role("treeitem", name="alone (")).to_have_count(1)
    assert len(session(server, alone)["turns"]) == 2


@pytest.mark.slow
def test_an_again_that_fails_leaves_all_as_it_was(
    tab: Tab, server: ServerProcess
) -> None:
    page = tab(allowed=(400,))
    id = begun(page, "failing")
    before = session(server, id)["turns"]
    page.locator("#options summary").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Again turn 1").click()
    expect(page.get_by_role("alert")).to_contain_text("temperature")
    expect(page.get_by_role("button", name="Again turn 1")).to_be_visible()
    expect(page.get_by_role("treeitem", name="failing (")).to_have_count(0)
    # Stopped while the prompt is computed.
    page.get_by_label("Temperature").fill("1")
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.get_by_role("button", name="Again turn 1").click()
    live = page.locator("[data-turn=live]")
    expect(live).to_contain_text("Waiting")
    expect(live).to_be_focused()
    expect(page.locator("#turns > .turn")).to_have_count(1)
    expect(page.get_by_role("button", name="Again")).to_have_count(0)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Again turn 1")).to_be_visible()
    expect(page.get_by_role("treeitem", name="failing (")).to_have_count(0)
    assert len(held) == 1
    assert session(server, id)["turns"] == before


@pytest.mark.slow
def test_continue(tab: Tab, server: ServerProcess) -> None:
    """The reply gets longer where it stands."""
    page = tab()
    page.locator("#options summary").click()
    page.get_by_label("Longest reply, tokens").fill("5")
    id = begun(page, "first")
    [short] = session(server, id)["turns"]
    assert short["finish_reason"] == "length"
    turn = page.locator("#turns > .turn")
    expect(turn).to_contain_text("Cut off at the limit of tokens.")
    page.get_by_label("Your message").fill("a draft")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Continue turn 1").click()
    expect(page.locator(f"[data-turn={short['id']}]")).to_have_count(0)
    expect(page.get_by_role("button", name="Continue turn 1")).to_be_visible()
    expect(page.get_by_label("Your message")).to_have_value("a draft")
    [longer] = session(server, id)["turns"]
    text = short["reply"]["content"]
    assert longer["reply"]["content"].startswith(text)
    assert len(longer["reply"]["content"]) > len(text)
    assert turns_of(page) == [longer["reply"]["content"].strip()]
    assert "min_tokens" not in asked.value.post_data_json
    # One that the model ended goes on, too.
    document = {
        "format": "gemmakv session", "version": 1, "name": "ended",
        "turns": [{
            "messages": [{"role": "user", "content": "hello"}],
            "reply": {
                "role": "assistant", "content": "Over.", "reasoning": "Hm.",
            },
            "finish_reason": "stop",
        }],
    }  # fmt: skip
    made = server.post("/v1/sessions/import", document).json()
    page.goto(server.url + "/#" + made["id"])
    expect(name_of(page)).to_have_text("ended")
    page.get_by_label("Your message").fill("")
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("g")
    assert asked.value.post_data_json["min_tokens"] > 0
    expect(page.locator(f"[data-turn={made['head']}]")).to_have_count(0)
    expect(page.get_by_role("button", name="Continue turn 1")).to_be_visible()
    [turn] = session(server, made["id"])["turns"]
    assert turn["reply"]["content"].startswith("Over.")
    assert turn["reply"]["reasoning"] == "Hm."


def streamed(*chunks: dict[str, Any]) -> dict[str, Any]:
    """An answer of these chunks, which then breaks off."""
    return {
        "status": 200, "headers": {"content-type": "text/event-stream"},
        "body": "".join(f"data: {json.dumps(one)}\n\n" for one in chunks),
    }  # fmt: skip


def test_progress_is_shown(tab: Tab) -> None:
    page = tab()
    told = {"total": 4000, "cache": 1000, "processed": 1500, "time_ms": 2000}
    chunks: list[dict[str, Any]] = [{
        "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        "prompt_progress": told,
    }]  # fmt: skip
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        const bar = document.querySelector("[data-turn=live] progress");
        const state = document.querySelector("[data-turn=live] .end");
        if (bar?.checkVisibility()) {
          window.seen.push([bar.value, bar.max, state.textContent]);
        }
      }).observe(document.getElementById("turns"),
                 {subtree: true, childList: true, attributes: true});
    }""")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(**streamed(*chunks)),
    )
    page.get_by_label("Your message").fill("long")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_label("Your message").press("Enter")
    assert asked.value.post_data_json["return_progress"] is True
    expect(page.get_by_role("alert")).to_be_visible()
    seen = page.evaluate("window.seen")
    words = "Reading the prompt: 1,500 of 4,000 tokens, about 10 s to go …"
    assert seen and seen[-1] == [1500, 4000, words]
    expect(page.locator("#turns progress:visible")).to_have_count(0)


@pytest.mark.slow
def test_progress_of_a_real_prompt(tab: Tab) -> None:
    page = tab()
    page.evaluate("""() => {
      const real = fetch;
      window.said = new Promise((resolve) => {
        window.fetch = async (...asked) => {
          const answer = await real(...asked);
          if (asked[0] === "v1/chat/completions") {
            answer.clone().text().then(resolve);
          }
          return answer;
        };
      });
    }""")
    say(page, LONG)
    text = page.evaluate("window.said")
    before, found, after = text.partition('"prompt_progress"')
    assert found and not re.search(r'"content":"[^"]', before)
    assert re.search(r'"content":"[^"]', after)


@pytest.mark.slow
def test_stop(tab: Tab, server: ServerProcess) -> None:
    page = tab(allowed=(409,))  # until the server is done with it
    id = begun(page, "one")
    page.locator("#options summary").click()
    page.get_by_label("Longest reply, tokens").fill("300000")
    page.get_by_label("Your message").fill("a long one")
    # Stopped by the page itself: each of its later updates takes longer.
    page.evaluate("""() => new MutationObserver((_, observer) => {
      const text = [
        ...document.querySelectorAll("[data-turn=live] .markdown")].at(-1);
      const stop = document.getElementById("stop");
      if (!text?.textContent || stop.hidden) return;
      observer.disconnect();
      stop.click();
    }).observe(document.body,
               {subtree: true, childList: true, characterData: true})""")
    page.get_by_role("button", name="Send", exact=True).click()
    live = page.locator("[data-turn=live]")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(live).to_contain_text("The server keeps whole turns alone")
    expect(page.get_by_label("Your message")).to_have_value("a long one")
    assert len(session(server, id)["turns"]) == 1
    page.get_by_label("Longest reply, tokens").fill("12")
    page.get_by_label("Your message").press("Enter")  # at once
    expect(page.get_by_role("button", name="Copy turn 2")).to_be_visible()
    expect(page.locator("#turns > .turn")).to_have_count(2)
    assert len(session(server, id)["turns"]) == 2


NASTY = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

A **bold <b>word</b>** and `code <i>` and a [link](javascript:alert(1)).

1. one
2. two **strong**
   - inner

```html
<svg onload="window.hacked = 1"></svg>
```

**not closed
"""


def test_texts_stay_texts(tab: Tab, server: ServerProcess) -> None:
    document = {
        "format": "gemmakv session", "version": 1,
        "name": NASTY.replace("\n", " ")[:100],
        "system": NASTY,
        "turns": [
            {
                "messages": [{"role": "user", "content": NASTY}],
                "reply": {
                    "role": "assistant", "content": NASTY, "reasoning": NASTY,
                },
                "finish_reason": "stop",
            }
        ],
    }  # fmt: skip
    made = server.post("/v1/sessions/import", document).json()
    page = tab("/#" + made["id"])
    reply = page.locator("#turns .said.model > .markdown")
    expect(reply).to_contain_text('<img src=x onerror="window.hacked = 1">')
    expect(reply.locator("strong").first).to_have_text("bold <b>word</b>")
    expect(reply.locator("p code")).to_have_text("code <i>")
    expect(reply.locator("pre code")).to_have_text(
        '<svg onload="window.hacked = 1"></svg>'
    )
    expect(reply.locator("ol > li")).to_have_count(2)
    expect(reply.locator("ol ul > li")).to_have_text("inner")
    expect(reply).to_contain_text("**not closed")
    expect(page.locator("#turns .said.user .plain")).to_have_text(NASTY)
    assert page.locator(
        "main script, main img, main a, main i:not(.swatch), main b b, "
        "#tree img, #tree script, .markdown svg"
    ).count() == 0
    thoughts = page.locator("#turns .thoughts")
    expect(thoughts).not_to_have_attribute("open", "")
    thoughts.locator("summary").click()
    expect(thoughts.locator("strong").first).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_streamed_thoughts(tab: Tab) -> None:
    """Of a model that thinks, as the server says them."""
    page = tab()
    pieces = [
        {"reasoning_content": "Let me "}, {"reasoning_content": "see."},
        {"content": "It **is**"}, {"content": " so."},
    ]  # fmt: skip
    chunks = [
        {"choices": [{"index": 0, "delta": one, "finish_reason": None}]}
        for one in pieces
    ]
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200, headers={"content-type": "text/event-stream"},
            body=": ping\n\n" + body,
        ),
    )  # fmt: skip
    page.get_by_label("Your message").fill("Is it?")
    page.get_by_label("Your message").press("Enter")
    # It breaks off: what there is stays in sight, and so does the message.
    live = page.locator("[data-turn=live]")
    expect(live.locator("strong")).to_have_text("is")
    expect(live.locator(".thoughts")).not_to_have_attribute("open", "")
    live.locator("summary").click()
    expect(live.locator(".thoughts")).to_contain_text("Let me see.")
    expect(page.get_by_label("Your message")).to_have_value("Is it?")


@pytest.mark.slow
def test_two_tabs(tab: Tab, server: ServerProcess) -> None:
    one = tab()
    id = begun(one, "hello")
    two = tab("/#" + id, beside=one, allowed=(409,))
    expect(two.locator("#turns > .turn")).to_have_count(1)
    say(one, "more")
    expect(two.locator("#turns > .turn")).to_have_count(2)  # told by the other
    # While a turn runs elsewhere, nobody says more. It stands still: its
    # client does not read.
    with unread(server.port) as other:
        body = {
            "session": id, "stream": True, "max_tokens": 300_000,
            "messages": [{"role": "user", "content": "long"}],
        }  # fmt: skip
        other.sendall(request_of("/v1/chat/completions", body))
        read_until(other, b'"content"')
        two.get_by_label("Your message").fill("me too")
        two.get_by_label("Your message").press("Enter")
        expect(two.get_by_role("alert")).to_contain_text("in another tab")
        expect(two.get_by_role("alert")).to_contain_text("request req_")
        expect(two.get_by_label("Your message")).to_have_value("me too")


@pytest.mark.slow
def test_another_browser_went_on(tab: Tab, server: ServerProcess) -> None:
    """Nobody answers to what they have not seen."""
    one = tab()
    id = begun(one, "hello")
    other = tab("/#" + id)
    expect(other.locator("#turns > .turn")).to_have_count(1)
    say(one, "meanwhile")
    other.get_by_label("Your message").fill("late")
    other.get_by_label("Your message").press("Enter")
    expect(other.get_by_role("alert")).to_contain_text("went on in another")
    expect(other.locator("#turns > .turn")).to_have_count(2)
    expect(other.get_by_label("Your message")).to_have_value("late")
    other.get_by_label("Your message").press("Enter")
    expect(other.get_by_role("button", name="Copy turn 3")).to_be_visible()
    # A tab that is come back to looks again.
    one.evaluate("window.dispatchEvent(new Event('focus'))")
    expect(one.locator("#turns > .turn")).to_have_count(3)
    httpx.delete(f"{server.url}/v1/sessions/{id}", timeout=LIMIT_S)


def test_sent_before_the_server_has_answered(
    tab: Tab, server: ServerProcess
) -> None:
    """The first message waits for the page's own first requests."""
    page = tab("blank", url="about:")
    held: list[Any] = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.goto(server.url)
    while not held:
        page.wait_for_timeout(10)
    message = page.get_by_label("Your message")
    expect(message).to_be_focused()
    page.keyboard.type("early")
    for _ in range(3):
        page.keyboard.press("Enter")
    expect(message).to_have_value("early")
    assert len(held) == 1
    held[0].continue_()
    expect(page.get_by_role("button", name="Copy turn 1")).to_be_visible()
    expect(page.locator("#turns > .turn")).to_have_count(1)
    expect(message).to_have_value("")


def test_sent_where_the_server_fails_at_first(
    tab: Tab, server: ServerProcess
) -> None:
    page = tab("blank", url="about:", allowed=(500,))
    failures: list[str] = []

    def fail(route: Any) -> None:
        failures.append(f"failure {len(failures) + 1}")
        said = {"error": {"message": failures[-1]}}
        route.fulfill(status=500, json=said)

    page.route("**/v1/models", fail)
    page.goto(server.url)
    alert = page.get_by_role("alert")
    expect(alert).to_have_text("failure 1")
    message = page.get_by_label("Your message")
    message.fill("early")
    message.press("Enter")
    expect(alert).to_have_text("failure 2")  # until then another is ignored
    expect(message).to_have_value("early")
    page.unroute("**/v1/models")
    message.press("Enter")
    expect(page.get_by_role("button", name="Copy turn 1")).to_be_visible()
    expect(message).to_have_value("")


@pytest.mark.slow
def test_keyboard_alone(tab: Tab) -> None:
    page = tab()
    keys = page.keyboard
    expect(page.get_by_label("Your message")).to_be_focused()
    keys.type("by keys")
    keys.press("Shift+Enter")
    keys.type("alone")
    keys.press("Enter")
    expect(page.get_by_role("button", name="Copy turn 1")).to_be_visible()
    expect(page.locator(".said.user .plain")).to_have_text("by keys\nalone")
    keys.type("again")
    keys.press("Enter")
    expect(page.get_by_role("button", name="Copy turn 2")).to_be_visible()
    keys.press("Escape")  # out of the message
    keys.press("k")
    keys.press("k")
    expect(page.locator("#turns > .turn").first).to_be_focused()
    keys.press("f")
    expect(page.get_by_role("heading", level=2).first).to_have_text(
        "by keys (2)"
    )
    keys.press("Escape")
    keys.press("t")
    fork = page.get_by_role("treeitem", name="by keys (2)")
    expect(fork).to_be_focused()
    keys.press("ArrowLeft")
    parent = page.get_by_role("treeitem", name="by keys, 2 turns")
    expect(parent).to_be_focused()
    keys.press("ArrowLeft")
    expect(parent).to_have_attribute("aria-expanded", "false")
    expect(fork).to_have_count(0)
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    expect(fork).to_be_focused()
    keys.press("F2")
    keys.type("By Tab")
    keys.press("Enter")
    fork = page.get_by_role("treeitem", name="By Tab, fork of turn 1")
    expect(fork).to_be_focused()
    keys.press("ArrowUp")
    keys.press("Enter")
    expect(page.locator("#turns > .turn")).to_have_count(2)
    keys.press("c")
    page.get_by_role("dialog").wait_for()
    keys.press("Enter")
    expect(page.locator("#compare .pairs > .pair")).to_have_count(1)
    keys.press("Escape")
    expect(page.locator("#compare")).to_be_hidden()
    keys.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Fork at the turn")
    keys.press("Escape")
    keys.press("p")
    expect(page.get_by_role("complementary", name="The server")).to_be_visible()
    keys.press("p")
    # Everything that can be clicked is in the order of Tab.
    page.evaluate("document.activeElement.blur()")
    page.evaluate("""() => {
      window.seen = [];
      document.addEventListener("focusin", ({target}) =>
        window.seen.push(target.ariaLabel || target.textContent.trim()));
    }""")
    for _ in range(40):
        keys.press("Tab")
    seen = page.evaluate("window.seen")
    for name in (
        "New conversation", "Server", "Theme", "Keyboard shortcuts", "Rename",
        "Compare", "Export", "Delete", "Edit turn 1", "Fork turn 1",
        "Rewind turn 1", "Go to By Tab", "Options", "Send",
    ):  # fmt: skip
        assert any(name in one for one in seen), (name, seen)
    fork = page.get_by_role("treeitem", name="By Tab")
    fork.focus()
    page.evaluate("import('./page/tree.js').then((tree) => tree.drawTree())")
    expect(fork).to_be_focused()
    keys.press("Delete")
    expect(page.get_by_role("dialog")).to_contain_text("Delete “By Tab”?")
    keys.press("Tab")  # from what does no harm
    keys.press("Enter")
    expect(fork).to_have_count(0)


def wide(page: Any) -> bool:
    """Whether something is beyond the right edge."""
    return bool(page.evaluate(
        "document.documentElement.scrollWidth > innerWidth || "
        "[...document.querySelectorAll('body *')].some(e => e.checkVisibility()"
        " && !e.closest('.unseen, pre, .skip, svg') && "
        "e.getBoundingClientRect().right > innerWidth + 1)"
    ))


@pytest.mark.slow
def test_narrow(tab: Tab) -> None:
    page = tab(viewport={"width": 360, "height": 740})
    say(page, "x" * 300 + " " + LONG)
    assert not wide(page)
    page.get_by_role("button", name="Fork turn 1").click()
    expect(page.get_by_role("heading", level=2).first).to_contain_text("(2)")
    say(page, "on")
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_role("tree")).to_be_visible()
    assert not wide(page)
    page.get_by_role("treeitem").first.click(position={"x": 60, "y": 10})
    expect(page.get_by_role("tree")).to_be_hidden()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("dialog").get_by_role("button", name="Compare").click()
    expect(page.locator("#compare .pairs > .pair")).to_have_count(1)
    assert not wide(page)
    page.get_by_role("button", name="Server").click()
    expect(page.locator("#figures figure").first).to_be_visible()
    assert not wide(page)
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Keyboard shortcuts").click()
    assert not wide(page)
    heading = page.get_by_role("dialog").get_by_role("heading")
    expect(heading).to_be_in_viewport()


@pytest.mark.slow
def test_fingers_find_what_they_press(tab: Tab) -> None:
    page = tab(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    say(page, "hello")
    page.locator("#options summary").tap()
    small = """() => [...document.querySelectorAll(
      "button, summary, input, select, textarea, [role=treeitem] > .row")]
      .filter((one) => one.checkVisibility())
      .map((one) => [one.getBoundingClientRect(), one.outerHTML])
      .filter(([box]) => Math.min(box.width, box.height) < 36)
      .map(([, text]) => text)"""
    assert page.evaluate(small) == []
    assert not wide(page)
    page.get_by_role("button", name="Conversations").tap()
    expect(page.get_by_role("tree")).to_be_visible()
    assert page.evaluate(small) == []


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext(
    "2d", {willReadFrequently: true});
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) =>
    v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found[3] === 255) return found;
    }
    return rgb("white");
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some(
      (one) => one.nodeType === 3 && one.data.trim());
    if (!text || !node.checkVisibility() || node.closest(".unseen, .skip")) {
      continue;
    }
    const style = getComputedStyle(node);
    const color = node.closest("svg") ? style.fill : style.color;
    const [a, b] = [rgb(color), behind(node)].map(light).sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push([node.outerHTML.slice(0, 80), ratio]);
  }
  return poor;
}"""
NAMELESS = """() => [...document.querySelectorAll(
  "button, input, textarea, select, [role=img], [role=tree], [role=treeitem]")]
  .filter((one) => one.checkVisibility() && !(one.ariaLabel
    || one.textContent.trim() || one.labels?.length))
  .map((one) => one.outerHTML)"""


@pytest.mark.slow
def test_colors_and_names(tab: Tab) -> None:
    # Without motion a color is there at once.
    page = tab(color_scheme="dark", reduced_motion="reduce")
    say(page, LONG)
    page.locator("#options summary").click()
    page.get_by_role("button", name="Server").click()
    expect(page.locator("#figures figure")).to_have_count(4)
    shade = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(251, 250, 248)", "rgb(21, 23, 26)"
    for scheme, color in (("dark", dark), ("light", light)):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(shade) == color
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(NAMELESS) == []
    theme = page.get_by_role("button", name="Theme")
    theme.click()
    expect(theme).to_have_text("Theme: light")
    assert page.evaluate(shade) == light
    theme.click()
    page.reload()
    assert page.evaluate(shade) == dark
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate("localStorage.length") == 0


@pytest.mark.slow
def test_plots(tab: Tab) -> None:
    page = tab()
    page.get_by_role("button", name="Server").click()
    figures = page.locator("#figures figure")
    expect(figures).to_have_count(4)
    say(page, LONG)
    say(page, LONG)
    for name, unit in (
        ("Tokens a second", r"\d"), ("Time to the first token", r"\d m?s"),
        ("Hit rate of prompts", r"\d %"), ("Prefix cache", r"RAM \d+.* [KM]iB"),
    ):  # fmt: skip
        figure = figures.filter(has_text=name)
        expect(figure.locator("figcaption")).to_have_text(re.compile(unit))
        drawing = figure.get_by_role("img")
        expect(drawing).to_have_attribute("aria-label", re.compile(name))
        expect(figure.locator(".dot").first).to_be_attached()
    expect(page.locator("#figures .line.rate")).to_have_attribute(
        "points", re.compile(r"\d,\d+.* .*\d,")
    )
    expect(page.locator("#numbers")).to_contain_text("%")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#plots")).to_be_hidden()


@pytest.mark.slow
def test_keys_and_nothing_kept(
    tab: Tab, talker_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("\n".join(KEYS), "utf-8")
    with ServerProcess(
        "-m", talker_path, "--max-model-len", 400_000,
        "--default-max-tokens", 12, "--default-temperature", 0,
        "--api-key-file", tmp_path / "keys",
    ) as own:  # fmt: skip
        page = tab(url=own.url, allowed=(401,))
        dialog = page.get_by_role("dialog")
        for key in ("nobody's", KEYS[1]):
            expect(dialog).to_be_visible()
            page.get_by_label("Key", exact=True).fill(key)
            dialog.get_by_role("button", name="Log in").click()
        expect(page.locator("#not-kept")).to_contain_text("--sessions DIR")
        expect(page.locator("#model")).to_have_text("talker")
        where = page.evaluate(
            "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), "
            "document.cookie, location.href]"
        )
        assert [KEYS[1] in one for one in where] == [False, True, False, False]
        # The same things can be done.
        say(page, "first " + LONG)
        say(page, "second")
        cost = page.locator("#turns > .turn").nth(1).locator(".cost")
        expect(cost).to_contain_text("RAM")
        took = page.locator("#turns > .turn").nth(1).locator(".took")
        expect(took).to_contain_text("the first after")
        page.get_by_role("button", name="Fork turn 1").click()
        expect(page.locator("#turns > .turn")).to_have_count(1)
        say(page, "another")
        expect(
            page.get_by_role("treeitem", name="(2), fork of turn 1")
        ).to_be_visible()
        page.get_by_role("button", name="Compare").click()
        dialog.get_by_role("button", name="Compare").click()
        expect(page.locator("#compare")).to_contain_text("1 turn in common")
        page.get_by_role("button", name="End comparison").click()
        page.get_by_role("button", name="Rewind turn 1").click()
        dialog.get_by_role("button", name="Rewind").click()
        expect(page.locator("#turns > .turn")).to_have_count(1)
        # Another reply to the last message, and a longer one.
        page.locator("#options summary").click()
        page.get_by_label("Temperature").fill("1.5")
        [former] = turns_of(page)
        page.get_by_role("button", name="Again turn 1").click()
        expect(page.get_by_role("button", name="Again turn 1")).to_be_visible()
        [now] = turns_of(page)
        assert now != former
        expect(
            page.get_by_role("treeitem", name="fork at the beginning")
        ).to_have_count(1)
        page.get_by_role("button", name="Continue turn 1").click()
        expect(page.get_by_role("button", name="Again turn 1")).to_be_visible()
        expect(page.locator("#turns > .turn")).to_have_count(1)
        [longer] = turns_of(page)
        assert longer.startswith(now) and len(longer) > len(now)
        page.get_by_label("Temperature").fill("0")
        # What was read of a reply that was stopped stays in the page.
        page.get_by_label("Longest reply, tokens").fill("300000")
        page.get_by_label("Your message").fill("long")
        page.get_by_label("Your message").press("Enter")
        live = page.locator("[data-turn=live] .markdown").last
        expect(live).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.locator("#turns > .turn")).to_have_count(2)
        expect(page.get_by_role("button", name="Copy turn 2")).to_be_visible()


def test_errors_are_a_line(tab: Tab) -> None:
    page = tab(allowed=(400, 404))
    page.locator("#options summary").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_label("Your message").fill("too cold")
    page.get_by_label("Your message").press("Enter")
    alert = page.get_by_role("alert")
    expect(alert).to_have_text(
        re.compile(r"^temperature: expected .* \(request req_\w+\)$")
    )
    expect(page.get_by_label("Your message")).to_have_value("too cold")
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Your message").press("Enter")
    expect(page.get_by_role("button", name="Copy turn 1")).to_be_visible()
    expect(alert).to_be_hidden()
    page.goto(page.url.partition("#")[0] + "#sess_none")
    expect(alert).to_contain_text("there is no 'sess_none'")


@pytest.mark.slow
def test_server_goes_and_comes(
    tab: Tab, talker_path: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = (
        "-m", talker_path, "--default-max-tokens", 300_000,
        "--default-temperature", 0, "--sessions", tmp_path / "kept",
        "--port", port,
    )  # fmt: skip
    with ServerProcess(*options) as own:
        page = tab(
            url=own.url, allowed=(0, 409, 503)
        )
        page.get_by_label("Your message").fill("do not lose me")
        page.get_by_label("Your message").press("Enter")
        live = page.locator("[data-turn=live]")
        expect(live.locator(".markdown").last).not_to_be_empty()
        page.get_by_label("Your message").fill("nor me")
        own.signal(signal.SIGKILL)
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        expect(live).to_contain_text("Broken off")
        expect(page.get_by_label("Your message")).to_have_value(
            "do not lose me\nnor me"
        )
        status = page.locator("#status")
        expect(status).to_contain_text("trying again")
    with ServerProcess(*options, "--default-max-tokens", 8):
        expect(status).to_be_empty()
        expect(page.get_by_role("alert")).to_be_hidden()
        page.get_by_label("Your message").press("Enter")
        expect(page.get_by_role("button", name="Copy turn 1")).to_be_visible()


BLOCKED = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, {
    get() { throw new DOMException("blocked", "SecurityError"); },
  });"""
FULL = """Storage.prototype.setItem = () => {
  throw new DOMException("full", "QuotaExceededError");
};"""


@pytest.mark.parametrize("script, words", [
    (BLOCKED, "The browser keeps nothing of this page"),
    (FULL, "The browser has no room for what this page keeps"),
])  # fmt: skip
def test_a_browser_that_keeps_nothing(
    browser: Any, server: ServerProcess, script: str, words: str
) -> None:
    """Once the page stayed empty where site data were blocked."""
    context = browser.new_context()
    context.add_init_script(script)
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    begun(page, "first")
    page.get_by_role("button", name="Theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.get_by_label("Your message").fill("a draft")
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_label("Your message")).to_have_value("")
    page.go_back()
    expect(page.get_by_label("Your message")).to_have_value("a draft")
    expect(page.locator("#not-stored")).to_contain_text(words)
    context.close()
    assert not errors


def test_damaged_site_data_are_nothing(
    browser: Any, server: ServerProcess
) -> None:
    context = browser.new_context()
    context.add_init_script(
        'for (const key of ["gemmakv.drafts", "gemmakv.options"])'
        ' sessionStorage.setItem(key, "{");'
    )
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    begun(page, "first")
    expect(page.locator("#not-stored")).to_be_hidden()
    context.close()
    assert not errors


@pytest.mark.slow
def test_any_text_may_begin_a_conversation(
    tab: Tab, server: ServerProcess
) -> None:
    """Names are made of it, and not of all that it may hold."""
    page = tab()
    for text, name in (
        ("\u202eone\ttwo", "one two"), ("\u200b", None),
        ("x" * 59 + "\U0001f642" * 3, "x" * 59 + "\U0001f642"),
    ):  # fmt: skip
        id = begun(page, text)
        assert session(server, id)["name"] == name
