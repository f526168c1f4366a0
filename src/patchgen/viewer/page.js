"use strict";
// The viewer's page. Names of files, classes and runs are data: they are only ever set as text (textContent, alt,
// aria-label), never as markup. No framework, nothing from the network but this server's own addresses.

const at = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "text"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** JSON from the server, or an Error with the server's own sentence. */
async function ask(path, body) {
  const json = body !== undefined && !(body instanceof FormData);
  const options = body === undefined ? {} : {
    method: "POST", body: json ? JSON.stringify(body) : body, headers: json ? { "Content-Type": "application/json" } : {},
  };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The viewer does not answer. Is `patchgen serve` still running?");
  }
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `The viewer answered ${answer.status}.`);
  return found;
}

const state = {
  limits: {}, model: null, pictures: [], current: null, cursor: 0, hover: null, runs: null, chosen: new Set(),
};

function tell(error) { at("message").textContent = error ? error.message || String(error) : ""; }

/** Runs an action; what goes wrong is said on the page. */
function guarded(action) {
  return async (...values) => {
    tell("");
    try { await action(...values); } catch (error) { tell(error); }
  };
}

// Models

function modelName(row) {
  const words = [row.method || row.kind, row.unseen ? `${row.unseen} unseen` : "", row.seed != null ? `seed ${row.seed}` : ""];
  return `${words.filter(Boolean).join(", ")} (${row.name})`;
}

async function start() {
  const found = await ask("/api/models");
  state.limits = found.limits;
  at("limits").textContent = `or drop them on this page (at most ${Math.round(found.limits.file_bytes / 2 ** 20)} MB and ` +
    `${Math.round(found.limits.pixels / 1e6)} million pixels each)`;
  const usable = found.models.filter((row) => row.task !== "ccd" && !row.error);
  at("model").replaceChildren(...usable.map((row) => make("option", { value: row.id }, modelName(row))));
  const masked = usable.find((row) => (row.method || "").startsWith("patchgen"));
  if (masked) at("model").value = masked.id;
  if (!usable.length) throw new Error("None of these runs has a model to look at; see “Compare runs”.");
  await chooseModel();
}

async function chooseModel() {
  const id = at("model").value;
  at("status").textContent = "Loading the model …";
  try {
    state.model = await ask(`/api/models/${id}`);
  } catch (error) {
    state.model = null;
    at("status").textContent = "";
    throw error;
  }
  at("status").textContent = "";
  const { classes, grid, image_size: size, has_mask: mask } = state.model;
  at("about").textContent = `${classes.length} classes, ${size} px, ${grid[0]} × ${grid[1]} patches` + (mask ? "" : "; its method has no mask");
  fillChoices();
  await offerExamples(id);
  for (const picture of state.pictures) picture.scores = null;
  if (state.current) await show(state.current);
}

function fillChoices() {
  const { rankings, controls, perturbations } = state.model;
  const wanted = at("map").value;
  at("map").replaceChildren(...rankings.map((name) => make("option", { value: name }, name)), make("option", { value: "" }, "none: the image alone"));
  at("map").value = rankings.includes(wanted) ? wanted : rankings[0];
  at("operator").replaceChildren(...Object.entries(perturbations).map(([name, text]) => make("option", { value: name }, text)));
  const boxes = rankings.map((name) => {
    const box = make("input", { type: "checkbox", value: name });
    box.checked = ["mask", "attention", "grad-cam"].includes(name) || (rankings[0] !== "mask" && name === "rollout");
    return make("label", { class: "check" }, box, controls.includes(name) ? `${name} (control)` : name);
  });
  at("ranking-names").replaceChildren(at("ranking-names").querySelector("legend"), ...boxes);
}

async function offerExamples(id) {
  const { examples } = await ask(`/api/models/${id}/examples`);
  at("examples").hidden = !examples.length;
  at("example").replaceChildren(...examples.map((one) => make("option", { value: one.example }, `${one.label}: ${one.name}`)));
}

// Pictures

