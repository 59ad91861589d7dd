// The conversation.

import { make, render } from "./markdown.js";

const SAVED = "minisgl.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const NEAR_END_PX = 80;

const at = (id) => document.getElementById(id);

/** The data of each server-sent event of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** An answer while it arrives: its place in the page, its text and its times. */
class Answer {
  constructor(log) {
    this.text = "";
    this.thought = "";
    this.began = performance.now();
    this.first = 0;
    this.usage = null;
    this.reason = "";
    this.thoughtBox = make("p");
    this.thoughts = make("details", { class: "thought", open: "" }, make("summary", {}, "Reasoning"), this.thoughtBox);
    this.body = make("div", { class: "text" });
    this.foot = make("div", { class: "foot" });
    this.element = make("article", { class: "turn assistant streaming", "aria-label": "Answer" }, this.body, this.foot);
    this.log = log;
    log.append(this.element);
  }

  add(event) {
    this.usage = event.usage ?? this.usage;
    for (const { delta, finish_reason: reason } of event.choices ?? []) {
      this.reason = reason ?? this.reason;
      const thought = delta?.reasoning_content ?? delta?.reasoning ?? "";
      if (!(delta?.content || thought)) continue;
      this.first ||= performance.now();
      this.text += delta.content ?? "";
      this.thought += thought;
      this.draw();
    }
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
      if (this.thought) {
        this.element.prepend(this.thoughts);
        this.thoughtBox.textContent = this.thought;
        if (this.text && !this.folded) this.thoughts.open = !(this.folded = true);
      }
      render(this.body, this.text);
      if (follow) this.log.scrollTop = this.log.scrollHeight;
    });
  }

  end(note) {
    this.element.classList.remove("streaming");
    this.draw();
    const facts = [];
    if (this.usage) {
      const seconds = (performance.now() - this.first) / 1000;
      facts.push(`${this.usage.completion_tokens} tokens`);
      if (this.usage.completion_tokens > 1) facts.push(`${((this.usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (this.first) facts.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (this.reason === "length") facts.push("cut at the limit of tokens");
    if (note) facts.push(note);
    if (this.text) this.foot.append(this.copyButton());
    this.foot.append(...facts.map((fact) => make("span", {}, fact)));
  }

  fail(message) {
    this.end();
    this.element.append(make("p", { class: "error", role: "alert" }, message));
  }

  copyButton() {
    const button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(this.text);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Copying is not allowed";
      }
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    return button;
  }
}

export class Chat {
  constructor(call, onWrongKey) {
    this.call = call;
    this.onWrongKey = onWrongKey;
    this.turns = [];
    this.stopper = null;
    this.ready = false;
    this.model = "";
    this.bind();
    this.restore();
  }

  bind() {
    const message = at("message");
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    message.addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    at("stop").addEventListener("click", () => this.stop());
    at("new").addEventListener("click", () => this.reset());
    at("settings-toggle").addEventListener("click", ({ currentTarget }) => {
      at("settings").hidden = !at("settings").hidden;
      currentTarget.setAttribute("aria-expanded", String(!at("settings").hidden));
    });
    at("settings").addEventListener("input", () => this.save());
    at("settings").addEventListener("submit", (event) => event.preventDefault());
  }

  fit() {
    const message = at("message");
    message.style.height = "auto";
    message.style.height = `${message.scrollHeight + 2}px`;
    this.update();
  }

  save() {
    localStorage.setItem(SAVED, JSON.stringify(Object.fromEntries(new FormData(at("settings")))));
  }

  restore() {
    try {
      const saved = JSON.parse(localStorage.getItem(SAVED) ?? "{}");
      for (const [name, value] of Object.entries(saved)) {
        if (at("settings").elements[name]) at("settings").elements[name].value = value;
      }
    } catch {
      localStorage.removeItem(SAVED);
    }
  }

  setServer(state, model) {
    this.ready = state === "ready";
    this.model = model ?? this.model;
    at("hint").textContent = state === "loading" ? "The model is being loaded." : "";
    this.update();
  }

  update() {
    at("send").disabled = !this.ready || !at("message").value.trim();
    at("send").hidden = Boolean(this.stopper);
    at("stop").hidden = !this.stopper;
  }

  stop() {
    this.stopper?.abort();
  }

  reset() {
    this.stop();
    this.turns = [];
    at("log").replaceChildren(at("empty") ?? this.empty);
    at("message").focus();
  }

  body() {
    const form = at("settings").elements;
    const system = form.system.value.trim();
    const numbers = NUMBERS.filter((name) => form[name].value !== "").map((name) => [name, Number(form[name].value)]);
    return {
      model: this.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.turns],
      stream: true,
      stream_options: { include_usage: true },
      ...Object.fromEntries(numbers),
    };
  }

  async send() {
    const text = at("message").value.trim();
    if (!text || !this.ready || this.stopper) return;
    if (!at("settings").checkValidity()) {
      at("settings").hidden = false;
      at("settings").reportValidity();
      return;
    }
    const turns = this.turns;
    turns.push({ role: "user", content: text });
    at("message").value = "";
    this.stopper = new AbortController();
    this.fit();
    if (at("empty")) (this.empty = at("empty")).remove();
    const log = at("log");
    log.append(make("article", { class: "turn user", "aria-label": "You" }, make("div", { class: "text" }, text)));
    log.setAttribute("aria-busy", "true");
    const answer = new Answer(log);
    log.scrollTop = log.scrollHeight;
    const answered = await this.receive(answer);
    if (answered) turns.push({ role: "assistant", content: answer.text });
    else if (turns.pop() && !at("message").value) at("message").value = text;
    this.stopper = null;
    log.setAttribute("aria-busy", "false");
    this.fit();
  }

  /** True if there is an answer to go on with, whole or not. */
  async receive(answer) {
    const { signal } = this.stopper;
    try {
      const response = await this.call("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(this.body()),
        signal,
      });
      if (!response.ok) {
        if (response.status === 401) this.onWrongKey();
        answer.fail(await messageOf(response));
        return false;
      }
      let ended = false;
      for await (const data of events(response)) {
        if ((ended = data === "[DONE]")) break;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        answer.add(event);
      }
      if (!ended) throw new Error("The connection ended before the answer did.");
      answer.end();
    } catch (error) {
      if (signal.aborted) answer.end("stopped");
      else answer.fail(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
    return answer.text !== "";
  }
}
