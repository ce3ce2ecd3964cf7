// Requests to the server that the page came from. Paths are relative, so that
// a proxy may have it under a path of its own.

import { ofTab } from "./storage.js";

const KEY = "gemmakv.key"; // of this tab alone

// What the server refused.
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, id = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.id = id;
  }
}

// There was no answer, or it broke off.
export class Offline extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

export const hasKey = () => ofTab.get(KEY) !== null;

export function setKey(key) {
  ofTab.set(KEY, key || null);
}

export async function get(path) {
  return (await send("GET", path)).json();
}

export async function getText(path) {
  return (await send("GET", path)).text();
}

export async function post(path, body) {
  return (await send("POST", path, body)).json();
}

export async function remove(path) {
  return (await send("DELETE", path)).json();
}

// The chunks of a streamed answer.
export async function* stream(path, body, signal) {
  const response = await send("POST", path, body, signal);
  const id = response.headers.get("x-request-id");
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, {
      code: chunk.error.code, id,
    });
    yield chunk;
  }
  throw new Offline(); // it ended without saying so
}

async function send(method, path, body, signal) {
  const headers = {};
  const key = ofTab.get(KEY);
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Offline();
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // A proxy's words, as likely as not.
  }
  return new ApiError(said.message ?? `The server answered ${response.status}.`, {
    status: response.status,
    code: said.code,
    id: response.headers.get("x-request-id") ?? "",
  });
}

// The data of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const lines = frame.split("\n").filter((s) => s.startsWith("data: "));
        if (lines.length) yield lines.map((s) => s.slice(6)).join("\n");
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Offline();
  } finally {
    reader.cancel().catch(() => {});
  }
}