function problem(name, reason) {
  const close = make("button", { type: "button", "aria-label": `Dismiss the message about ${name}` }, "Dismiss");
  const row = make("li", {}, make("span", {}, `${name}: ${reason}`), close);
  close.addEventListener("click", () => { row.remove(); at("files").focus(); });
  at("problems").append(row);
}

async function openFiles(files) {
  if (!state.model) throw new Error("Choose a model that can be loaded first.");
  let done = 0, good = 0;
  for (const file of files) {
    at("status").textContent = `Reading ${++done} of ${files.length}: ${file.name}`;
    if (file.size > state.limits.file_bytes) {
      problem(file.name, `the file has ${(file.size / 2 ** 20).toFixed(1)} MB, at most ${Math.round(state.limits.file_bytes / 2 ** 20)} MB`);
      continue;
    }
    const form = new FormData();
    form.append("model", state.model.id);
    form.append("image", file, file.name);
    try {
      const { images: [found] } = await ask("/api/predict", form);
      if (found.error) problem(found.name, found.error);
      else { await opened(found); good += 1; }
    } catch (error) { problem(file.name, error.message); }
  }
  const bad = files.length - good;
  at("status").textContent = `${good} of ${files.length} images opened` + (bad ? `; ${bad} could not be shown, listed below` : "");
}

async function opened(found) {
  const picture = { image: found.image, name: found.name, truth: found.truth, scores: found, off: new Set(), moved: null, maps: {} };
  picture.element = new Image();
  picture.element.src = `/api/images/${found.image}`;
  state.pictures.push(picture);
  const label = make("span", {}, found.name);
  const thumbnail = make("img", { src: picture.element.src, alt: "" });
  picture.button = make("button", { type: "button", title: found.name }, thumbnail, label);
  picture.button.addEventListener("click", guarded(() => show(picture)));
  at("opened").append(make("li", {}, picture.button));
  await picture.element.decode();
  await show(picture);
}

/** Makes a picture the one that is looked at; a change of the model asks again. */
async function show(picture) {
  state.current = picture;
  at("empty").hidden = true;
  at("picture").hidden = false;
  for (const one of state.pictures) one.button.setAttribute("aria-current", String(one === picture));
  const model = state.model.id;
  if (!picture.scores || picture.scores.model !== model) {
    picture.scores = await ask("/api/score", { model, image: picture.image });
    Object.assign(picture, { off: new Set(), moved: null, maps: {} });
  }
  state.cursor = Math.min(state.cursor, patches() - 1);
  at("cell").textContent = "";
  at("rankings").replaceChildren(); // those of the picture before
  drawAnswer();
  drawMap();
  await fetchMaps();
}

const patches = () => state.model.grid[0] * state.model.grid[1];

function wantedRankings() {
  return [...at("ranking-names").querySelectorAll("input:checked")].map((box) => box.value);
}

/** Asks for the maps that are to be seen and not there yet. */
async function fetchMaps() {
  const picture = state.current, model = state.model.id;
  if (picture.scores.mask) picture.maps.mask = picture.scores.mask.flat();
  const names = [...new Set([at("map").value, ...wantedRankings()])].filter((name) => name && !picture.maps[name]);
  if (names.length) {
    const found = await ask("/api/rankings", { model, image: picture.image, names });
    if (picture !== state.current || model !== state.model.id) return;
    for (const [name, rows] of Object.entries(found.rankings)) picture.maps[name] = rows.flat();
  }
  drawMap();
  drawRankings();
}

// The answer

function drawAnswer() {
  const { scores, moved, off, truth } = state.current;
  const now = moved || scores;
  const parts = [`${now.label}, ${percent(now.confidence)}`];
  if (off.size) parts.push(`with ${off.size} of ${patches()} patches away (before: ${scores.label}, ${percent(scores.confidence)})`);
  if (truth) parts.push(`true class: ${truth}, ${truth === now.label ? "right" : "wrong"}`);
  at("answer").textContent = parts.join("; ");
  at("warning").hidden = !now.unlike_training;
  at("warning").textContent = now.unlike_training ? "Unlike the training images: the model has seen nothing like this, so do not rely on its answer." : "";
  const { calibrated, temperature, knows_unlike: knows } = state.model;
  at("calibration").textContent = [
    calibrated ? `Confidence is calibrated on source validation (temperature ${temperature.toFixed(2)}).` : "Confidence is a plain softmax, not calibrated.",
    knows ? (now.unlike_training ? "" : "The image is like the training images.") : "This model has no check for images unlike its training images.",
  ].join(" ");
  drawClasses(scores, moved);
}

