// Keeps the page up to date: asks for it again while it is seen, and puts in the parts that are other than before.
"use strict";

const EVERY = 5000;  // milliseconds
const parts = new Map([...document.querySelectorAll("[data-live]")].map((part) => [part.id, part.innerHTML]));
const [freshness, freshAt] = document.getElementById("fresh").children;
let etag = null;

function put(fresh) {
  for (const [id, before] of parts) {
    const part = document.getElementById(id);
    const other = fresh.getElementById(id);
    const chosen = document.getSelection();
    if (!other || other.innerHTML === before || (!chosen.isCollapsed && part.contains(chosen.anchorNode))) continue;
    const focus = part.contains(document.activeElement) ? document.activeElement : null;
    const held = focus?.matches("summary") ? `#${CSS.escape(focus.parentElement.id)} summary` : focus ? `[href="${CSS.escape(focus.getAttribute("href") ?? "")}"]` : null;
    const open = [...part.querySelectorAll("details[open]")].map((details) => details.id);
    parts.set(id, other.innerHTML);
    part.replaceChildren(...document.importNode(other, true).childNodes);  // made and escaped by the judge; a script in it would not run
    for (const name of open) document.getElementById(name)?.setAttribute("open", "");
    if (held) part.querySelector(held)?.focus({ preventScroll: true });
  }
}

function fresh(words, answered) {
  document.body.classList.toggle("lost", !answered);
  if (freshness.textContent !== words) freshness.textContent = words;  // a screen reader reads it once
  if (answered) freshAt.textContent = new Date().toLocaleTimeString();
}

async function look() {
  if (document.hidden) return;  // a page that nobody sees costs the judge nothing
  try {
    const reply = await fetch(location.href, { cache: "no-cache", signal: AbortSignal.timeout(2 * EVERY) });  // with the ETag: 304 where nothing has changed
    if (!reply.ok) throw new Error(reply.statusText);
    if (reply.headers.get("etag") !== etag) {
      put(new DOMParser().parseFromString(await reply.text(), "text/html"));
      etag = reply.headers.get("etag");
    }
    fresh("Up to date at", true);
  } catch {
    fresh("The judge does not answer. This page was last up to date at", false);
  }
}

if (parts.size) {
  fresh("Up to date at", true);
  setInterval(look, EVERY);
  document.addEventListener("visibilitychange", look);
}
for (const button of document.querySelectorAll("[data-copy]")) {
  if (!navigator.clipboard) continue;  // the page is not served over https: there is nothing to copy with
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  });
}
for (const field of document.querySelectorAll(".filters select, .filters [type=checkbox]")) {
  field.addEventListener("change", () => field.form.requestSubmit());
}
