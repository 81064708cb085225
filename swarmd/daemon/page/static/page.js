// Keeps the page up to date: the node sends the parts that changed (events), the reader's buttons go to /control.
"use strict";

const token = new URLSearchParams(location.search).get("token");
const SILENCE_MS = 15000;  // three times the node's HEARTBEAT_S
const said = document.getElementById("said");
const [freshness, freshAt] = document.getElementById("fresh").children;
const place = document.getElementById("chart");
const dark = matchMedia("(prefers-color-scheme: dark)");
let events = null;
let curve = null;
let chart = null;
let silence = null;
let asking = false;

function fresh() {
  clearTimeout(silence);
  silence = setTimeout(lost, SILENCE_MS);  // a node whose machine sleeps closes no connection
  document.body.classList.remove("lost");
  say("Up to date at");
  freshAt.textContent = new Date().toLocaleTimeString();
}

function lost() {
  clearTimeout(silence);
  document.body.classList.add("lost");
  document.title = document.title.replace(/^[^·]*/, "no answer ");
  say("The node does not answer. If it was stopped: swarmd join, then swarmd ui. Last up to date at");
}

function say(words) {
  if (freshness.textContent !== words) freshness.textContent = words;  // a screen reader reads it once
}

function show(update) {
  if (document.title !== update.title) document.getElementById("news").textContent = update.title;  // a screen reader reads a new state
  document.title = update.title;
  for (const [id, html] of Object.entries(update.parts)) {
    const part = document.getElementById(id);
    const held = part.contains(document.activeElement) ? document.activeElement : null;
    const open = part.querySelector("details")?.open;
    part.innerHTML = html;  // made and escaped by the node
    if (open) part.querySelector("details")?.setAttribute("open", "");
    if (held) (document.getElementById(held.id) || part.querySelector("button"))?.focus();
  }
  if (update.curve) draw((curve = update.curve));
  fresh();
}

function smooth(values, over) {
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - over + 1), at + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

function draw({ last, rewards, external }) {
  const rounds = rewards.map((_, at) => last - rewards.length + 1 + at);
  const kinds = [["With answers of other nodes", "--with", true], ["Alone", "--alone", false]]
    .map(([label, name, others]) => [label, name, rewards.map((reward, at) => (Boolean(external[at]) === others ? reward : null))])
    .filter(([, , values]) => values.some((value) => value !== null));  // the legend names what is drawn, and nothing else
  const data = [rounds, smooth(rewards, 10), ...kinds.map(([, , values]) => values)];
  const labels = kinds.map(([label]) => label).join();
  if (chart && chart.labels === labels) return chart.setData(data);
  if (rounds.length < 2) return void (place.textContent = "The curve begins after two rounds.");
  if (chart) chart.destroy();
  place.textContent = "";
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--edge"), width: 1 }, ticks: { show: false } };
  const points = (label, name) => ({ label, stroke: colour(name), fill: colour(name), paths: () => null, points: { show: true, size: 5, width: 0, fill: colour(name) } });
  chart = new uPlot(
    {
      width: place.clientWidth, height: 220, scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(0.05, high * 1.05)] } },
      axes: [{ ...axis, label: "Round", labelSize: 20, labelFont: "13px system-ui, sans-serif", size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }, { ...axis, size: 44 }], cursor: { drag: { x: false, y: false } },
      series: [
        { label: "Round" },
        { label: "Mean of 10 rounds", stroke: colour("--ink"), width: 2, points: { show: false } },
        ...kinds.map(([label, name]) => points(label, name)),
      ],
      legend: { live: false, markers: { width: 0, fill: (_, at) => colour(["", "--ink", ...kinds.map(([, name]) => name)][at]) } },
    },
    data, place);
  chart.labels = labels;
}

function redraw() {
  if (chart) chart.destroy();
  chart = null;
  if (curve) draw(curve);
}

function listen() {
  if (events) return;
  events = new EventSource("/events?token=" + encodeURIComponent(token));
  events.onmessage = (event) => show(JSON.parse(event.data));
  events.onerror = lost;
}

async function ask(button) {
  if (button.ariaBusy === "true" || (button.dataset.ask && !confirm(button.dataset.ask))) return null;
  button.ariaBusy = "true";  // not disabled: it would lose the keyboard's place
  const menu = button.closest("details.menu");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();  // a closed menu would lose the keyboard's place
  }
  let result = null;
  try {
    const headers = { Authorization: "Bearer " + token, "Content-Type": "application/json" };
    const reply = await (await fetch("/control", { method: "POST", headers, body: button.dataset.request })).json();
    said.textContent = (reply.ok ? reply.result.warning || "" : reply.error).replaceAll("`", "");
    if (reply.ok) result = reply.result;
    if (reply.ok && reply.result.html) document.getElementById(reply.result.into).innerHTML = reply.result.html;  // made and escaped by the node
  } catch {
    said.textContent = "The node does not answer.";
  }
  button.ariaBusy = "false";
  return result;
}

// Asks one question after another; a second click ends it. The button may be replaced meanwhile.
async function askMany(button, count = { asked: 0, now: 0, first: 0 }) {
  const { id, textContent: name } = button, tally = document.getElementById("tally");
  if (asking) return void (asking = false);
  asking = true;
  while (asking && count.asked < Number(button.dataset.times)) {
    button.textContent = "Stop asking";
    const result = await ask(button);
    if (!result) break;
    count = { asked: count.asked + 1, now: count.now + result.right[0], first: count.first + result.right[1] };
    tally.textContent = `Of ${count.asked} question${count.asked === 1 ? "" : "s"}: ${count.now} right now, ${count.first} at first.`;
    button = document.getElementById(id) || button;
  }
  asking = false;
  button.textContent = name;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-request]");
  if (button) button.dataset.times ? askMany(button) : ask(button);
  const copy = event.target.closest("button[data-copy]");
  if (copy) navigator.clipboard.writeText(document.getElementById(copy.dataset.copy).textContent).then(() => { copy.textContent = "Copied"; });
});
document.addEventListener("visibilitychange", () => {  // a page that nobody sees costs the node nothing
  if (!document.hidden) return listen();
  events?.close();
  events = null;
  clearTimeout(silence);
});
dark.addEventListener("change", redraw);
new ResizeObserver(() => { if (chart && chart.width !== place.clientWidth) chart.setSize({ width: place.clientWidth, height: 220 }); }).observe(place);
if (!document.hidden) listen();
