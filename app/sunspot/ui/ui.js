// Requests the page periodically, and replaces the parts that have changed. Without scripts, the page reloads instead.
"use strict";

const EVERY_MS = 10000;
const LIVE = ["counts", "all", "run", "compared"];
const FOCUSABLE = "a, input, button, summary, [tabindex]";
const nameOf = (element) => element.tagName + (element.href || element.value || element.textContent);

function replace(old, fresh) {
  if (!old || !fresh || old.innerHTML === fresh.innerHTML) return;
  const selection = getSelection();
  if (selection.type === "Range" && old.contains(selection.anchorNode)) return; // the user is copying
  const ticked = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
  const open = [...old.querySelectorAll("details")].map((details) => details.open);
  const scrolled = [...old.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
  const focused = old.contains(document.activeElement) ? nameOf(document.activeElement) : "";
  old.replaceChildren(...fresh.childNodes);
  for (const box of old.querySelectorAll("input[type=checkbox]")) box.checked = ticked.has(box.value);
  old.querySelectorAll("details").forEach((details, at) => (details.open = open[at] ?? details.open));
  old.querySelectorAll(".scroll, pre").forEach((box, at) => box.scrollTo(...(scrolled[at] ?? [0, 0])));
  if (focused) [...old.querySelectorAll(FOCUSABLE)].find((each) => nameOf(each) === focused)?.focus({ preventScroll: true });
}

async function refresh() {
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch(location.href);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of LIVE) replace(document.getElementById(id), next.getElementById(id));
    if (next.title) document.title = next.title;
    lost.hidden = true;
  } catch {
    if (lost.hidden) lost.textContent = `sunspot ui has not answered since ${new Date().toLocaleTimeString()}; the page below is older.`;
    lost.hidden = false;
  }
}

setInterval(() => document.hidden || refresh(), EVERY_MS);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
for (const log of document.querySelectorAll("pre")) log.scrollTop = log.scrollHeight;
