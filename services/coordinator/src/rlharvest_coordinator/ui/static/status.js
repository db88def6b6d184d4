// What every page uses: calls to REST, making elements (text only, never markup), numbers for people, the worker table.
"use strict";

const root = document.body.dataset.root;

async function call(path, options = {}) {
  const reply = await fetch(root + path, { headers: { Accept: "application/json" }, ...options });
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(body.error ? body.error.message : `${path}: ${reply.status}`);
  return body;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function notice(error) {
  const box = document.getElementById("notice");
  box.textContent = error.message;
  box.hidden = false;
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => { box.hidden = true; }, 6000);
}

function count(number) {
  if (number === null || number === undefined) return "–";
  if (number < 10000) return String(Math.round(number));
  const [scale, unit] = number < 1e6 ? [1e3, "k"] : number < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return (number / scale).toPrecision(3) + unit;
}

function short(number) {
  if (number === null || number === undefined) return "–";
  return Math.abs(number) >= 1000 ? count(number) : String(Number(number.toPrecision(4)));
}

function age(since) {
  const seconds = Math.max(0, Date.now() / 1000 - since);
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

function pill(word) {
  return make("span", { class: `pill ${word}` }, word);
}

function tail(identifier) {
  return identifier.length > 14 ? `…${identifier.slice(-8)}` : identifier;
}

// A hue of its own for each name; lightness comes from the style sheet.
function hue(name) {
  let hash = 7;
  for (const letter of String(name)) hash = (hash * 31 + letter.codePointAt(0)) % 360;
  return (hash * 137) % 360;
}

function showWorkers(workers) {
  const rows = workers.map((worker) => {
    const here = worker.left_at === null;
    const drain = make("button", { type: "button", onclick: () => ask(`/v1/workers/${worker.id}/drain`) }, "Drain");
    return make("tr", { class: here ? "" : "past" },
      make("td", {}, make("span", { class: "dot", title: worker.id, "data-hue": hue(worker.id) }), make("code", { title: worker.id }, tail(worker.id)), make("div", { class: "quiet small" }, `${worker.hostname}:${worker.pid} · ${worker.worker_class}`)),
      make("td", {}, pill(worker.state)),
      make("td", {}, worker.job ? make("a", { href: `${root}/jobs/${worker.job}` }, tail(worker.job)) : "–"),
      make("td", { class: "number" }, worker.version === null ? "–" : String(worker.version)),
      make("td", { class: "number" }, `${worker.held} / ${worker.slots}`),
      make("td", { class: "number" }, short(worker.tokens_per_s)),
      make("td", { class: "number" }, here ? `${worker.heartbeat_age_s.toFixed(1)} s` : `left ${age(worker.left_at)} ago`),
      make("td", { class: "quiet" }, worker.note),
      make("td", {}, here && worker.state !== "draining" ? drain : null));
  });
  document.querySelector("#worker-table tbody").replaceChildren(...rows);
  document.getElementById("no-workers").hidden = rows.length > 0;
  paint();
}

// Colours are set through the object model: the policy of the page allows no style in markup.
function paint() {
  for (const element of document.querySelectorAll("[data-hue]")) element.style.setProperty("--hue", element.dataset.hue);
  for (const element of document.querySelectorAll("[data-share]")) element.style.setProperty("--share", element.dataset.share);
}

async function ask(path) {
  try {
    await call(path, { method: "POST" });
  } catch (error) {
    notice(error);
  }
  refresh();
}

async function showHealth() {
  const box = document.getElementById("health");
  try {
    const reply = await fetch(`${root}/readyz`);
    const body = await reply.json();
    const failed = Object.keys(body.failed);
    box.className = `health ${reply.ok ? "good" : "bad"}`;
    box.textContent = reply.ok ? "ready" : `not ready: ${failed.join(", ")}`;
    box.title = failed.map((name) => `${name}: ${body.failed[name]}`).join("\n");
  } catch {
    box.className = "health bad";
    box.textContent = "no answer";
  }
}

let show = async () => {};
let busy = false;

async function refresh() {
  if (busy) return;
  busy = true;
  try {
    await Promise.all([show(), showHealth()]);
  } catch (error) {
    notice(error);
  } finally {
    busy = false;
  }
}

function every(seconds, page) {
  show = page;
  refresh();
  setInterval(() => { if (!document.hidden) refresh(); }, seconds * 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
}
