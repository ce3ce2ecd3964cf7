// What a turn took, as a picture and in words: which tokens the cache gave, from
// which tier, and why not more; how fast the rest was.

import { h, number, plural, seconds, svg } from "./dom.js";

export const TIERS = {
  ram: "RAM", shared: "shared memory", disk: "disk", remote: "remote store",
};

export const WHY = {
  divergent: "new text",
  evicted: "dropped from the cache meanwhile",
  "no resume point": "known, but no saved point is near",
  "cheaper to compute": "computing was quicker than loading",
};

const PLACES = {
  ram: "RAM", shared: "shared memory", disk: "disk", remote: "the remote store",
  cached: "the cache",
};

// Tokens of a turn's prompt by where they came from: [tier or "computed", count].
function partsOf({ usage, spent }) {
  const { prompt_tokens: all, cached_tokens: cached = 0 } = usage;
  const tiers = Object.entries(spent?.cached ?? {});
  const known = tiers.reduce((sum, [, count]) => sum + count, 0);
  if (cached > known) tiers.push(["cached", cached - known]);
  return [...tiers, ["computed", all - cached]].filter(([, n]) => n > 0);
}

// How much of a turn's prompt was cached, as a picture; null where nothing is
// known.
export function costNode(turn) {
  const { prompt_tokens: all, cached_tokens: cached = 0 } = turn.usage ?? {};
  if (!all) return null;
  const parts = partsOf(turn);
  const items = parts.map(([tier, count]) =>
    h("li", {}, h("i", { class: `swatch ${tier}` }),
      `${TIERS[tier] ?? tier} ${number(count)}`));
  return h("div", { class: "cost" },
    h("p", {}, h("b", {}, `${Math.floor((100 * cached) / all)} % cached`)),
    bar(parts, all),
    h("ul", { "aria-label": "Tokens of the prompt" }, items));
}

// What the turn took, in words; null where nothing is known.
export function tookNode(turn) {
  const { usage, spent } = turn;
  if (!usage?.prompt_tokens) return null;
  return h("p", { class: "took" }, `${replyWords(usage, spent)} ${
    promptWords(turn)}`);
}

function replyWords({ completion_tokens: count = 0 }, spent) {
  const words = [plural(count, "token")];
  const first = spent?.first_token_s ?? spent?.prefill_s;
  if (count && first > 0) words.push(`the first after ${seconds(first)}`);
  if (count > 1 && spent?.decode_s > 0) {
    const speed = (count - 1) / spent.decode_s;
    words.push(`then ${number(Number(speed.toPrecision(2)))} a second`);
  }
  return `${words.join(", ")}.`;
}

function promptWords(turn) {
  const { usage, spent } = turn;
  const all = plural(usage.prompt_tokens, "token");
  const parts = partsOf(turn);
  const places = parts.filter(([tier]) => tier !== "computed");
  const [, computed] = parts.find(([tier]) => tier === "computed") ?? [];
  const why = spent?.miss_reason;
  const rest = why ? ` (${WHY[why] ?? why})` : "";
  if (!places.length) return `The prompt of ${all} was computed${rest}.`;
  const where = places.map(([tier, count], i) =>
    `${i ? "" : "the first "}${number(count)} came from ${PLACES[tier] ?? tier}`);
  if (computed) where.push(`${number(computed)} were computed${rest}`);
  const end = where.length > 1 ? ` and ${where.pop()}` : "";
  return `Of the prompt’s ${all}, ${where.join(", ")}${end}.`;
}

function bar(parts, all) {
  let x = 0;
  const rects = parts.map(([tier, count]) => {
    const width = (100 * count) / all;
    const rect = svg("rect", {
      class: tier, x: `${x}%`, width: `${width}%`, height: 6,
    });
    x += width;
    return rect;
  });
  return svg("svg", { class: "bar", height: 6, "aria-hidden": "true" }, rects);
}
