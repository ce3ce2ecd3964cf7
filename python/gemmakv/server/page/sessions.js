// Conversations: those that the server keeps, or, where it keeps none, those
// of this page. Both have the same functions, and the same records: a session
// with `turns`, a turn with `messages`, `reply`, `usage` and `spent`.

import * as api from "./api.js";

const ALL = "v1/sessions";
const of = (id) => `${ALL}/${encodeURIComponent(id)}`;

export class Kept {
  kept = true;

  // The newest first, with what each branches off, `after` an id.
  list(after) {
    const more = after ? `&after=${encodeURIComponent(after)}` : "";
    return api.get(`${ALL}/tree?limit=100${more}`);
  }

  open(id) {
    return api.get(of(id));
  }

  create(name, system) {
    return api.post(ALL, { name, system: system || null });
  }

  fork(id, turn, name) {
    return api.post(`${of(id)}/fork`, { turn, name });
  }

  rewind(id, turn) {
    return api.post(`${of(id)}/rewind`, { turn });
  }

  rename(id, name) {
    return api.post(of(id), { name: name || null });
  }

  remove(id) {
    return api.remove(of(id));
  }

  exported(id) {
    return api.get(`${of(id)}/export`);
  }

  imported(document) {
    return api.post(`${ALL}/import`, document);
  }

  // The part of a chat request that says what comes after what: the messages
  // after all turns, or in place of the last one, `replaced`.
  request(session, messages, replaced) {
    return { session: session.id, messages, replaces: replaced?.id };
  }

  // A turn that was answered: the server has it already. One that was cut off
  // it has not.
  add() {}
}

export class Local {
  kept = false;
  #sessions = new Map();
  #count = 0;

  async list() {
    const all = [...this.#sessions.values()].reverse();
    return { data: branches(all.map((one) => this.#plain(one))), has_more: false };
  }

  async open(id) {
    return structuredClone(this.#get(id));
  }

  async create(name, system) {
    const now = Date.now() / 1000;
    const id = `page_${++this.#count}`;
    this.#sessions.set(id, {
      id, name, system: system || null, head: null, turn_count: 0,
      created_at: now, updated_at: now, turns: [],
    });
    return this.open(id);
  }

  async fork(id, turn, name) {
    const one = this.#get(id);
    const made = await this.create(name, one.system);
    this.#get(made.id).origin = id;
    return this.#set(made.id, upTo(one.turns, turn));
  }

  async rewind(id, turn) {
    const one = this.#get(id);
    return this.#set(id, turn === null ? [] : upTo(one.turns, turn));
  }

  async rename(id, name) {
    this.#get(id).name = name || null;
    return this.open(id);
  }

  async remove(id) {
    this.#sessions.delete(id);
  }

  async exported(id) {
    const { name, system, turns, created_at } = this.#get(id);
    return {
      format: "gemmakv session", version: 1, name, system, created_at,
      turns: turns.map(({ messages, reply, usage, created_at }) => ({
        messages, reply, usage, system, created_at, finish_reason: "stop",
      })),
    };
  }

  request(session, messages, replaced) {
    const before = without(session.turns, replaced).flatMap(
      (turn) => [...turn.messages, turn.reply]);
    const system = session.system
      ? [{ role: "system", content: session.system }] : [];
    return { messages: [...system, ...before, ...messages] };
  }

  add(id, turn, replaced) {
    const turns = without(this.#get(id).turns, replaced);
    const parent = turns.at(-1)?.id ?? null;
    this.#set(id, [...turns, { ...turn, id: `turn_${++this.#count}`, parent }]);
  }

  #get(id) {
    const found = this.#sessions.get(id);
    if (!found) throw new api.ApiError("This page has no such conversation.");
    return found;
  }

  #set(id, turns) {
    const one = this.#get(id);
    Object.assign(one, {
      turns, head: turns.at(-1)?.id ?? null, turn_count: turns.length,
      updated_at: Date.now() / 1000,
    });
    return this.open(id);
  }

  #plain({ turns, ...one }) {
    return { ...one, path: turns.map((turn) => turn.id) };
  }
}

// What each session, the newest first, branches off: the oldest of those that
// it has the most turns in common with, or else the one that it was made from.
function branches(sessions) {
  const first = new Map();
  const known = new Set(sessions.map((one) => one.id));
  for (const one of [...sessions].reverse()) {
    const shared = one.path.findLast((turn) => first.has(turn)) ?? null;
    one.parent = shared ? first.get(shared)
      : known.has(one.origin) ? one.origin : null;
    one.parent_turn = shared;
    one.parent_turn_count = one.path.indexOf(shared) + 1;
    for (const turn of one.path) {
      if (!first.has(turn)) first.set(turn, one.id);
    }
  }
  return sessions;
}

function without(turns, replaced) {
  return turns.filter((turn) => turn.id !== replaced?.id);
}

function upTo(turns, id) {
  return turns.slice(0, turns.findIndex((turn) => turn.id === id) + 1);
}

// The text of a message, whatever its form.
export function textOf({ content, tool_calls: calls }) {
  const parts = typeof content === "string" ? [content]
    : (content ?? []).map((part) => part.text ?? JSON.stringify(part));
  for (const call of calls ?? []) {
    const { name, arguments: given } = call.function;
    parts.push(`${name}(${
      typeof given === "string" ? given : JSON.stringify(given)})`);
  }
  return parts.join("\n");
}
