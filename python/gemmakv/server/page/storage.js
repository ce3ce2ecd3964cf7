// What the browser keeps for the page: of a tab, and of all tabs. Where it
// keeps nothing, since that is blocked or full, what was to be kept lasts until
// the page is loaded again, and the page says so.

const NOTHING = "The browser keeps nothing of this page";
const FULL = "The browser has no room for what this page keeps";
const LASTS = "drafts, the key, options and the theme last until it is reloaded.";

let told = () => {};
let trouble = ""; // what has gone wrong so far

// Calls `tell` with what is wrong, now or later; once for each thing.
export function onTrouble(tell) {
  told = tell;
  if (trouble) told(trouble);
}

function failed(error) {
  const full = error.name === "QuotaExceededError"
    || error.name === "NS_ERROR_DOM_QUOTA_REACHED";
  const words = `${full ? FULL : NOTHING}: ${LASTS}`;
  if (words === trouble) return;
  trouble = words;
  told(trouble);
}

class Store {
  #name;
  #held = new Map(); // what the browser does not keep; null: it is gone

  constructor(name) {
    this.#name = name;
  }

  get(key) {
    if (this.#held.has(key)) return this.#held.get(key);
    try {
      return window[this.#name].getItem(key);
    } catch (error) {
      failed(error);
      return null;
    }
  }

  // A null value takes the key away.
  set(key, value) {
    try {
      const store = window[this.#name];
      if (value === null) store.removeItem(key);
      else store.setItem(key, value);
      this.#held.delete(key);
    } catch (error) {
      this.#held.set(key, value);
      failed(error);
    }
  }

  // An object that is kept as JSON; {} where there is none, or it is damaged.
  object(key) {
    try {
      const found = JSON.parse(this.get(key) ?? "{}");
      return found && typeof found === "object" ? found : {};
    } catch {
      return {};
    }
  }
}

export const ofTab = new Store("sessionStorage");
export const ofAll = new Store("localStorage");
