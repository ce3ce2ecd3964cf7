// Elements, made of nodes and texts alone: no text ever becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// h("button", {class: "quiet", onclick: f}, "Text", node, null)
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) {
      node.addEventListener(name.slice(2), value);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat().filter((one) => one !== null));
  return node;
}

// Has `parent` show these children. Those that stay are not touched, so that
// focus and selection stay, too.
export function show(parent, children) {
  const wanted = new Set(children);
  for (const one of [...parent.childNodes]) {
    if (!wanted.has(one)) one.remove();
  }
  children.forEach((one, i) => {
    if (parent.childNodes[i] !== one) {
      parent.insertBefore(one, parent.childNodes[i] ?? null);
    }
  });
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

export const number = (value) => value.toLocaleString("en");

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value >= 90) return `${Math.round(value / 60)} min`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; value >= 1024 && i + 1 < units.length; i++) value /= 1024;
  return `${value < 10 && i ? value.toFixed(1) : Math.round(value)} ${units[i]}`;
}

export function ago(time) {
  const s = Math.max(0, Date.now() / 1000 - time);
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return new Date(time * 1000).toLocaleDateString();
}

// A dialog of text and fields. `fields`: {name, label, value}; gives their
// values when the button `action` was pressed, else null.
export function ask({ title, text = [], fields = [], action, other = "Cancel" }) {
  const dialog = $("dialog");
  const inputs = fields.map(({ name, label, value = "", type = "text" }) =>
    h("label", {}, label, h("input", {
      name, type, value, autocomplete: "off", required: type === "password",
    })));
  const form = h("form", { method: "dialog" },
    h("h2", { id: "dialog-title" }, title),
    ...[text].flat().map((one) =>
      typeof one === "string" ? h("p", {}, one) : one),
    ...inputs,
    h("div", { class: "buttons" },
      other === null ? null : h("button", {
        type: "button", class: "quiet", onclick: () => dialog.close(""),
      }, other),
      h("button", { type: "submit", value: "yes" }, action)));
  dialog.replaceChildren(form);
  dialog.returnValue = "";
  return new Promise((resolve) => {
    // By hand: the page's policy lets no form be sent anywhere.
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close("yes");
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.target.tagName !== "SELECT") return;
      event.preventDefault(); // else it would open the list
      form.requestSubmit();
    });
    dialog.addEventListener("close", () => {
      const yes = dialog.returnValue === "yes";
      resolve(yes ? Object.fromEntries(new FormData(form)) : null);
    }, { once: true });
    dialog.showModal();
    dialog.scrollTop = 0; // what has the focus may be far below
    form.querySelector("input")?.select();
  });
}
