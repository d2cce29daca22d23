// The operators' page: reads /status once a second and draws it. Everything is shown as text, never as markup, so the
// name of a model or an upstream cannot change the page.

const EVERY_MS = 1000;
const HISTORY = 120; // two minutes of readings
const KEY = "gateway-admin-key";
const SVG = "http://www.w3.org/2000/svg";
const STATES = { up: "good", ready: "good", resting: "bad", killed: "bad", stopped: "bad", "backing off": "bad" };
const STAGES = {
  accept: "Accept: entered into Redis",
  queue: "Queue: until on a connection",
  upstream: "Upstream: until the whole reply",
  store: "Store: written to Redis",
  delivery: "Delivery: until a client has it",
};
// An upstream is shown as slow if its median is this many times that of the fastest, and above the noise.
const SLOW_FACTOR = 2;
const SLOW_ABOVE_S = 0.05;

const looks = []; // {at, status}, oldest first

// -- words and numbers ------------------------------------------------------------------------------------------------

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function count(value) {
  if (value >= 1e7) return `${(value / 1e6).toFixed(1)} M`;
  return grouped.format(value);
}

function rate(value) {
  return value >= 100 ? count(value) : value.toFixed(value >= 10 || value === 0 ? 0 : 1);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), units.length - 1);
  return `${(value / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;
}

const words = (name) => name.replaceAll("_", " ");

// -- elements ---------------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function badge(text, kind) {
  return element("span", `badge ${kind ?? STATES[text] ?? "warn"}`, text);
}

function bar(fraction, kind = "") {
  const filled = element("i");
  filled.style.width = `${Math.round(Math.min(Math.max(fraction, 0), 1) * 100)}%`;
  return element("div", `bar ${kind}`, filled);
}

/** `columns`: [title, class, row => text or element]. With `cards`, the style sheet shows rows as cards on a phone. */
function table(id, columns, rows, cards = false) {
  const head = element("tr", "", ...columns.map(([title, kind]) => element("th", kind, title)));
  const body = rows.map((row) =>
    element("tr", "", ...columns.map(([title, kind, cell]) => {
      const made = element("td", kind, cell(row) ?? "–");
      made.dataset.label = title;
      return made;
    })));
  $(id).className = cards ? "cards" : "";
  $(id).replaceChildren(element("thead", "", head), element("tbody", "", ...body));
}

function facts(id, rows) {
  $(id).replaceChildren(...rows.map(([title, value]) =>
    element("tr", "", element("th", "", title), element("td", "fact", value))));
}

/** Changes nothing while the text is the same: an operator may be copying a sentence. */
function sentences(id, said) {
  const list = $(id);
  const shown = [...list.children].map((item) => item.textContent);
  if (shown.length === said.length && said.every((sentence, i) => sentence === shown[i])) return;
  list.replaceChildren(...said.map((sentence) => element("li", "", sentence)));
}

function sparkline(values) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const top = Math.max(...values, 0) || 1;
  const first = HISTORY - values.length;
  const points = values.map((value, i) => `${first + i},${(19 - (value / top) * 18).toFixed(2)}`);
  for (const [kind, tag, shape] of [
    ["spark-area", "polygon", [`${first},20`, ...points, `${HISTORY - 1},20`]],
    ["spark-line", "polyline", points],
  ]) {
    const drawn = document.createElementNS(SVG, tag);
    drawn.setAttribute("class", kind);
    drawn.setAttribute("points", shape.join(" "));
    svg.append(drawn);
  }
  return svg;
}

// -- changes between readings -------------------------------------------------------------------------------------------

const total = (status, names) => names.reduce((sum, name) => sum + (status.counters[name] ?? 0), 0);

/** Rates per second, for every reading but the first. A restarted gateway counts from zero, which is no negative rate. */
function rates(...names) {
  return looks.slice(1).map((look, i) => {
    const passed = (look.at - looks[i].at) / 1000;
    return Math.max(total(look.status, names) - total(looks[i].status, names), 0) / passed;
  });
}

function lately(name) {
  return Math.max(total(looks.at(-1).status, [name]) - total(looks[0].status, [name]), 0);
}

const last = (values) => values.at(-1) ?? 0;
// A reading covers one second; people read the mean of a few.
const smooth = (values) => values.map((_, i) => {
  const few = values.slice(Math.max(0, i - 4), i + 1);
  return few.reduce((sum, value) => sum + value, 0) / few.length;
});
const sum = (rows, name) => rows.reduce((added, row) => added + row[name], 0);

// -- the parts of the page ------------------------------------------------------------------------------------------------

function tile(title, value, more, values, alarm = false) {
  return element("div", alarm ? "tile alarm" : "tile", element("h3", "", title), element("div", "value", value),
    element("div", "more", more), sparkline(values));
}

function drawTiles(status) {
  const gauge = (read) => looks.map((look) => read(look.status));
  const done = smooth(rates("completed"));
  const tokens = smooth(rates("tokens_sampled"));
  const failed = smooth(rates("failed", "orphaned"));
  const refused = smooth(rates(...Object.keys(status.counters).filter((name) => name.startsWith("rejected_"))));
  const { redis, undelivered, stages_s: stages } = status;
  const paused = sum(status.workers, "paused");
  const filled = redis.max_bytes ? redis.used_bytes / redis.max_bytes : 0;
  $("tiles").replaceChildren(
    tile("Throughput", `${rate(last(done))} /s`, `${count(status.samples.completed)} completed`, done),
    tile("In flight", count(sum(status.workers, "in_flight")),
      paused ? `${count(paused)} waiting for an upstream` : bytes(sum(status.workers, "in_flight_bytes")),
      gauge((each) => sum(each.workers, "in_flight")), paused > 0),
    tile("Upstream latency", seconds(stages.upstream.p50), `p99 ${seconds(stages.upstream.p99)}, last minute`,
      gauge((each) => each.stages_s.upstream.p50 ?? 0)),
    tile("Failed samples", `${rate(last(failed))} /s`, `${count(status.samples.failed)} failed, ${count(status.samples.orphaned)} given back`,
      failed, last(failed) > 0),
    tile("Tokens", `${rate(last(tokens))} /s`, `${count(status.counters.tokens_sampled)} sampled`, tokens),
    tile("Refused with 429", `${rate(last(refused))} /s`, "back-pressure", refused, last(refused) > 0),
    tile("Undelivered results", count(undelivered.results), `about ${bytes(undelivered.bytes)}`, gauge((each) => each.undelivered.results)),
    tile("Redis memory", bytes(redis.used_bytes), redis.max_bytes ? `${(filled * 100).toFixed(1)} % of ${bytes(redis.max_bytes)}` : "no limit",
      gauge((each) => each.redis.used_bytes), filled > 0.85 || !redis.reachable),
  );
}

function slowOnes(upstreams) {
  const medians = upstreams.map((each) => each.latency_s.p50).filter((p50) => p50 !== null);
  const fastest = Math.min(...medians);
  const slow = ({ latency_s: { p50 } }) => p50 !== null && p50 > SLOW_ABOVE_S && p50 > SLOW_FACTOR * fastest;
  return new Set(medians.length > 1 ? upstreams.filter(slow) : []);
}

function drawUpstreams({ upstreams }) {
  const slow = slowOnes(upstreams);
  const longest = Math.max(...upstreams.map((each) => each.latency_s.p99 ?? 0), 0) || 1;
  table("upstreams", [
    ["URL", "name", (each) => each.url],
    ["State", "", (each) => {
      const badges = element("div", "badges", badge(each.state));
      if (slow.has(each)) badges.append(badge("slow", "warn"));
      if (each.logprobs_scale === false) badges.append(badge("raw logprobs", "warn"));
      return badges;
    }],
    ["In flight", "number", (each) => count(each.in_flight)],
    ["Attempts", "number", (each) => count(each.attempts)],
    ["Failed", "number", (each) => count(each.failed_attempts)],
    ["Queue p99", "number", (each) => seconds(each.queue_s.p99)],
    ["p50", "number", (each) => seconds(each.latency_s.p50)],
    ["p99", "number", (each) => seconds(each.latency_s.p99)],
    ["Latency p50", "gauge", (each) => bar((each.latency_s.p50 ?? 0) / longest, slow.has(each) ? "warn" : "")],
  ], upstreams, true);
}

function drawStages({ stages_s: stages }) {
  const rows = Object.entries(stages).map(([name, times]) => ({ name: STAGES[name] ?? words(name), ...times }));
  const longest = Math.max(...rows.map((row) => row.p99 ?? 0)) || 1;
  table("stages", [
    ["Stage", "name", (row) => row.name],
    ["p50", "number", (row) => seconds(row.p50)],
    ["p99", "number", (row) => seconds(row.p99)],
    ["", "gauge", (row) => bar((row.p99 ?? 0) / longest)],
  ], rows);
}

function counted(id, title, names) {
  table(id, [
    [title, "name", (row) => row.title],
    ["Total", "number", (row) => count(row.all)],
    ["2 min", "number", (row) => count(row.lately)],
  ], names.map(([name, shown]) => ({ title: shown, all: total(looks.at(-1).status, [name]), lately: lately(name) })));
}

function drawCounts(status) {
  const starting = (prefix, before) => Object.keys(status.counters).filter((name) => name.startsWith(prefix))
    .map((name) => [name, before + words(name.slice(prefix.length))]);
  const failures = [...starting("faults_", "attempt "), ...starting("rejected_", "429: ")];
  const happened = failures.filter(([name]) => total(status, [name]) > 0);
  counted("failures", "Class", happened.length ? happened : [["", "none"]]);
  counted("outcomes", "Outcome", Object.keys(status.samples).map((name) => [name, words(name)]));
}

function drawRedis({ redis, sessions }) {
  facts("redis", [
    ["Address", redis.embedded ? "the embedded server" : redis.url],
    ["State", badge(redis.reachable ? "answers" : "does not answer", redis.reachable ? "good" : "bad")],
    ["Version", `${redis.version} (${redis.mode})`],
    ["Memory", redis.max_bytes ? `${bytes(redis.used_bytes)} of ${bytes(redis.max_bytes)}` : `${bytes(redis.used_bytes)}, no limit`],
    ["Eviction policy", redis.policy || "–"],
    ["Round trip", seconds(redis.lag_ms / 1000)],
    ["Sessions", count(sessions)],
  ]);
}

function cpuShare(worker) {
  const before = looks.at(-6) ?? looks[0];
  const then = before.status.workers.find((each) => each.pid === worker.pid);
  const passed = (looks.at(-1).at - before.at) / 1000;
  return then && passed ? `${Math.round(((worker.cpu_seconds - then.cpu_seconds) / passed) * 100)} %` : "–";
}

function drawWorkers({ workers }) {
  table("workers", [
    ["Slot", "name", (each) => `slot ${each.slot}`],
    ["State", "", (each) => {
      const badges = element("div", "badges", badge(each.state));
      if (each.state === "ready" && !each.store_connected) badges.append(badge("no Redis", "bad"));
      if (each.draining) badges.append(badge(`${each.draining} draining`, "warn"));
      return badges;
    }],
    ["PID", "number", (each) => each.pid === null ? null : String(each.pid)],
    ["Source IP", "number", (each) => each.source_ip],
    ["In flight", "number", (each) => count(each.in_flight)],
    ["CPU", "number", cpuShare],
    ["Memory", "number", (each) => bytes(each.rss_bytes)],
    ["Loop lag p99", "number", (each) => seconds(each.loop_lag_ms_p99 / 1000)],
    ["Restarts", "number", (each) => count(each.restarts)],
  ], workers, true);
}

function drawKeys({ keys }) {
  $("callers").hidden = keys.length === 0;
  const before = new Map(looks[0].status.keys.map((each) => [each.name, each]));
  const lately = (each, name) => Math.max(each[name] - (before.get(each.name)?.[name] ?? 0), 0);
  const most = Math.max(...keys.map((each) => each.in_flight), 1);
  table("keys", [
    ["Name", "name", (each) => each.name],
    ["In flight", "number", (each) => count(each.in_flight)],
    ["Held", "number", (each) => bytes(each.in_flight_bytes)],
    ["Samples", "number", (each) => count(each.samples)],
    ["2 min", "number", (each) => count(lately(each, "samples"))],
    ["Refused", "number", (each) => count(each.rejected)],
    ["Refused, 2 min", "number", (each) => count(lately(each, "rejected"))],
    ["Share in flight", "gauge", (each) => bar(each.in_flight / most)],
  ], keys, true);
}

function drawHealth(ready, status) {
  const { gateway } = status;
  $("identity").textContent = `${gateway.url}, version ${gateway.version}, since ${gateway.started_at.replace("T", " ")}`;
  $("reasons").hidden = ready.reasons.length === 0;
  sentences("reasons", ready.reasons);
  $("warned").hidden = status.warnings.length === 0;
  sentences("warnings", status.warnings);
  showHealth(ready.ready ? "ready" : "not ready", ready.ready ? "good" : "bad");
}

function showHealth(text, kind) {
  $("health").textContent = text;
  $("health").className = `badge ${kind}`;
}

// -- reading --------------------------------------------------------------------------------------------------------------

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const reply = await fetch(path, { headers: key ? { "X-Admin-Key": key } : {}, cache: "no-store" });
  return { code: reply.status, body: await reply.json() };
}

function wantKey() {
  const wrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  $("login-error").textContent = wrong ? "This is not the admin key." : "";
  $("login").hidden = false;
  $("board").hidden = true;
  showHealth("locked", "warn");
}

function draw(status, ready) {
  looks.push({ at: performance.now(), status });
  if (looks.length > HISTORY) looks.shift();
  $("login").hidden = true;
  $("board").hidden = false;
  $("board").classList.remove("stale");
  drawHealth(ready, status);
  for (const part of [drawTiles, drawUpstreams, drawStages, drawCounts, drawRedis, drawKeys, drawWorkers]) part(status);
}

async function look() {
  const [status, ready] = await Promise.all([ask("status"), ask("readyz")]);
  if (status.code === 401) return wantKey();
  draw(status.body, ready.body);
}

async function watch() {
  if ($("login").hidden && !document.hidden) {
    try {
      await look();
    } catch {
      $("board").classList.add("stale");
      showHealth("the gateway does not answer", "bad");
    }
  }
  setTimeout(watch, EVERY_MS);
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  $("login").hidden = true;
});

watch();
