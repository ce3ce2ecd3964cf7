// What the page shows, and what changes that. Parts of the page draw
// themselves anew when told so.

import { ApiError, Offline, getText, setKey } from "./api.js";
import { $, ask } from "./dom.js";
import { ofTab } from "./storage.js";

export const state = {
  backend: null, // of sessions.js
  model: "",
  sessions: [], // the newest first
  after: null, // the last of them, where there are older ones
  pages: 1, // of the list, that are shown
  session: null, // with its turns; null: one that is to begin
  other: null, // what it is compared with
  running: null, // the turn that is being answered
  ghost: null, // one that was stopped, and is not kept
};

const parts = [];
export const drawn = (part) => parts.push(part);

export function draw() {
  for (const part of parts) part();
}

// Other tabs of this browser.
const tabs = new BroadcastChannel("gemmakv");
tabs.onmessage = () => attempt(refresh);
export const tell = () => tabs.postMessage("changed");

export async function listed() {
  const all = [];
  let after = null;
  for (let i = 0; i < state.pages; i++) {
    const page = await state.backend.list(after);
    all.push(...page.data);
    after = page.has_more ? page.last_id : null;
    if (after === null) break;
  }
  state.sessions = all;
  state.after = after;
}

export async function older() {
  state.pages++;
  await listed();
  draw();
}

export async function open(id, other = null) {
  [state.session, state.other] = await Promise.all([
    id === null ? null : state.backend.open(id),
    other === null ? null : state.backend.open(other),
  ]);
  state.ghost = null;
  const place = id === null ? "" : other === null ? id : `${id}+${other}`;
  if (location.hash.slice(1) !== place) {
    history.pushState(null, "", place ? `#${place}` : location.pathname);
  }
  draw();
}

// What stands in the address; what is gone is a new conversation.
export async function openPlace() {
  const [id, other] = location.hash.slice(1).split("+");
  try {
    await open(id || null, other || null);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    await open(null);
    failed(error);
  }
}

// Has what is shown be what the server has.
export async function refresh() {
  const { session, other } = state;
  const again = async (one) => {
    if (one === null) return null;
    try {
      return await state.backend.open(one.id);
    } catch (error) {
      if (error.status === 404) return undefined;
      throw error;
    }
  };
  const [, one, two] = await Promise.all([
    listed(), again(session), again(other),
  ]);
  if (session !== state.session || other !== state.other) return draw();
  if (one === undefined) {
    await open(null);
    failed(new ApiError("This conversation was deleted elsewhere."));
    return;
  }
  state.session = one;
  state.other = two ?? null;
  draw();
}

// Drafts, by conversation: they outlive a reload of the tab.
const DRAFTS = "gemmakv.drafts";
const drafts = () => ofTab.object(DRAFTS);

export const draftOf = (id) => drafts()[id ?? ""] ?? "";

export function keepDraft(id, text) {
  const all = drafts();
  if (text) all[id ?? ""] = text;
  else delete all[id ?? ""];
  ofTab.set(DRAFTS, JSON.stringify(all));
}

// What went wrong is one line at the message.
export function failed(error) {
  const id = error.id ? ` (request ${error.id})` : "";
  $("error").textContent = error.message + id;
  $("error").hidden = false;
  if (error instanceof Offline) reconnect();
  else if (!(error instanceof ApiError)) console.error(error);
}

export function allGood() {
  $("error").hidden = true;
}

// An action of somebody: its errors are told, a missing key is asked for.
export async function attempt(action, ...args) {
  for (;;) {
    try {
      return await action(...args);
    } catch (error) {
      if (error.status !== 401 || !(await logIn(error.message))) {
        failed(error);
        return undefined;
      }
    }
  }
}

let asking = null;

export async function logIn(why = "") {
  asking ??= ask({
    title: "API key",
    text: [
      "This server asks for a key. It stays in this tab and ends with it.",
      ...(why ? [why] : []),
    ],
    fields: [{ name: "key", label: "Key", type: "password" }],
    action: "Log in",
  });
  const found = await asking;
  asking = null;
  $("log-in").hidden = false;
  if (found === null) return false;
  setKey(found.key.trim());
  return true;
}

let waiting = false;

async function reconnect() {
  if (waiting) return;
  waiting = true;
  $("status").textContent = "The server does not answer; trying again …";
  for (let wait = 500; ; wait = Math.min(wait * 1.5, 5000)) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      await getText("health");
      break;
    } catch (error) {
      if (error.status === 503) {
        $("status").textContent = `${error.message} …`;
      }
    }
  }
  waiting = false;
  $("status").textContent = "";
  allGood();
  if (state.backend) await attempt(refresh);
}

// Waits for a server that loads its model.
export async function ready() {
  for (;;) {
    try {
      await getText("health");
      $("status").textContent = "";
      return;
    } catch (error) {
      if (!(error instanceof Offline) && error.status !== 503) throw error;
      $("status").textContent = error instanceof Offline
        ? "The server does not answer; trying again …" : `${error.message} …`;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}
