"use strict";

function jobRow(job) {
  const { step, max_steps: most } = job.progress;
  const share = Math.min(1, step / most);
  const place = job.queue_position === null ? "" : ` (${job.queue_position} before it)`;
  return make("tr", {},
    make("td", {}, make("a", { href: `${root}/jobs/${job.id}` }, job.name || tail(job.id)), make("div", { class: "quiet small" }, `${tail(job.id)} · ${job.model}`)),
    make("td", {}, pill(job.status), make("div", { class: "quiet small" }, `${job.status_detail.reason}: ${job.status_detail.message}${place}`)),
    make("td", {}, make("div", { class: "bar" }, make("span", { "data-share": share })), make("div", { class: "quiet small" }, `step ${step} of ${most}`)),
    make("td", { class: "number" }, String(job.workers.ready)),
    make("td", { class: "number" }, count(job.progress.generated_tokens)),
    make("td", { class: "number" }, count(job.progress.salvaged_tokens)),
    make("td", { class: "number" }, age(job.created_at)));
}

every(2, async () => {
  const [jobs, workers] = await Promise.all([call("/v1/jobs?limit=50"), call("/v1/workers?limit=200")]);
  document.querySelector("#jobs tbody").replaceChildren(...jobs.data.map(jobRow));
  document.getElementById("no-jobs").hidden = jobs.data.length > 0;
  showWorkers(workers.data);
});
