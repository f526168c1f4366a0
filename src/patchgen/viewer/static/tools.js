"use strict";
// What all parts of the page use. Names of files, classes and runs are data: they are only ever set as text
// (textContent, alt, aria-label), never as markup. No framework, and nothing but this server's own addresses.

const state = {
  limits: {}, // of the server
  model: null, // what /api/models/ID says of the chosen one
  usable: [], // models that can be looked at
  pictures: [], // { image, name, truth, scores, moved, off, maps, element, button }
  current: null, // the picture that is looked at
  cursor: 0, // the patch that the keyboard is at
  runs: [],
  chosen: new Set(), // ids of the runs that are compared
};

const at = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const megabytes = (bytes) => `${Number((bytes / 2 ** 20).toFixed(1))} MB`;
const SVG = ["svg", "path", "text"];

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const space = SVG.includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A table in a box that scrolls by itself and can be reached by keyboard; the caption above it stays in place. */
function scrolling(caption, head, rows, attributes = {}, shown = true) {
  const parts = shown ? [make("p", { class: "quiet" }, caption)] : [];
  if (rows.length) {
    const body = [make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)];
    const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": caption };
    parts.push(make("div", region, make("table", attributes, ...body)));
  }
  return make("div", { class: "captioned" }, ...parts);
}

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
}

/** JSON from the server, or an Error with the server's own sentence. */
async function ask(path, body) {
  const request = {};
  if (body instanceof FormData) Object.assign(request, { method: "POST", body });
  else if (body !== undefined) {
    const headers = { "Content-Type": "application/json" };
    Object.assign(request, { method: "POST", body: JSON.stringify(body), headers });
  }
  let answer;
  try {
    answer = await fetch(path, request);
  } catch {
    throw new Error("The viewer does not answer. Is `patchgen serve` still running?");
  }
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `The viewer answered ${answer.status}.`);
  return found;
}

function tell(error) {
  at("message").textContent = error ? error.message || String(error) : "";
}

/** Runs an action; what goes wrong is said on the page. */
function guarded(action) {
  return async (...values) => {
    tell("");
    try {
      await action(...values);
    } catch (error) {
      tell(error);
    }
  };
}

function modelName(row) {
  const unseen = row.unseen ? `${row.unseen} unseen` : "";
  const seed = row.seed == null ? "" : `seed ${row.seed}`;
  const state = row.done === false ? "training not finished" : "";
  return `${[row.method || row.kind, unseen, seed, state].filter(Boolean).join(", ")} (${row.name})`;
}