const SHOWN = 10;

function drawClasses(scores, moved) {
  const table = at("classes").parentElement;
  table.classList.toggle("moving", Boolean(moved));
  const after = new Map((moved ? moved.classes : []).map((row) => [row.class, row.probability]));
  const rows = scores.classes.slice(0, SHOWN).map((row, i) => {
    const bars = make("td", { class: "bars", "aria-hidden": "true" });
    const values = moved ? [row.probability, after.get(row.class)] : [row.probability];
    for (const value of values) {
      const strip = make("div", { class: "strip" });
      strip.style.width = `${100 * value}%`;
      bars.append(strip);
    }
    const change = moved ? after.get(row.class) - row.probability : 0;
    const text = moved ? `${percent(after.get(row.class))} (${change < 0 ? "−" : "+"}${(100 * Math.abs(change)).toFixed(1)})` : "";
    return make("tr", i ? {} : { class: "first" }, make("th", { scope: "row" }, row.class), make("td", {}, percent(row.probability)),
      make("td", { class: "moved" }, text), bars);
  });
  at("classes").replaceChildren(...rows);
  const rest = scores.classes.length - rows.length;
  at("classes-caption").textContent = "Class probabilities" + (rest > 0 ? `: the ${rows.length} likeliest of ${scores.classes.length}` : "");
}

// Maps

// viridis at 0, 1/16, ..., 1
const COLOURS = [
  [68, 1, 84], [72, 24, 106], [71, 45, 123], [66, 64, 134], [59, 82, 139], [51, 99, 141], [44, 114, 142], [38, 130, 142],
  [33, 145, 140], [31, 160, 136], [40, 174, 128], [63, 188, 115], [94, 201, 98], [132, 212, 75], [173, 220, 48],
  [216, 226, 25], [253, 231, 37],
];

function colour(value, alpha) {
  const place = Math.min(Math.max(value, 0), 1) * (COLOURS.length - 1), low = Math.min(Math.floor(place), COLOURS.length - 2);
  const mixed = COLOURS[low].map((channel, i) => Math.round(channel + (place - low) * (COLOURS[low + 1][i] - channel)));
  return `rgba(${mixed.join(",")},${alpha})`;
}

/** Whether a map is shown on the fixed scale of masks. A constant mask is never stretched: noise would look like form. */
function isFixed(name, values) {
  return name === "mask" && (!at("stretch").checked || Math.max(...values) - Math.min(...values) <= 1e-4);
}

/** Values from 0 to 1: the mask as it is unless asked otherwise, other rankings stretched to their own range. */
function scaled(name, values) {
  if (isFixed(name, values)) return values;
  const low = Math.min(...values), high = Math.max(...values);
  return values.map((value) => (high > low ? (value - low) / (high - low) : 0.5));
}

/** How many patches the map above keeps at the threshold. */
function keptCount() {
  const name = at("map").value, values = name && state.current.maps[name];
  if (!values) return patches();
  return scaled(name, values).filter((value) => value >= Number(at("threshold").value)).length;
}

