// What the engine does, from /stats each second and /plan once.

import { make } from "./markdown.js";

const KEPT = 121; // samples, one a second
const MINUTE = 60;
const LATENCIES = { ttft: "First token", tpot: "Later tokens", e2e: "Whole answer", queue: "In the queue" };
const WIDTH = 360;
const HEIGHT = 62;
const FLOOR = 46;

const at = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

function put(id, text) {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text;
}

function draw(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function rate(value) {
  return value === null ? "–" : value >= 100 || value === 0 ? whole.format(Math.round(value)) : value.toFixed(1);
}

export function duration(seconds) {
  if (seconds < 0.001) return `${Number((seconds * 1e6).toPrecision(2))} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(2))} ms`;
  return seconds < 100 ? `${Number(seconds.toPrecision(2))} s` : `${Math.round(seconds)} s`;
}

function age(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The value below which a share of the observations lies, by a line through its bucket. */
export function quantile(share, bounds, counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  let below = 0;
  for (const [index, count] of counts.entries()) {
    if (count && below + count >= share * total) {
      if (index === bounds.length) return bounds[index - 1];
      const low = index ? bounds[index - 1] : 0;
      return low + ((bounds[index] - low) * (share * total - below)) / count;
    }
    below += count;
  }
  return 0;
}

export class Engine {
  constructor(call) {
    this.call = call;
    this.samples = [];
    this.window = "start";
    this.planned = "";
    for (const button of document.querySelectorAll("[data-window]")) {
      button.addEventListener("click", () => this.choose(button.dataset.window));
    }
  }

  choose(window) {
    this.window = window;
    for (const button of document.querySelectorAll("[data-window]")) {
      button.setAttribute("aria-pressed", String(button.dataset.window === window));
    }
    if (this.samples.length) this.showLatency();
  }

  /** The server does not answer: nothing that is shown is true any more, except what has been. */
  lose() {
    for (const id of ["running", "waiting", "rate-generated", "rate-prompt"]) put(id, "–");
  }

  update(stats) {
    const last = this.samples.at(-1);
    if (last && stats.uptime_s < last.uptime_s) [this.samples, this.planned] = [[], ""]; // another server by now
    this.samples.push(stats);
    if (this.samples.length > KEPT) this.samples.shift();
    this.showLoad(stats);
    this.showThroughput();
    this.showLatency();
    this.showTotals(stats);
    if (stats.engine) {
      this.showPool(stats.engine);
      this.loadPlan();
    }
  }

  /** Tokens per second between two samples; null where there is none. */
  rate(kind, index) {
    const [before, after] = [this.samples[index - 1], this.samples[index]];
    if (!before || !after) return null;
    return (after.tokens[kind] - before.tokens[kind]) / Math.max(after.uptime_s - before.uptime_s, 0.001);
  }

  showLoad({ engine }) {
    const now = this.samples.length - 1;
    put("running", engine ? whole.format(engine.running) : "–");
    put("waiting", engine ? whole.format(engine.waiting) : "–");
    put("rate-generated", rate(this.rate("generated", now)));
    put("rate-prompt", rate(this.rate("prompt", now)));
  }

  showThroughput() {
    const rates = this.samples.map((_, index) => this.rate("generated", index) ?? 0);
    const most = Math.max(...rates, 1);
    const [width, height, top] = [WIDTH, 76, 14];
    const x = (index) => width - ((rates.length - 1 - index) * width) / (KEPT - 1);
    const y = (value) => height - ((height - top) * value) / most;
    const points = rates.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const label = `peak ${rate(most === 1 ? Math.max(...rates) : most)}`;
    at("throughput").replaceChildren(
      draw(
        "svg",
        { viewBox: `0 0 ${width} ${height + 1}`, role: "img", "aria-label": `Generated tokens per second, ${label}` },
        draw("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
        draw("polygon", { class: "area", points: `${x(0).toFixed(1)},${height} ${points} ${width},${height}` }),
        draw("polyline", { class: "line", points }),
        draw("text", { x: 0, y: 9 }, label),
      ),
    );
  }

  showPool({ kv, prefix_cache: cache, preemptions }) {
    const free = kv.total_tokens - kv.used_tokens - kv.cached_tokens;
    const share = (tokens) => `${((100 * tokens) / kv.total_tokens).toFixed(1)} %`;
    const amount = (tokens) => `${whole.format(tokens)} · ${share(tokens)}`;
    put("kv-total", `${whole.format(kv.total_tokens)} tokens, pages of ${kv.page_size}`);
    put("kv-used", amount(kv.used_tokens));
    put("kv-cached", amount(kv.cached_tokens));
    put("kv-free", amount(free));
    const hits = cache.query_tokens ? `${((100 * cache.hit_tokens) / cache.query_tokens).toFixed(1)} %` : "–";
    put("kv-hits", cache.query_tokens ? `${hits} of ${whole.format(cache.query_tokens)} tokens` : hits);
    put("preemptions", whole.format(preemptions));
    at("kv").setAttribute("aria-label", `KV pool: ${share(kv.used_tokens)} held, ${share(kv.cached_tokens)} cached`);
    at("kv").querySelector(".used").style.width = share(kv.used_tokens).replace(" ", "");
    at("kv").querySelector(".cached").style.width = share(kv.cached_tokens).replace(" ", "");
  }

  showLatency() {
    const now = this.samples.at(-1);
    const then = this.window === "minute" ? this.samples.at(-1 - MINUTE) ?? this.samples[0] : null;
    at("histograms").replaceChildren(
      ...Object.entries(LATENCIES).map(([name, title]) => {
        const { bounds, counts } = now.latency[name];
        return histogram(title, bounds, then ? counts.map((count, i) => count - then.latency[name].counts[i]) : counts);
      }),
    );
  }

  showTotals({ uptime_s: uptime, tokens, finished, http_errors: errors }) {
    put("uptime", `${age(uptime)} ago`);
    const rows = [
      ["tokens of prompts", whole.format(tokens.prompt)],
      ["tokens generated", whole.format(tokens.generated)],
      ["answers", Object.entries(finished).filter(([, count]) => count).map(([reason, count]) => `${count} ${reason}`).join(", ") || "0"],
      ["HTTP errors", Object.entries(errors).map(([status, count]) => `${count} × ${status}`).join(", ") || "0"],
    ];
    at("totals").replaceChildren(...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  async loadPlan() {
    if (this.planned) return;
    this.planned = "being read";
    try {
      const answer = await this.call("plan");
      if (!answer.ok) throw new Error();
      showPlan(await answer.json());
    } catch {
      this.planned = ""; // the next look tries again
    }
  }
}

function histogram(title, bounds, counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return make("div", { class: "histogram" }, make("h4", {}, title, make("span", {}, "none yet")));
  const first = Math.max(counts.findIndex((count) => count) - 1, 0);
  const last = Math.min(counts.findLastIndex((count) => count) + 1, counts.length - 1);
  const shown = counts.slice(first, last + 1);
  const [most, step] = [Math.max(...shown), WIDTH / shown.length];
  const bars = shown.map((count, index) => {
    const height = count ? Math.max(((FLOOR - 4) * count) / most, 1.5) : 0;
    const [low, high] = [bounds[first + index - 1] ?? 0, bounds[first + index]];
    const range = high === undefined ? `above ${duration(low)}` : `${duration(low)} to ${duration(high)}`;
    const bar = draw("rect", { class: "bar", x: index * step + 1, y: FLOOR - height, width: Math.max(step - 2, 1), height, rx: 1 });
    bar.append(draw("title", {}, `${range}: ${count}`));
    return bar;
  });
  const marks = shown.slice(0, -1).map((_, index) => [(index + 1) * step, bounds[first + index]]);
  const every = Math.ceil(marks.length / 6);
  const labels = marks.filter((_, index) => index % every === 0).map(([x, bound]) => draw("text", { x, y: HEIGHT - 3, "text-anchor": "middle" }, duration(bound)));
  const quantiles = [0.5, 0.9, 0.99].map((share) => `p${Math.round(share * 100)} ${duration(quantile(share, bounds, counts))}`);
  const label = `${title}: ${total} observations, ${quantiles.join(", ")}`;
  return make(
    "div",
    { class: "histogram" },
    make("h4", {}, title, make("span", {}, quantiles.join(" · "))),
    draw(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
      draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: FLOOR, y2: FLOOR }),
      ...bars,
      ...labels,
    ),
  );
}

function showPlan({ plan, digest, entries, remarks }) {
  const graphs = plan.graph ? "decode in graphs" : "no graphs";
  const ranks = plan.tp_size > 1 ? `, TP ${plan.tp_size}` : "";
  put("plan-facts", `${plan.architecture}, ${plan.device}${ranks}, ${plan.dtype}, ${graphs}, ${digest}`);
  const rows = plan.buckets.map((bucket) => {
    const label = labelOf(bucket);
    const range = bucket.batch ? ` [${bucket.batch.join("-")}]` : "";
    const entry = entries.find((one) => one.entry === label) ?? entries.find((one) => one.entry === bucket.role);
    return planRow(label + range, backendOf(bucket.choice), bucket.choice.version, entry?.candidates ?? []);
  });
  const notes = [...plan.fallbacks, ...remarks].map((text) => make("p", { class: "quiet" }, text));
  at("plan").replaceChildren(...rows, ...notes);
}

function labelOf({ role, phase, op, shape }) {
  const part = phase ?? op ?? (shape ? shape.join("x") : "");
  return part ? `${role}.${part}` : role;
}

function backendOf({ name, variant, distribution }) {
  return `${name}${variant ? `/${variant}` : ""}@${distribution}`;
}

function planRow(label, backend, version, candidates) {
  const head = make(
    "summary",
    {},
    make("span", { class: "role" }, label),
    make("span", { class: "backend" }, `${backend} ${version}`),
  );
  const items = candidates.map((one) => {
    const chosen = one.backend === backend;
    const word = chosen ? "serves" : one.status === "chosen" ? "fits" : one.status;
    const item = make("li", {}, make("b", {}, one.backend), make("span", { class: chosen ? "tag chosen" : "tag" }, word));
    const reasons = [...(one.preferred ? [one.preferred] : []), ...one.reasons.map(reasonOf)];
    if (reasons.length) item.append(make("br"), reasons.join("; "));
    return item;
  });
  items.sort((a, b) => rank(a) - rank(b));
  return make("details", {}, head, make("ul", {}, ...(items.length ? items : [make("li", {}, "It is the only candidate.")])));
}

function rank(item) {
  return { serves: 0, fits: 1 }[item.querySelector(".tag").textContent] ?? 2;
}

function reasonOf({ code, field, wanted, supported }) {
  return code === "requires" ? `needs ${wanted}: ${supported}` : `${field}: wanted ${wanted}, supported ${supported}`;
}
