"use strict";

const job = document.body.dataset.job;
const base = `/v1/jobs/${encodeURIComponent(job)}`;
const ENDED = ["succeeded", "failed", "cancelled"];
const samples = new Map(); // response id -> sample with tokens; they never change once finished

function showJob(value) {
  document.getElementById("name").textContent = value.name || value.id;
  const status = document.getElementById("status");
  status.className = `pill ${value.status}`;
  status.textContent = value.status;
  document.getElementById("message").textContent = `${value.status_detail.reason}: ${value.status_detail.message}`;
  const error = document.getElementById("error");
  error.hidden = value.error === null;
  error.textContent = value.error || "";
  const ended = ENDED.includes(value.status);
  document.getElementById("pause").disabled = !["queued", "running"].includes(value.status);
  document.getElementById("resume").disabled = !["paused", "pausing"].includes(value.status);
  document.getElementById("cancel").disabled = ended || value.status === "cancelling";
  const progress = value.progress;
  const tiles = [
    ["Step", `${progress.step} / ${progress.max_steps}`],
    ["Version", progress.weight_version === null ? "–" : String(progress.weight_version)],
    ["Workers ready", String(value.workers.ready)],
    ["Workers lost", String(value.workers.lost_total)],
    ["Generated tokens", count(progress.generated_tokens)],
    ["Salvaged tokens", count(progress.salvaged_tokens)],
    ["Regenerated tokens", count(progress.regenerated_tokens)],
    ["Live responses", value.responses === null ? "–" : `${value.responses.running} running, ${value.responses.pending} waiting`],
    ["Model", value.model],
    ["Checkpoint", value.latest_checkpoint || "–"],
  ];
  document.getElementById("tiles").replaceChildren(
    ...tiles.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", { title: text }, text))));
}

function showMetrics(metrics) {
  const choice = document.getElementById("metric");
  const names = Object.keys(metrics.series);
  const chosen = choice.value || (names.includes("reward") ? "reward" : names[0]);
  if (choice.options.length !== names.length) {
    choice.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  }
  if (names.includes(chosen)) choice.value = chosen;
  const values = metrics.series[choice.value] || [];
  document.getElementById("no-curve").hidden = values.some((value) => value !== null);
  drawCurve(document.getElementById("curve"), metrics.steps, values);
}

function eventRow(event) {
  const at = new Date(event.created_at * 1000);
  return make("li", { class: event.level },
    make("time", { datetime: at.toISOString(), title: at.toISOString() }, at.toLocaleTimeString()),
    make("div", {}, make("strong", {}, event.type), ` ${event.message}`, make("span", { class: "quiet small" }, ` ${tail(event.source)}`)));
}

function stripe(pieces, total, name) {
  return make("div", { class: "stripe" }, ...pieces.map(([n, key, text]) =>
    make("span", { "data-share": n / total, "data-hue": hue(`${name}${key}`), title: text })));
}

function sampleCard(sample) {
  const length = Math.max(1, sample.length);
  const versions = sample.version_runs.map((run) => [run.n, run.version, `version ${run.version}: ${run.n} tokens`]);
  const workers = sample.pieces.map((piece) => [piece.n, piece.worker, `${piece.worker}: tokens ${piece.offset} to ${piece.offset + piece.n - 1}, attempt ${piece.attempt}`]);
  const names = [...new Set(sample.pieces.map((piece) => piece.worker))];
  return make("article", { class: "card sample" },
    make("p", { class: "row small" },
      make("span", {}, make("code", { title: sample.id }, `#${sample.handle}`), ` group ${sample.group} · `, pill(sample.state)),
      make("span", {}, `reward ${short(sample.reward)} · ${sample.length} tokens · ${sample.finish || "goes on"}`)),
    make("div", { class: "label quiet small" }, `versions ${[...new Set(sample.version_runs.map((run) => run.version))].join(", ")}`),
    stripe(versions, length, "version "),
    make("div", { class: "label quiet small" }, `workers ${names.map(tail).join(", ")}`),
    stripe(workers, length, ""),
    make("pre", { class: "prompt" }, sample.prompt),
    make("pre", {}, sample.text));
}

async function showSamples() {
  const page = await call(`${base}/samples?limit=6`);
  const found = await Promise.all(page.data.map(async (item) => {
    const known = samples.get(item.id);
    if (known !== undefined && known.state === item.state) return known;
    const sample = await call(`${base}/samples/${item.id}`);
    samples.set(item.id, sample);
    return sample;
  }));
  for (const id of samples.keys()) if (!page.data.some((item) => item.id === id)) samples.delete(id);
  document.getElementById("samples").replaceChildren(...found.map(sampleCard));
  document.getElementById("no-samples").hidden = found.length > 0;
}

for (const verb of ["pause", "resume", "cancel"]) {
  document.getElementById(verb).addEventListener("click", () => {
    if (verb !== "cancel" || window.confirm("Cancel this job? It cannot go on afterwards.")) ask(`${base}/${verb}`);
  });
}
document.getElementById("metric").addEventListener("change", refresh);

every(2, async () => {
  const [value, metrics, events, workers] = await Promise.all([
    call(base), call(`${base}/metrics?max_points=400`), call(`${base}/events?order=desc&limit=60`), call("/v1/workers?gone=false"), showSamples(),
  ]);
  showJob(value);
  showMetrics(metrics);
  document.getElementById("events").replaceChildren(...events.data.map(eventRow));
  showWorkers(workers.data.filter((worker) => worker.job === job));
});