function draw(canvas, values, keep, options = {}) {
  const { element } = state.current, [rows, columns] = state.model.grid;
  const scale = Math.min(1, (options.longest || 1024) / Math.max(element.naturalWidth, element.naturalHeight));
  const grow = Math.max(1, (options.least || 0) / Math.max(element.naturalWidth, element.naturalHeight));
  const width = canvas.width = Math.max(1, Math.round(element.naturalWidth * scale * grow));
  const height = canvas.height = Math.max(1, Math.round(element.naturalHeight * scale * grow));
  const pen = canvas.getContext("2d");
  pen.filter = values ? "grayscale(1)" : "none";
  pen.drawImage(element, 0, 0, width, height);
  pen.filter = "none";
  for (let patch = 0; patch < rows * columns; patch++) {
    const column = patch % columns, row = Math.floor(patch / columns);
    const left = Math.round(column * width / columns), top = Math.round(row * height / rows);
    const wide = Math.round((column + 1) * width / columns) - left, high = Math.round((row + 1) * height / rows) - top;
    if (values && keep[patch]) { pen.fillStyle = colour(values[patch], 0.6); pen.fillRect(left, top, wide, high); }
    if (values && !keep[patch]) { pen.fillStyle = "rgba(0,0,0,0.72)"; pen.fillRect(left, top, wide, high); }
    if (options.lines) { pen.strokeStyle = "rgba(255,255,255,0.5)"; pen.lineWidth = 1; pen.strokeRect(left + 0.5, top + 0.5, wide - 1, high - 1); }
    if (options.off && options.off.has(patch)) cross(pen, left, top, wide, high);
    if (options.cursor === patch) ring(pen, left, top, wide, high);
  }
}

/** A patch that was taken away: grey with a cross, so that it does not rest on colour. */
function cross(pen, left, top, wide, high) {
  pen.fillStyle = "rgba(128,128,128,0.9)";
  pen.fillRect(left, top, wide, high);
  for (const [style, thick] of [["#000", 4], ["#fff", 2]]) {
    pen.strokeStyle = style; pen.lineWidth = thick;
    pen.beginPath();
    pen.moveTo(left + 3, top + 3); pen.lineTo(left + wide - 3, top + high - 3);
    pen.moveTo(left + wide - 3, top + 3); pen.lineTo(left + 3, top + high - 3);
    pen.stroke();
  }
}

function ring(pen, left, top, wide, high) {
  for (const [style, inset] of [["#000", 1.5], ["#fff", 4.5]]) {
    pen.strokeStyle = style; pen.lineWidth = 3;
    pen.strokeRect(left + inset, top + inset, Math.max(1, wide - 2 * inset), Math.max(1, high - 2 * inset));
  }
}

function drawMap() {
  const picture = state.current, name = at("map").value;
  if (!picture || !picture.element.naturalWidth) return;
  const values = name && picture.maps[name] ? scaled(name, picture.maps[name]) : null;
  const threshold = Number(at("threshold").value);
  const keep = values ? values.map((value) => value >= threshold) : [];
  const focused = document.activeElement === at("canvas");
  draw(at("canvas"), values, keep, { least: 560, off: picture.off, lines: at("lines").checked, cursor: focused ? state.cursor : null });
  at("threshold").disabled = at("below").disabled = !values;
  const kept = keep.filter(Boolean).length;
  at("kept").textContent = values ? `${threshold.toFixed(2)}: ${kept} of ${patches()} patches at or above` : "choose a map to use the threshold";
  at("threshold").setAttribute("aria-valuetext", at("kept").textContent);
  at("below").disabled = !values || kept === patches() || kept === 0;
  at("reset").disabled = !picture.off.size;
  at("away").textContent = picture.off.size ? `${picture.off.size} of ${patches()} patches are away.` : "All patches are there.";
  scaleText(name, values, picture);
  const [rows, columns] = state.model.grid;
  at("canvas").setAttribute("aria-label", `${picture.name}: ${rows} rows and ${columns} columns of patches, map ${name || "none"}`);
}

function scaleText(name, values, picture) {
  at("scale").parentElement.hidden = !values;
  if (!values) { at("scale-note").textContent = ""; return; }
  const raw = picture.maps[name], digits = (value) => Number(value.toPrecision(2)).toString();
  at("scale-note").textContent = isFixed(name, raw)
    ? `Mask, fixed scale: 0 is left out, 1 is selected. Here from ${Math.min(...raw).toFixed(2)} to ${Math.max(...raw).toFixed(2)}.`
    : `${name}, STRETCHED to this image's range (${digits(Math.min(...raw))} to ${digits(Math.max(...raw))}).`;
}

function drawScale() {
  const canvas = at("scale"), pen = canvas.getContext("2d");
  pen.fillStyle = "#808080";
  pen.fillRect(0, 0, 1, canvas.height);
  for (let y = 0; y < canvas.height; y++) { pen.fillStyle = colour(1 - y / (canvas.height - 1), 0.6); pen.fillRect(0, y, 1, 1); }
}

