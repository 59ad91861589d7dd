// The page's start: views, the API key, and one look at the server each second while the page is visible.

import { showRoutes } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";

const KEY = "minisgl.key";
const EACH_MS = 1000;
const PATIENCE_MS = 10000;
const NOTICES = {
  loading: "",
  ready: "",
  draining: "The server is shutting down.",
  gone: "The server does not answer. Trying again each second.",
  key: "The server wants an API key.",
};
const WORDS = { loading: "loading the model", ready: "ready", draining: "shutting down", gone: "no answer", key: "needs a key" };

const at = (id) => document.getElementById(id);

/** fetch() with the key, if there is one. Paths are relative: the page may be served below a prefix. */
function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  return fetch(path, { ...options, headers, cache: "no-store" });
}

// ---- views

function showView() {
  const view = location.hash.slice(1);
  const shown = ["chat", "engine", "api"].includes(view) ? view : "chat";
  document.body.dataset.view = shown;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${shown}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown === "api") showRoutes(call);
  if (shown === "chat") at("message").focus();
}

// ---- the key

function askForKey(wrong) {
  const dialog = at("key-dialog");
  if (dialog.open) return;
  at("key-note").textContent = wrong ? "The key that was given is wrong." : "It is kept in this tab until you close it.";
  dialog.showModal();
}

at("key-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key").value = "";
  look();
});

// ---- the state of the server

const chat = new Chat(call, () => askForKey(true));
const engine = new Engine(call);
let timer = 0;
let looking = false;

function show(state, stats) {
  at("status").dataset.state = state;
  if (at("status").textContent !== WORDS[state]) at("status").textContent = WORDS[state];
  at("notice").textContent = NOTICES[state];
  at("notice").hidden = !NOTICES[state];
  if (stats) {
    at("model").textContent = stats.model;
    document.title = `${stats.model} · minisgl`;
    engine.update(stats);
  } else {
    engine.lose();
  }
  chat.setServer(state, stats?.model);
}

async function look() {
  if (looking) return;
  looking = true;
  clearTimeout(timer);
  try {
    const answer = await call("stats", { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) {
      show("key");
      askForKey(Boolean(sessionStorage.getItem(KEY)));
    } else if (answer.ok) {
      const stats = await answer.json();
      show(stats.status, stats);
    } else {
      show("gone");
    }
  } catch {
    show("gone");
  } finally {
    looking = false;
    if (!document.hidden && !at("key-dialog").open) timer = setTimeout(look, EACH_MS);
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
at("key-dialog").addEventListener("close", () => {
  if (!looking) look();
});
window.addEventListener("hashchange", showView);
showView();
look();
