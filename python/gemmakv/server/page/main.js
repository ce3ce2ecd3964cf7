// The page's beginning, and its keys.

import * as api from "./api.js";
import {
  drawChat, exported, imported, nameOf, removed, rename, startChat, stop,
} from "./chat.js";
import { compareWith, drawCompare } from "./compare.js";
import { $, ask, h } from "./dom.js";
import { showPlots } from "./metrics.js";
import { Kept, Local } from "./sessions.js";
import {
  attempt, draw, drawn, failed, listed, logIn, older, open, openPlace, ready,
  refresh, state,
} from "./state.js";
import { ofAll, onTrouble } from "./storage.js";
import { drawTree, startTree } from "./tree.js";

// Keys that act where nothing is typed.
const KEYS = {
  "?": ["This help", help],
  n: ["A new conversation", () => begin()],
  i: ["To the message", () => $("input").focus()],
  t: ["To the conversations", toTree],
  j: ["To the next turn", () => toTurn(1)],
  k: ["To the turn before", () => toTurn(-1)],
  e: ["Edit the turn", () => onTurn("edit")],
  f: ["Fork at the turn", () => onTurn("fork")],
  r: ["Rewind to the turn", () => onTurn("rewind")],
  a: ["Another reply to the last message", () => onLast("again")],
  g: ["Have the last reply go on", () => onLast("continue")],
  y: ["Copy the turn's reply", () => onTurn("copy")],
  c: ["Compare, or end that", () => state.session && attempt(compareWith)],
  p: ["The server's plots", () => showPlots($("plots").hidden)],
  d: ["Light, dark, or as the system has it", nextTheme],
};
const MORE = {
  Enter: "Sends; with Shift a new line",
  Escape: "Stops the reply, closes what is open",
  "↑ ↓ ← →": "In the conversations: moves, folds",
  "F2, Delete": "In the conversations: renames, deletes",
};
const OFF = "gemmakv.keys-off";

function help() {
  const rows = Object.entries(KEYS).map(([key, [what]]) => [key, what]);
  const list = h("dl", { class: "help" },
    [...rows, ...Object.entries(MORE)].map(([key, what]) =>
      h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what))));
  const off = h("input", {
    type: "checkbox", checked: ofAll.get(OFF) !== null,
    onchange: (event) => ofAll.set(OFF, event.target.checked ? "1" : null),
  });
  return ask({
    title: "Keys", action: "Close", other: null,
    text: [list, h("label", { class: "line" }, off, "No keys of one letter")],
  });
}

async function begin() {
  await open(null);
  drawer(false);
  $("input").focus();
}

function toTree() {
  drawer($("menu").checkVisibility());
  ($("tree").querySelector("[tabindex='0']") ?? $("new")).focus();
}

const turns = () => [...document.querySelectorAll("#turns > .turn")];
const turnHere = () => document.activeElement?.closest?.("#turns > .turn");

function toTurn(step) {
  const all = turns();
  const at = all.indexOf(turnHere());
  const next = at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step;
  all[next]?.focus();
}

function onTurn(what) {
  (turnHere() ?? turns().at(-1))?.querySelector(`[data-do=${what}]`)?.click();
}

function onLast(what) {
  turns().at(-1)?.querySelector(`[data-do=${what}]`)?.click();
}

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey
      || $("dialog").open) return;
  if (event.key === "Escape") {
    if (document.body.classList.contains("drawer")) drawer(false);
    else if (state.running) stop();
    else if (state.other) attempt(open, state.session.id);
    else document.activeElement?.blur();
    return;
  }
  const typing = event.target.closest("input, textarea, select");
  const found = KEYS[event.key];
  if (!found || typing || ofAll.get(OFF) !== null) return;
  event.preventDefault();
  found[1]();
}

function drawer(shown) {
  document.body.classList.toggle("drawer", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
}

const THEMES = ["", "light", "dark"];

function nextTheme() {
  const root = document.documentElement;
  const at = THEMES.indexOf(root.dataset.theme ?? "");
  setTheme(THEMES[(at + 1) % THEMES.length]);
}

function setTheme(theme) {
  const root = document.documentElement;
  if (theme) {
    root.dataset.theme = theme;
  } else {
    delete root.dataset.theme;
  }
  ofAll.set("gemmakv.theme", theme || null);
  $("theme").textContent = theme ? `Theme: ${theme}` : "Theme";
}

function drawHeading() {
  if (state.other) {
    $("title").textContent = `${nameOf(state.session)} | ${nameOf(state.other)}`;
  }
  $("compare-with").textContent = state.other ? "End comparison" : "Compare";
  for (const id of ["rename", "export", "delete"]) $(id).hidden = state.other !== null;
}

let connecting = null;

// One attempt at a time, which whoever needs the server waits for; where it
// fails, the page says so, and the next who asks begins another.
function connected() {
  connecting ??= attempt(connect).finally(() => { connecting = null; });
  return connecting;
}

async function connect() {
  await ready();
  const models = await api.get("v1/models");
  state.model = models.data[0].id;
  $("model").textContent = state.model;
  const props = await api.get("props");
  state.backend = props.sessions ? new Kept() : new Local();
  $("import").hidden = !props.sessions;
  if (!props.sessions) {
    $("not-kept").textContent = "Conversations end with this page: the server "
      + "keeps none. It does when started with --sessions DIR.";
    $("not-kept").hidden = false;
  }
  $("think").hidden = !props.chat_template_caps.supports_thinking;
  const { params } = props.default_generation_settings;
  $("options").querySelector("[name=temperature]").placeholder =
    params.temperature ?? "";
  await listed();
  await openPlace();
}

function start() {
  for (const part of [drawTree, drawChat, drawCompare, drawHeading]) drawn(part);
  startChat(connected);
  startTree(() => drawer(false));
  const clicks = {
    menu: () => drawer(!document.body.classList.contains("drawer")),
    new: begin, more: () => attempt(older), help, theme: nextTheme,
    "show-plots": () => showPlots($("plots").hidden),
    "hide-plots": () => showPlots(false),
    rename: () => attempt(rename), "compare-with": () => attempt(compareWith),
    export: () => attempt(exported), delete: () => attempt(removed),
    import: () => $("file").click(),
    "log-in": async () => {
      if (await logIn()) connected();
    },
  };
  for (const [id, action] of Object.entries(clicks)) {
    $(id).addEventListener("click", action);
  }
  $("file").addEventListener("change", ({ target }) => {
    if (target.files.length) attempt(imported, target.files[0]);
    target.value = "";
  });
  setTheme(document.documentElement.dataset.theme ?? "");
  document.addEventListener("keydown", onKey);
  addEventListener("popstate", () => state.backend && attempt(openPlace));
  addEventListener("focus", () => {
    if (state.backend && !state.running) attempt(refresh);
  });
  addEventListener("unhandledrejection", (event) => failed(event.reason));
  $("log-in").hidden = !api.hasKey();
  onTrouble((words) => {
    $("not-stored").textContent = words;
    $("not-stored").hidden = false;
  });
  draw();
  $("input").focus();
  connected();
}

start();
