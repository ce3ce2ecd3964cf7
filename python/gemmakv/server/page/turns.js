// A turn as it is shown: what was said, the reply, what both took.

import { costNode, tookNode } from "./cost.js";
import { h, number, seconds } from "./dom.js";
import { Markdown, rendered } from "./markdown.js";
import { textOf } from "./sessions.js";

const WHO = { user: "You", system: "Told", developer: "Told", tool: "Tool" };
const ENDS = {
  length: "Cut off at the limit of tokens.",
  deadline: "Cut off at the deadline.",
  stopped: "Stopped.",
};

export const wasCut = (turn) => turn.finish_reason in ENDS;

// `index`: of the turn, from 0. `tools`: nodes for what can be done with it.
export function turnNode(turn, index, tools = []) {
  const end = ENDS[turn.finish_reason];
  return item(index, turn.id,
    [
      ...turn.messages.map(saidNode),
      h("div", { class: "said model" },
        h("p", { class: "who" }, "Model"),
        thoughts(turn.reply.reasoning ?? turn.reply.reasoning_content),
        rendered(textOf(turn.reply)),
        end ? h("p", { class: "end" }, end) : null,
        tookNode(turn)),
      tools.length ? h("div", {
        class: "tools", role: "group", "aria-label": `Turn ${index + 1}`,
      }, ...tools) : null,
    ],
    costNode(turn));
}

function item(index, id, left, right) {
  return h("li", {
    class: "turn", tabindex: "-1", "data-turn": id,
    "aria-label": `Turn ${index + 1}`,
  }, h("div", { class: "talk" }, ...left), right);
}

function saidNode(message) {
  const name = message.role === "tool" && message.name
    ? `Tool ${message.name}` : WHO[message.role] ?? message.role;
  return h("div", { class: `said ${message.role}` },
    h("p", { class: "who" }, name),
    h("div", { class: "plain" }, textOf(message)));
}

function thoughts(text) {
  return text ? h("details", { class: "thoughts" },
    h("summary", {}, "Thoughts"), rendered(text)) : null;
}

// A turn whose reply comes.
export class LiveTurn {
  #text;
  #thought;
  #drawing = false;

  // `begun`, `thought`: what of the reply is there already.
  constructor(text, index, begun = "", thought = "") {
    this.began = performance.now();
    this.first = null; // when the first piece came
    this.pieces = 0;
    this.#text = begun;
    this.#thought = thought;
    const reply = h("div", { class: "markdown" });
    const thoughts = h("div", { class: "markdown" });
    this.#reply = new Markdown(reply);
    this.#thoughts = new Markdown(thoughts);
    this.#fold = h("details", { class: "thoughts", hidden: true },
      h("summary", {}, "Thoughts"), thoughts);
    this.#reply.set(begun);
    this.#state = h("p", { class: "end" }, "Waiting …");
    this.#bar = h("progress", {
      class: "reading", "aria-label": "The prompt, as far as it is computed",
      hidden: true,
    });
    this.#note = h("div", { class: "cost" });
    this.node = item(index, "live", [
      saidNode({ role: "user", content: text }),
      h("div", { class: "said model", "aria-busy": "true" },
        h("p", { class: "who" }, "Model"), this.#fold, reply, this.#state,
        this.#bar),
    ], this.#note);
  }

  #reply; #thoughts; #fold; #state; #bar; #note;

  get text() {
    return this.#text;
  }

  get thought() {
    return this.#thought;
  }

  // How much of the prompt is computed, as the server says it.
  progress({ total, cache, processed, time_ms: took }) {
    if (this.first !== null) return;
    this.#bar.max = total;
    this.#bar.value = processed;
    this.#bar.hidden = processed >= total;
    const done = processed - cache;
    const left = done > 0 && took > 1000
      ? `, about ${seconds(took / 1000 * (total - processed) / done)} to go` : "";
    this.#state.textContent = processed >= total ? "The reply begins …"
      : `Reading the prompt: ${number(processed)} of ${number(total)} tokens${
        left} …`;
  }

  push(text, thought) {
    this.first ??= performance.now();
    this.pieces++;
    this.#text += text;
    this.#thought += thought;
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => this.#draw());
  }

  // What is said of its end, while it stands here.
  end(words) {
    this.#draw();
    this.#bar.hidden = true;
    this.#state.textContent = words;
    this.#state.hidden = !words;
    this.node.querySelector("[aria-busy]").removeAttribute("aria-busy");
  }

  #draw() {
    this.#drawing = false;
    if (this.first === null) return;
    this.#reply.set(this.#text);
    this.#thoughts.set(this.#thought);
    this.#fold.hidden = !this.#thought;
    this.#state.hidden = this.#bar.hidden = true;
    const since = (performance.now() - this.first) / 1000;
    const words = [`first after ${
      ((this.first - this.began) / 1000).toFixed(2)} s`];
    if (since > 0.2) words.push(`${Math.round(this.pieces / since)} pieces/s`);
    this.#note.replaceChildren(h("p", {}, words.join(", ")));
  }
}