function drawRankings() {
  const picture = state.current, count = keptCount();
  const figures = wantedRankings().filter((name) => picture.maps[name]).map((name) => {
    const values = scaled(name, picture.maps[name]);
    const best = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, count);
    const keep = values.map(() => false);
    for (const patch of best) keep[patch] = true;
    const canvas = make("canvas", { role: "img", "aria-label": `${name} over ${picture.name}; highest at ${place(best[0] ?? 0)}` });
    draw(canvas, values, keep, { longest: 360, least: 240 });
    const note = state.model.controls.includes(name) ? "control: knows nothing of the model" : isFixed(name, picture.maps[name]) ? "fixed scale, 0 to 1" : "own range";
    return make("figure", {}, canvas, make("figcaption", {}, name, make("span", { class: "quiet" }, `${note}; ${count} of ${values.length} kept`)));
  });
  at("rankings").replaceChildren(...figures);
}

// Patches away

function place(patch) {
  const columns = state.model.grid[1];
  return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
}

function sayCell(patch) {
  const picture = state.current, name = at("map").value, values = name && picture.maps[name];
  const value = values ? `, ${name} ${Number(values[patch].toPrecision(3))}` : "";
  at("cell").textContent = `${place(patch)}${value}, ${picture.off.has(patch) ? "away" : "there"}`;
}

let latest = 0;

/** Asks what the model says without the patches; only the last question's answer is shown. */
async function perturb() {
  const picture = state.current, turn = ++latest;
  drawMap();
  if (!picture.off.size) {
    picture.moved = null;
  } else {
    const ask_for = { model: state.model.id, image: picture.image, off: [...picture.off], operator: at("operator").value };
    const moved = await ask("/api/perturb", ask_for);
    if (turn !== latest || picture !== state.current) return;
    picture.moved = moved;
  }
  drawAnswer();
}

async function toggle(patch) {
  const { off } = state.current;
  if (!off.delete(patch)) off.add(patch);
  state.cursor = patch;
  sayCell(patch);
  await perturb();
}

function patchUnder(event) {
  const box = at("canvas").getBoundingClientRect(), [rows, columns] = state.model.grid;
  const column = Math.floor((event.clientX - box.left) / box.width * columns), row = Math.floor((event.clientY - box.top) / box.height * rows);
  return Math.min(Math.max(row, 0), rows - 1) * columns + Math.min(Math.max(column, 0), columns - 1);
}

function canvasKeys(event) {
  const [rows, columns] = state.model.grid, column = state.cursor % columns, row = Math.floor(state.cursor / columns);
  const moves = {
    ArrowLeft: [row, Math.max(0, column - 1)], ArrowRight: [row, Math.min(columns - 1, column + 1)],
    ArrowUp: [Math.max(0, row - 1), column], ArrowDown: [Math.min(rows - 1, row + 1), column],
    Home: [row, 0], End: [row, columns - 1],
  };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in moves) {
    state.cursor = moves[event.key][0] * columns + moves[event.key][1];
    sayCell(state.cursor);
    drawMap();
  } else if (event.key === " " || event.key === "Enter") guarded(toggle)(state.cursor);
  else if (event.key === "Escape") guarded(reset)();
  else return;
  event.preventDefault();
}

async function reset() { state.current.off.clear(); at("cell").textContent = ""; await perturb(); }

async function takeDimmed() {
  const name = at("map").value, values = scaled(name, state.current.maps[name]), threshold = Number(at("threshold").value);
  state.current.off = new Set(values.map((value, patch) => (value < threshold ? patch : -1)).filter((patch) => patch >= 0));
  await perturb();
}

// Runs

const DASHES = ["", "7 4", "2 3", "9 3 2 3", "5 2", "1 4"];

