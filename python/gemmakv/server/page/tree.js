// Conversations, each fork under the one that it branches off. A tree as
// assistive programs know it: one item is in the tab order, arrows move.

import { removed, rename } from "./chat.js";
import { $, ago, h, plural } from "./dom.js";
import { attempt, open, state } from "./state.js";

const tree = $("tree");
const closed = new Set();
let current = null; // the item that Tab comes to
let opened = null; // the conversation that was open at the last drawing

export function drawTree() {
  const focused = tree.contains(document.activeElement);
  const children = new Map();
  const known = new Set(state.sessions.map((one) => one.id));
  for (const one of state.sessions) {
    const under = known.has(one.parent) ? one.parent : null;
    children.set(under, [...children.get(under) ?? [], one]);
  }
  tree.replaceChildren(...(children.get(null) ?? []).map(
    (one) => item(one, children, 1)));
  $("more").hidden = state.after === null;
  const now = state.session?.id ?? null;
  if (now !== opened || !known.has(current)) {
    current = now ?? state.sessions[0]?.id ?? null;
  }
  opened = now;
  const found = nodeOf(current) ?? items()[0];
  if (found) found.tabIndex = 0;
  if (focused) found?.focus();
}

function item(one, children, level) {
  const forks = children.get(one.id) ?? [];
  const selected = one.id === state.session?.id;
  const unfolded = !closed.has(one.id);
  const at = !one.parent ? "" : one.parent_turn_count
    ? `fork of turn ${one.parent_turn_count}, ` : "fork at the beginning, ";
  const about = `${at}${plural(one.turn_count, "turn")}, ${ago(one.updated_at)}`;
  const name = one.name || "Unnamed";
  return h("li", {
    role: "treeitem", tabindex: "-1", "data-id": one.id, "aria-level": level,
    "aria-selected": String(selected), "aria-label": `${name}, ${about}`,
    "aria-expanded": forks.length ? String(unfolded) : null,
  },
  h("div", { class: "row" },
    forks.length ? h("span", { class: "twig", "aria-hidden": "true" },
      unfolded ? "▾" : "▸") : h("span", { class: "twig" }),
    h("span", { class: "name" }, name),
    h("span", { class: "about" }, about)),
  forks.length && unfolded ? h("ul", { role: "group" },
    forks.map((fork) => item(fork, children, level + 1))) : null);
}

const items = () => [...tree.querySelectorAll("[role=treeitem]")];
const nodeOf = (id) => items().find((one) => one.dataset.id === id);
const sessionOf = (node) =>
  state.sessions.find((one) => one.id === node.dataset.id);

function focusOn(node) {
  if (!node) return;
  makeCurrent(node);
  node.focus();
}

function makeCurrent(node) {
  for (const one of items()) one.tabIndex = -1;
  node.tabIndex = 0;
  current = node.dataset.id;
}

function fold(node, shut) {
  current = node.dataset.id;
  if (shut) closed.add(current);
  else closed.delete(current);
  drawTree();
}

let chosen = null; // called when one was opened

const choose = (node) => attempt(open, node.dataset.id).then(chosen);

const KEYS = {
  ArrowDown: (node, all) => focusOn(all[all.indexOf(node) + 1]),
  ArrowUp: (node, all) => focusOn(all[all.indexOf(node) - 1]),
  Home: (node, all) => focusOn(all[0]),
  End: (node, all) => focusOn(all.at(-1)),
  ArrowRight: (node) => {
    if (node.ariaExpanded === "false") fold(node, false);
    else focusOn(node.querySelector("[role=treeitem]"));
  },
  ArrowLeft: (node) => {
    if (node.ariaExpanded === "true") fold(node, true);
    else focusOn(node.parentElement.closest("[role=treeitem]"));
  },
  Enter: (node) => choose(node),
  " ": (node) => choose(node),
  F2: (node) => attempt(rename, sessionOf(node)),
  Delete: (node) => attempt(removed, sessionOf(node)),
};

export function startTree(then) {
  chosen = then;
  // Also by what is not a key: drawing must not take the focus elsewhere.
  tree.addEventListener("focusin", (event) => {
    const node = event.target.closest("[role=treeitem]");
    if (node) makeCurrent(node);
  });
  tree.addEventListener("keydown", (event) => {
    const node = event.target.closest("[role=treeitem]");
    const action = KEYS[event.key];
    if (!node || !action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    action(node, items());
  });
  tree.addEventListener("click", (event) => {
    const node = event.target.closest("[role=treeitem]");
    if (!node) return;
    current = node.dataset.id;
    if (event.target.closest(".twig") && node.ariaExpanded) {
      fold(node, node.ariaExpanded === "true");
      nodeOf(current).focus();
    } else {
      choose(node);
    }
  });
}
