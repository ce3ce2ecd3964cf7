// The conversation that is open: its turns, the message, what can be done.

import { ApiError, Offline, stream } from "./api.js";
import { $, ask, h, plural, show, svg } from "./dom.js";
import { textOf } from "./sessions.js";
import {
  allGood, attempt, draftOf, draw, failed, keepDraft, listed, logIn, open, state,
  tell,
} from "./state.js";
import { ofTab } from "./storage.js";
import { LiveTurn, turnNode, wasCut } from "./turns.js";

const input = $("input");
// A turn of this page that ended before its time may still hold the session: to
// the server's next step, or 10 s where the server was killed.
const BUSY_MS = 12_000;
let broke = { session: null, time: 0 };
let shown; // whose draft the input has
let nodes = new Map(); // of turns, by id

// Drawing.

export function drawChat() {
  const { session, running, other } = state;
  const id = session?.id ?? null;
  $("chat").hidden = other !== null;
  $("title").textContent = nameOf(session);
  document.title = session ? `${nameOf(session)} · gemmakv` : "gemmakv";
  $("tools").hidden = session === null;
  $("fresh").hidden = session !== null;
  $("told").hidden = !session?.system;
  $("told").lastElementChild.textContent = session?.system ?? "";
  const here = running?.session === id ? running : null;
  const turns = (session?.turns ?? []).filter(
    (turn) => turn.id !== (here?.live && here.replaced?.id));
  const kept = new Map();
  const items = turns.map((turn, i) => {
    const last = i === turns.length - 1;
    // Where conversations part, the turns of the others are beside this one.
    const forks = [...forksAt(turns[i - 1]?.id ?? null),
      ...last && !here ? forksAt(turn.id) : []];
    const more = last && !here;
    const mark = JSON.stringify(
      [id, i, last, more, forks.map((s) => [s.id, s.name])]);
    let found = nodes.get(turn.id);
    if (found?.mark !== mark) {
      const tools = toolsOf(turn, i, last, more, forks);
      found = { mark, node: turnNode(turn, i, tools) };
    }
    kept.set(turn.id, found);
    return found.node;
  });
  nodes = kept;
  for (const one of new Set([state.ghost, running])) {
    if (one?.live && one.session === id && !turns.some((t) => t.id === one.turn)) {
      items.push(one.live.node);
    }
  }
  const follow = atEnd() || running?.fresh || shown !== id;
  show($("turns"), items);
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  if (running) running.fresh = false;
  if (shown !== id) takeDraft();
  shown = id;
  if (follow) toEnd();
}

export const nameOf = (session) =>
  session === null ? "New conversation" : session.name || "Unnamed";

// What was written and is not answered: what was typed, and in front of it what
// was sent, unless the answer came when nobody looked.
function takeDraft() {
  const { session, running } = state;
  const id = session?.id ?? null;
  let draft = draftOf(id);
  const sent = running?.session === id ? "" : draftOf(sentBy(id));
  if (sent) {
    const last = session?.turns.at(-1)?.messages.at(-1);
    if (!last || textOf(last) !== sent) draft = draft ? `${sent}\n${draft}` : sent;
    keepDraft(sentBy(id), "");
    keepDraft(id, draft);
  }
  input.value = draft;
  grow();
}

const sentBy = (id) => `sent:${id ?? ""}`;

// Conversations that part from this one after a turn; null: at the first.
function forksAt(turn) {
  const { session, sessions } = state;
  const own = sessions.find((one) => one.id === session.id);
  const parent = own?.parent_turn === turn ? own.parent : null;
  return sessions.filter((one) => one.id !== session.id
    && (one.id === parent || (one.parent_turn === turn && (turn !== null
      || one.parent === session.id || (parent && one.parent === parent)))));
}

const forkIcon = () => svg("svg", {
  viewBox: "0 0 16 16", width: 12, height: 12, "aria-hidden": "true",
}, svg("path", { d: "M4 2v12M12 2v2c0 4-8 3-8 7" }));