async function showRuns() {
  state.runs = (await ask("/api/runs")).runs;
  const names = [...new Set(state.runs.flatMap((run) => Object.keys(run.scores || {})))];
  const head = ["compare", "name", "method", "unseen domain", "seed", "state", ...names];
  const cells = head.map((name, i) => make("th", { scope: "col", class: i < 6 ? "text" : null }, name));
  at("runs-table").tHead.replaceChildren(make("tr", {}, ...cells));
  at("runs-table").tBodies[0].replaceChildren(...state.runs.map((run) => runRow(run, names)));
  if (!state.chosen.size) for (const run of state.runs.filter((one) => !one.error).slice(0, 3)) state.chosen.add(run.id);
  for (const box of at("runs-table").querySelectorAll("input")) box.checked = state.chosen.has(box.value);
  await compare();
}

function score(name, value) { return value == null ? "" : name.startsWith("mask") ? value.toFixed(2) : (100 * value).toFixed(1); }

function runRow(run, names) {
  const box = make("input", { type: "checkbox", value: run.id, "aria-label": `Compare ${modelName(run)}` });
  box.disabled = Boolean(run.error);
  box.addEventListener("change", guarded(async () => {
    if (box.checked) state.chosen.add(run.id); else state.chosen.delete(run.id);
    await compare();
  }));
  const word = run.error || (run.kind === "model" ? "model" : run.done ? "finished" : "not finished");
  const texts = [run.method, run.unseen, run.seed, word].map((value) => make("td", { class: "text" }, String(value ?? "")));
  const numbers = names.map((name) => make("td", {}, score(name, (run.scores || {})[name])));
  return make("tr", {}, make("td", {}, box), make("th", { scope: "row", class: "text" }, run.name), ...texts, ...numbers);
}

async function compare() {
  const ids = state.runs.map((run) => run.id).filter((id) => state.chosen.has(id));
  const runs = await Promise.all(ids.map((id) => ask(`/api/runs/${id}`)));
  if (ids.join() !== state.runs.map((run) => run.id).filter((id) => state.chosen.has(id)).join()) return;
  if (!runs.length) { at("compare").replaceChildren(make("p", { class: "quiet" }, "Tick runs in the table to compare them.")); return; }
  at("compare").replaceChildren(differences(runs), ...charts(runs), ...summaries(runs));
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings || {})))];
  const text = (run, key) => { const value = (run.settings || {})[key]; return value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value); };
  const different = keys.filter((key) => new Set(runs.map((run) => text(run, key))).size > 1);
  const caption = runs.length < 2 ? "Tick two runs or more to see the settings that differ." : different.length ? "Settings that differ" : "All settings are equal.";
  const head = make("tr", {}, make("th", { scope: "col" }, "setting"), ...runs.map((run) => make("th", { scope: "col", class: "text" }, run.name)));
  const body = different.map((key) => make("tr", {}, make("th", { scope: "row" }, key), ...runs.map((run) => make("td", { class: "text" }, text(run, key)))));
  const table = make("table", { id: "differences" }, make("caption", {}, caption), ...(different.length ? [make("thead", {}, head), make("tbody", {}, ...body)] : []));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
}

function charts(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  if (!names.length) return [];
  const legend = make("ul", { class: "legend", "aria-label": "Lines of the curves" }, ...runs.map((run, i) => {
    const line = make("path", { class: `curve c${i % 6}`, d: "M2 7H40", "stroke-dasharray": DASHES[i % 6] || null });
    return make("li", {}, make("svg", { viewBox: "0 0 42 14", "aria-hidden": "true" }, line), ` ${modelName(run)}`);
  }));
  const drawn = names.map((name) => chart(name, runs));
  return [make("h3", {}, "Training curves"), legend, make("div", { class: "charts" }, ...drawn)];
}

function chart(name, runs) {
  const points = runs.flatMap((run) => run.curves[name] || []);
  const [left, right, top, bottom] = [44, 350, 26, 172];
  const range = (values) => { const low = Math.min(...values), high = Math.max(...values); return high > low ? [low, high] : [low - 0.5, high + 0.5]; };
  const [first, last] = range(points.map((point) => point[0])), [low, high] = range(points.map((point) => point[1]));
  const x = (step) => left + (step - first) / (last - first) * (right - left), y = (value) => bottom - (value - low) / (high - low) * (bottom - top);
  const said = runs.filter((run) => run.curves[name]).map((run) => { const curve = run.curves[name]; return `${modelName(run)} from ${curve[0][1].toFixed(3)} to ${curve.at(-1)[1].toFixed(3)}`; });
  const lines = runs.map((run, i) => {
    const curve = run.curves[name] || [], d = curve.map((point, k) => `${k ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
    return make("path", { class: `curve c${i % 6}`, d: d + (curve.length === 1 ? "h2" : ""), "stroke-dasharray": DASHES[i % 6] || null });
  });
  const label = (px, py, text, anchor = "start") => make("text", { x: px, y: py, "text-anchor": anchor }, text);
  const axes = [make("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` }), label(left, 15, name),
    label(left - 5, top + 8, high.toPrecision(3), "end"), label(left - 5, bottom, low.toPrecision(3), "end"),
    label(left, bottom + 15, String(Math.round(first))), label(right, bottom + 15, `step ${Math.round(last)}`, "end")];
  return make("svg", { viewBox: "0 0 360 196", role: "img", "aria-label": `${name} over the steps: ${said.join("; ")}` }, ...axes, ...lines);
}

/** A summary as it was written, with its Markdown tables as tables. */
function written(text) {
  const blocks = [];
  for (const line of text.split("\n")) {
    const table = line.startsWith("|"), last = blocks.at(-1);
    if (last && last.table === table) last.lines.push(line); else blocks.push({ table, lines: [line] });
  }
  return blocks.filter((block) => block.lines.some((line) => line.trim())).map((block) => {
    if (!block.table) return make("pre", {}, block.lines.join("\n").trim());
    const rows = block.lines.filter((line) => !/^[|\s:-]+$/.test(line)).map((line) => line.replace(/^\||\|\s*$/g, "").split("|").map((cell) => cell.trim()));
    const head = make("tr", {}, ...rows[0].map((cell) => make("th", { scope: "col" }, cell)));
    const body = rows.slice(1).map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))));
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the summary" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  });
}

function summaries(runs) {
  const boxes = runs.map((run) => make("div", { class: "summary" }, make("h4", {}, modelName(run)), ...written(run.summary || "no summary yet")));
  return [make("h3", {}, "Summaries side by side"), make("div", { class: "side", tabindex: "0", role: "region", "aria-label": "Summaries side by side" }, ...boxes)];
}

// What listens to what

function chooseTab(tab) {
  for (const one of document.querySelectorAll("[role=tab]")) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    at(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (tab.id === "tab-runs") guarded(showRuns)();
}

function listen() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [i, tab] of tabs.entries()) {
    tab.addEventListener("click", () => chooseTab(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { const next = tabs[(i + step + tabs.length) % tabs.length]; chooseTab(next); next.focus(); }
    });
  }
  at("model").addEventListener("change", guarded(chooseModel));
  at("files").addEventListener("change", guarded(async () => { const files = [...at("files").files]; at("files").value = ""; await openFiles(files); }));
  at("show-example").addEventListener("click", guarded(async () => {
    const found = await ask("/api/example", { model: state.model.id, example: Number(at("example").value) });
    if (found.error) problem(found.name, found.error); else await opened(found);
  }));
  at("map").addEventListener("change", guarded(fetchMaps));
  at("ranking-names").addEventListener("change", guarded(fetchMaps));
  at("lines").addEventListener("change", drawMap);
  at("stretch").addEventListener("change", () => { drawMap(); drawRankings(); });
  at("threshold").addEventListener("input", () => { drawMap(); drawRankings(); });
  at("operator").addEventListener("change", guarded(perturb));
  at("reset").addEventListener("click", guarded(reset));
  at("below").addEventListener("click", guarded(takeDimmed));
  const canvas = at("canvas");
  canvas.addEventListener("click", guarded((event) => toggle(patchUnder(event))));
  canvas.addEventListener("keydown", canvasKeys);
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, drawMap);
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); document.body.classList.toggle("dropping", name === "dragover"); });
  }
  document.addEventListener("drop", guarded(async (event) => { if (event.dataTransfer.files.length) await openFiles([...event.dataTransfer.files]); }));
}

listen();
drawScale();
guarded(start)();