// `more`: whether there may be another reply, or a longer one.
function toolsOf(turn, i, last, more, forks) {
  const button = (name, hint, action, loud = false) => h("button", {
    class: loud ? "loud" : "quiet", type: "button", "data-do": name.toLowerCase(),
    "aria-label": `${name} turn ${i + 1}`, title: hint,
    onclick: () => attempt(action),
  }, name);
  const others = forks.map((one) => h("button", {
    class: "branch", type: "button", "aria-label": `Go to ${nameOf(one)}`,
    onclick: () => attempt(open, one.id),
  }, forkIcon(), nameOf(one)));
  const plain = turn.messages.length === 1 && turn.messages[0].role === "user";
  return [
    more && plain && goesOn(turn)
      ? button("Continue", "Have the reply go on (g)", () => goOn(turn),
        wasCut(turn)) : null,
    more && plain ? button("Again",
      "Another reply; a fork keeps this one (a)", () => again(turn)) : null,
    plain ? button("Edit", "Say it otherwise (e)", () => edit(turn, i)) : null,
    button("Fork", "Go on from here in another conversation (f)",
      () => fork(turn)),
    last ? null
      : button("Rewind", "Make it the last turn (r)", () => rewind(turn, i)),
    navigator.clipboard ? button("Copy", "Copy the reply (y)",
      () => navigator.clipboard.writeText(textOf(turn.reply))) : null,
    ...others,
  ].filter((one) => one !== null);
}

const goesOn = ({ reply }) => !reply.tool_calls && textOf(reply).trim();

const scroller = $("scroll");
const atEnd = () =>
  scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };

// What can be done.

// What the server takes for no part of a name.
const UNSHOWN = new RegExp("[\\u0000-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f"
  + "\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ufff9-\\ufffb]", "g");

// A conversation's name by its first message; "" if that shows nothing.
function nameFrom(text) {
  const line = text.trim().split("\n")[0].replace(UNSHOWN, " ").trim();
  if (!/[^\s\p{C}]/u.test(line)) return "";
  return [...line].slice(0, 60).join("");
}

function forkName() {
  const before = nameOf(state.session).replace(/ \(\d+\)$/, "");
  const base = [...before].slice(0, 95).join("");
  const names = new Set(state.sessions.map((one) => one.name));
  let i = 2;
  while (names.has(`${base} (${i})`)) i++;
  return `${base} (${i})`;
}

async function go(made) {
  await listed();
  await open(made.id);
  tell();
  input.focus();
}

async function fork(turn) {
  await go(await state.backend.fork(state.session.id, turn.id, forkName()));
}

async function rewind(turn, i) {
  const { session } = state;
  const after = session.turns.length - i - 1;
  const sure = await ask({
    title: `Rewind to turn ${i + 1}?`,
    text: `${plural(after, "turn")} after it will go, unless a fork has them.`,
    action: "Rewind",
  });
  if (!sure) return;
  await go(await state.backend.rewind(session.id, turn.id));
}

function edit(turn, i) {
  const said = $("turns").querySelector(
    `[data-turn="${turn.id}"] .said.user .plain`);
  if (!said) return; // it is being edited
  const { session } = state;
  const field = h("textarea", { "aria-label": `Message of turn ${i + 1}` },
    textOf(turn.messages[0]));
  const close = () => {
    form.replaceWith(said);
    said.closest("li").focus();
  };
  const sent = async (replace) => {
    const text = field.value.trim();
    if (!text || state.running) return;
    const before = session.turns[i - 1]?.id ?? null;
    let { id } = session;
    if (!replace) {
      ({ id } = await state.backend.fork(id, before ?? turn.id, forkName()));
    }
    const made = await state.backend.rewind(id, before);
    close();
    await go(made);
    await send(text);
  };
  const after = session.turns.length - i;
  const form = h("form", { class: "edit", onsubmit: (event) => {
    event.preventDefault();
    attempt(sent, false);
  } }, field, h("div", { class: "buttons" },
    h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
    h("button", {
      type: "button", class: "quiet", onclick: () => attempt(sent, true),
      title: `${plural(after, "turn")} will go, unless a fork has them`,
    }, "Replace"),
    h("button", { type: "submit" }, "Send as a fork")));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (enters(event)) {
      event.preventDefault();
      attempt(sent, false);
    }
  });
  said.replaceWith(form);
  form.scrollIntoView({ block: "nearest" });
  field.focus();
}

// Another reply in place of the last one, which a fork keeps, unless it is the
// same.
async function again(turn) {
  const { session, backend } = state;
  if (state.running) return;
  const fork = await backend.fork(session.id, turn.id, forkName());
  const text = textOf(turn.messages[0]);
  const made = await send(text, { replaced: turn, options: { seed: undefined } });
  if (made && textOf(made.reply) !== textOf(turn.reply)) return;
  await backend.remove(fork.id);
  await listed();
  tell();
  draw();
  if (made) {
    failed(new ApiError("The reply came out the same. With a higher temperature "
      + "(see Options) it may differ."));
  }
}

// The last reply gets longer. One that the model ended goes on for some tokens.
const MORE_TOKENS = 8;

async function goOn(turn) {
  const { content, reasoning_content: said, reasoning = said } = turn.reply;
  await send(textOf(turn.messages[0]), {
    replaced: turn, begun: textOf({ content }), thought: reasoning,
    options: {
      chat_template_kwargs: undefined,
      min_tokens: wasCut(turn) ? undefined : MORE_TOKENS,
    },
  });
}

const enters = (event) =>
  event.key === "Enter" && !event.shiftKey && !event.isComposing;

export async function rename(session = state.session) {
  const found = await ask({
    title: "Rename", action: "Rename",
    fields: [{ name: "name", label: "Name", value: session.name ?? "" }],
  });
  if (!found) return;
  const name = found.name.trim().slice(0, 200);
  await state.backend.rename(session.id, name);
  if (state.session?.id === session.id) state.session.name = name;
  await listed();
  tell();
  draw();
}

export async function removed(session = state.session) {
  const sure = await ask({
    title: `Delete “${nameOf(session)}”?`, action: "Delete",
    text: `${plural(session.turn_count, "turn")} will go, unless a fork has `
      + "them.",
  });
  if (!sure) return;
  await state.backend.remove(session.id);
  keepDraft(session.id, "");
  await listed();
  tell();
  if (state.session?.id === session.id) await open(null);
  else draw();
}

export async function exported() {
  const { id, name } = state.session;
  const data = JSON.stringify(await state.backend.exported(id), null, 1);
  const url = URL.createObjectURL(new Blob([data], { type: "application/json" }));
  h("a", { href: url, download: `${name || id}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export async function imported(file) {
  let document;
  try {
    document = JSON.parse(await file.text());
  } catch {
    throw new ApiError(`${file.name}: expected an exported conversation (JSON).`);
  }
  const made = await state.backend.imported(document);
  await go(made);
  const [first] = made.rendered?.edited ?? [];
  if (first !== undefined) {
    failed(new ApiError(`Turn ${first + 1} of ${file.name} was edited: the model `
      + "reads what is shown from there on."));
  }
}

// A turn.

export function stop() {
  state.running?.controller.abort();
}

// Gives the turn that came of it, or null. `replaced`: the last turn, whose
// place it takes; `begun`, `thought`: what its reply begins with; `options`:
// of the request, instead of those that are chosen.
export async function send(text, { replaced = null, ...more } = {}) {
  if (state.running) return null;
  allGood();
  const running = {
    controller: new AbortController(), fresh: true, live: null, replaced, more,
    session: state.session?.id ?? null, made: null,
  };
  state.running = running;
  state.ghost = null;
  if (!replaced) {
    keepDraft(running.session, "");
    keepDraft(sentBy(running.session), text);
    takeDraft();
  }
  draw();
  try {
    const session = await sessionFor(text, running);
    running.live = new LiveTurn(
      text, session.turns.length - (replaced ? 1 : 0), more.begun, more.thought);
    draw();
    if (replaced) running.live.node.focus(); // its button is gone
    await added(session.id, await answered(session, text, running), running);
  } catch (error) {
    await broken(error, text, running);
  }
  announce("", true);
  await attempt(after, running.session);
  const focused = running.live?.node.contains(document.activeElement);
  state.running = null;
  if (!replaced && (state.session?.id ?? null) === running.session) takeDraft();
  draw();
  if (focused) $("turns").lastElementChild?.focus();
  return running.made;
}

async function added(session, turn, running) {
  await state.backend.add(session, turn, running.replaced);
  running.made = turn;
  if (!running.replaced) keepDraft(sentBy(session), "");
}

// The server's own account of it.
async function after(id) {
  if (id === null) return;
  const found = await state.backend.open(id);
  await listed();
  if (state.session?.id === id) state.session = found;
  tell();
}

// The session that the text goes to, as it is now.
async function sessionFor(text, running) {
  let { session } = state;
  if (session === null) {
    const name = nameFrom(text);
    const made = await state.backend.create(name, $("system").value.trim());
    keepDraft(sentBy(null), "");
    keepDraft(sentBy(made.id), text);
    keepDraft(made.id, draftOf(null));
    keepDraft(null, "");
    running.session = made.id;
    $("system").value = "";
    await open(made.id);
    session = state.session;
  } else if (state.backend.kept) {
    const now = await state.backend.open(session.id);
    if (now.head !== session.head) {
      state.session = now;
      await listed();
      throw new ApiError("This conversation went on in another tab or program. "
        + "Look at it, then try again.");
    }
  }
  return session;
}

// Streams the reply; gives the turn as sessions have it.
async function answered(session, text, running) {
  const message = { role: "user", content: text };
  const { live, controller, replaced, more } = running;
  const messages = more.begun
    ? [message, { role: "assistant", content: more.begun }] : [message];
  const body = {
    ...state.backend.request(session, messages, replaced), ...chosen(),
    ...more.options, stream: true, stream_options: { include_usage: true },
    return_progress: true,
  };
  let reason = "stop", last = {};
  announce("The model replies. ");
  for await (const chunk of patient(body, controller.signal)) {
    last = chunk;
    running.turn = chunk.session?.turn;
    if (chunk.prompt_progress) live.progress(chunk.prompt_progress);
    const [choice] = chunk.choices;
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    const { content = "", reasoning_content: thought = "" } = choice.delta;
    if (content || thought) {
      const follow = atEnd();
      live.push(content, thought);
      announce(content);
      if (follow) requestAnimationFrame(toEnd);
    }
  }
  return turnOf(message, live, reason, last);
}

function turnOf(message, live, reason, { usage, timings, cache }) {
  const reply = { role: "assistant", content: live.text };
  if (live.thought) reply.reasoning = live.thought;
  return {
    messages: [message], reply, finish_reason: reason,
    created_at: Date.now() / 1000,
    usage: usage ? {
      ...usage, cached_tokens: usage.prompt_tokens_details.cached_tokens,
    } : null,
    spent: timings ? {
      ...cache, prefill_s: timings.prompt_ms / 1e3,
      decode_s: timings.predicted_ms / 1e3,
      first_token_s: live.first && (live.first - live.began) / 1e3,
    } : null,
  };
}

// Waits for what may still hold the session.
async function* patient(body, signal) {
  for (;;) {
    const asked = performance.now();
    try {
      yield* stream("v1/chat/completions", body, signal);
      return;
    } catch (error) {
      if (error.code !== "session_busy") throw error;
      if (broke.session !== body.session
          || asked - broke.time > BUSY_MS) {
        throw new ApiError("Another turn runs in this conversation, in another "
          + "tab or program. Nothing of yours is lost; try again when that has "
          + "ended.", error);
      }
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  }
}

// A turn that did not come to its end: what there is of it stays in sight.
async function broken(error, text, running) {
  const { live, session, replaced } = running;
  if (live?.first) state.ghost = running;
  if (error.name === "AbortError" || error instanceof Offline) {
    broke = { session, time: performance.now() };
  }
  if (error.name !== "AbortError") {
    live?.end("Broken off.");
    failed(error);
    if (error.status === 401) await logIn(error.message);
    return;
  }
  if (state.backend.kept) {
    live?.end(replaced
      ? "Stopped. The server keeps whole turns alone: the reply above stays."
      : "Stopped. The server keeps whole turns alone: your message is "
        + "in its box again.");
  } else if (state.ghost === running) {
    state.ghost = null;
    const message = { role: "user", content: text };
    await added(session, turnOf(message, live, "stopped", {}), running);
  }
}

function chosen() {
  const found = {};
  for (const field of $("options").querySelectorAll("input, select")) {
    if (field.closest("[hidden]") || field.value === "") continue;
    if (field.name === "think") {
      found.chat_template_kwargs = { enable_thinking: field.value === "true" };
    } else {
      found[field.name] = Number(field.value);
    }
  }
  return found;
}

// For those who hear the page: whole sentences, now and then.
let unsaid = "";
let saying = null;

function announce(text, ends = false) {
  unsaid += text;
  const say = () => {
    saying = null;
    const end = ends ? unsaid.length
      : Math.max(...[". ", "! ", "? ", "\n"].map((s) => unsaid.lastIndexOf(s)));
    if (end <= 0) return;
    $("live").textContent = unsaid.slice(0, end + 1);
    unsaid = unsaid.slice(end + 1);
  };
  if (ends) {
    clearTimeout(saying);
    say();
  } else {
    saying ??= setTimeout(say, 4000);
  }
}

// The message.

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 240)}px`;
}

// `connected` waits until the server is known, or has been said to be out of
// reach: what is sent before that is not lost.
export function startChat(connected) {
  let waiting = false;
  $("composer").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text || state.running || waiting) return;
    if (!state.backend) {
      waiting = true;
      await connected();
      waiting = false;
      if (!state.backend) return;
      keepDraft(null, "");
    }
    attempt(send, text);
  });
  input.addEventListener("input", () => {
    grow();
    keepDraft(state.session?.id ?? null, input.value);
  });
  input.addEventListener("keydown", (event) => {
    if (!enters(event)) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => {
    stop();
    input.focus();
  });
  const store = "gemmakv.options";
  const fields = [...$("options").querySelectorAll("input, select")];
  const before = ofTab.object(store);
  for (const field of fields) {
    field.value = before[field.name] ?? "";
    field.addEventListener("change", () => ofTab.set(store,
      JSON.stringify(Object.fromEntries(fields.map((f) => [f.name, f.value])))));
  }
}
