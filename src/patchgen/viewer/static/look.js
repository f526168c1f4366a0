"use strict";
// Looking at images: models, uploads, the answer, and patches taken away.

const SHOWN = 10; // classes in the table
const FIRST = ["mask", "attention", "grad-cam"]; // rankings that are shown unless others are ticked

// Models

async function listModels() {
  const { models, limits } = await ask("/api/models");
  state.limits = limits;
  const size = `at most ${megabytes(limits.file_bytes)} and ${Math.round(limits.pixels / 1e6)} million pixels each`;
  at("limits").textContent = `or drop them on this page (${size})`;
  const usable = models.filter((row) => row.task !== "ccd" && !row.error);
  if (!usable.length) throw new Error("None of these runs has a model to look at; see “Compare runs”.");
  state.usable = usable;
  options(at("model"), usable.map((row) => [row.id, modelName(row)]));
  const masked = usable.find((row) => (row.method || "").startsWith("patchgen"));
  if (masked) at("model").value = masked.id;
  await chooseModel();
}

async function chooseModel() {
  const id = at("model").value;
  at("status").textContent = "Loading the model …";
  try {
    const found = await ask(`/api/models/${id}`);
    if (id !== at("model").value) return; // another was chosen in the meantime
    state.model = found;
  } catch (error) {
    if (state.model) at("model").value = state.model.id; // the one before stays
    throw error;
  } finally {
    at("status").textContent = "";
  }
  const { classes, grid, image_size: size, has_mask: mask } = state.model;
  const none = mask ? "" : "; its method has no mask: no selection to read";
  at("about").textContent = `${classes.length} classes, ${size} px, ${grid[0]} × ${grid[1]} patches${none}`;
  fillChoices();
  fillMethods();
  const { examples } = await ask(`/api/models/${id}/examples`);
  if (id !== state.model.id) return;
  at("examples").hidden = !examples.length;
  options(at("example"), examples.map((one) => [one.example, `${one.label}: ${one.name}`]));
  if (state.current) await show(state.current);
}

function fillChoices() {
  const { rankings, controls, perturbations } = state.model, wanted = at("map").value;
  options(at("map"), [...rankings.map((name) => [name, name]), ["", "none: the image alone"]]);
  at("map").value = rankings.includes(wanted) ? wanted : rankings[0];
  options(at("operator"), Object.entries(perturbations));
  const boxes = rankings.map((name) => {
    const box = make("input", { type: "checkbox", value: name });
    box.checked = FIRST.includes(name) || (name === "rollout" && !rankings.includes("mask"));
    return make("label", { class: "check" }, box, controls.includes(name) ? `${name} (control)` : name);
  });
  at("ranking-names").replaceChildren(at("ranking-names").querySelector("legend"), ...boxes);
}

// Pictures

function problem(name, reason) {
  const close = make("button", { type: "button", "aria-label": `Dismiss the message about ${name}` }, "Dismiss");
  const row = make("li", {}, make("span", {}, `${name}: ${reason}`), close);
  close.addEventListener("click", () => {
    row.remove();
    at("files").focus();
  });
  at("problems").append(row);
}

async function openFiles(files) {
  if (!state.model) throw new Error("Choose a model that can be loaded first.");
  let good = 0;
  for (const [i, file] of files.entries()) {
    at("status").textContent = `Reading ${i + 1} of ${files.length}: ${file.name}`;
    try {
      if (await openFile(file)) good += 1;
    } catch (error) {
      problem(file.name, error.message);
    }
  }
  const bad = files.length - good, listed = bad ? `; ${bad} could not be shown, listed below` : "";
  at("status").textContent = `${good} of ${files.length} images opened${listed}`;
}

/** Whether the file could be shown; if not, the page says why. */
async function openFile(file) {
  const most = state.limits.file_bytes;
  if (file.size > most) throw new Error(`the file has ${megabytes(file.size)}, at most ${megabytes(most)}`);
  const form = new FormData();
  form.append("model", state.model.id);
  form.append("image", file, file.name);
  const { images: [found] } = await ask("/api/predict", form);
  return opened(found);
}

async function openExample() {
  await opened(await ask("/api/example", { model: state.model.id, example: Number(at("example").value) }));
}

/** `tile.png (2)` for the second file of that name. */
function uniqueName(name) {
  const taken = new Set(state.pictures.map((one) => one.name));
  if (!taken.has(name)) return name;
  let number = 2;
  while (taken.has(`${name} (${number})`)) number += 1;
  return `${name} (${number})`;
}

async function opened(found) {
  if (found.error) {
    problem(found.name, found.error);
    return false;
  }
  const { image, truth } = found, name = uniqueName(found.name), element = new Image();
  element.src = `/api/images/${image}`;
  await element.decode();
  const button = make("button", { type: "button", title: name });
  button.append(make("img", { src: element.src, alt: "" }), make("span", {}, name));
  const picture = { image, name, truth, element, button, scores: found, off: new Set(), moved: null, maps: {} };
  button.addEventListener("click", guarded(() => show(picture)));
  at("opened").append(make("li", {}, button));
  state.pictures.push(picture);
  await show(picture);
  return true;
}

/** Makes a picture the one that is looked at; another model is asked anew. */
async function show(picture) {
  state.current = picture;
  at("empty").hidden = true;
  for (const one of state.pictures) one.button.setAttribute("aria-current", String(one === picture));
  const model = state.model.id;
  if (picture.scores.model !== model) {
    const scores = await ask("/api/score", { model, image: picture.image });
    if (model !== state.model.id) return;
    Object.assign(picture, { scores, off: new Set(), moved: null, maps: {} });
  }
  if (picture !== state.current) return;
  state.cursor = Math.min(state.cursor, patches() - 1);
  at("picture").hidden = false;
  at("cell").textContent = "";
  at("rankings").replaceChildren(); // those of the picture before
  at("methods").replaceChildren();
  drawAnswer();
  drawMap();
  await fetchMaps();
}

/** Asks for the maps that are to be seen and not there yet. */
async function fetchMaps() {
  if (!isReady()) return;
  const picture = state.current, model = state.model.id;
  if (picture.scores.mask) picture.maps.mask = picture.scores.mask.flat();
  const wanted = new Set([at("map").value, ...wantedRankings()]);
  const names = [...wanted].filter((name) => name && !picture.maps[name]);
  if (names.length) {
    const { rankings } = await ask("/api/rankings", { model, image: picture.image, names });
    if (picture !== state.current || model !== state.model.id) return;
    for (const [name, rows] of Object.entries(rankings)) picture.maps[name] = rows.flat();
  }
  drawMap();
  drawRankings();
}

// The answer

function drawAnswer() {
  const { scores, moved, off, truth } = state.current, now = moved || scores;
  const parts = [`${now.label}, ${percent(now.confidence)}`];
  if (moved) {
    const before = `before: ${scores.label}, ${percent(scores.confidence)}`;
    parts.push(`with ${off.size} of ${patches()} patches away (${before})`);
  }
  if (truth) parts.push(`true class: ${truth}, ${truth === now.label ? "right" : "wrong"}`);
  at("answer").textContent = parts.join("; ");
  at("warning").hidden = !now.unlike_training;
  at("warning").textContent = now.unlike_training
    ? "Unlike the training images: the model has seen nothing like this, so do not rely on its answer."
    : "";
  describeConfidence(now);
  drawClasses(scores, moved);
}

function describeConfidence(now) {
  const { calibrated, temperature, knows_unlike: knows } = state.model;
  const first = calibrated
    ? `Confidence is calibrated on source validation (temperature ${temperature.toFixed(2)}).`
    : "Confidence is a plain softmax, not calibrated.";
  const like = now.unlike_training || state.current.moved ? "" : "The image is like the training images.";
  const second = knows ? like : "This model has no check for images unlike its training images.";
  at("calibration").textContent = `${first} ${second}`;
}

function drawClasses(scores, moved) {
  at("classes").parentElement.classList.toggle("moving", Boolean(moved));
  const after = new Map(moved ? moved.classes.map((row) => [row.class, row.probability]) : []);
  const rows = scores.classes.slice(0, SHOWN).map((row) => classRow(row, after.get(row.class)));
  rows[0].className = "first";
  at("classes").replaceChildren(...rows);
  const all = scores.classes.length;
  at("classes-caption").textContent = "Class probabilities" + (all > SHOWN ? `: the ${SHOWN} likeliest of ${all}` : "");
}

function classRow(row, after) {
  const bars = make("td", { class: "bars", "aria-hidden": "true" });
  for (const value of after === undefined ? [row.probability] : [row.probability, after]) {
    const strip = make("div", { class: "strip" });
    strip.style.width = `${100 * value}%`;
    bars.append(strip);
  }
  const change = 100 * ((after ?? 0) - row.probability);
  const moved = `${percent(after ?? 0)} (${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)})`;
  const name = make("th", { scope: "row" }, row.class), now = make("td", {}, percent(row.probability));
  return make("tr", {}, name, now, make("td", { class: "moved" }, after === undefined ? "" : moved), bars);
}

// Patches away

let latest = 0; // only the last question's answer is shown

async function perturb() {
  if (!isReady()) return;
  const picture = state.current, turn = ++latest;
  drawMap();
  picture.moved = null;
  if (picture.off.size) {
    const operator = at("operator").value, off = [...picture.off];
    drawWaiting(off.length);
    try {
      const moved = await ask("/api/perturb", { model: state.model.id, image: picture.image, off, operator });
      if (turn !== latest || picture !== state.current) return;
      picture.moved = moved;
    } catch (error) {
      if (turn !== latest || picture !== state.current) return;
      picture.off.clear(); // there is no answer for them
      drawMap();
      drawAnswer();
      throw error;
    }
  }
  drawAnswer();
}

/** No earlier probability stays visible while those without the patches are computed. */
function drawWaiting(count) {
  at("answer").textContent = `Computing the answer with ${count} of ${patches()} patches away …`;
  at("warning").hidden = true;
  at("calibration").textContent = "";
  at("classes").replaceChildren();
}

function sayCell(patch) {
  const { maps, off } = state.current, name = at("map").value;
  const value = maps[name] ? `, ${name} ${Number(maps[name][patch].toPrecision(3))}` : "";
  at("cell").textContent = `${place(patch)}${value}, ${off.has(patch) ? "away" : "there"}`;
}

async function toggle(patch) {
  if (!isReady()) return;
  const { off } = state.current;
  if (!off.delete(patch)) off.add(patch);
  state.cursor = patch;
  sayCell(patch);
  await perturb();
}

async function putBack() {
  state.current.off.clear();
  at("cell").textContent = "";
  await perturb();
}

async function takeDimmed() {
  const values = shownMap(), all = [...values.keys()];
  state.current.off = new Set(all.filter((patch) => values[patch] < threshold()));
  await perturb();
}

function patchUnder(event) {
  const box = at("canvas").getBoundingClientRect(), [rows, columns] = state.model.grid;
  const within = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
  const row = within((event.clientY - box.top) / box.height, rows);
  return row * columns + within((event.clientX - box.left) / box.width, columns);
}

function canvasKeys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !isReady()) return;
  const [rows, columns] = state.model.grid, column = state.cursor % columns, row = Math.floor(state.cursor / columns);
  const moves = {
    ArrowLeft: [row, Math.max(0, column - 1)], ArrowRight: [row, Math.min(columns - 1, column + 1)],
    ArrowUp: [Math.max(0, row - 1), column], ArrowDown: [Math.min(rows - 1, row + 1), column],
    Home: [row, 0], End: [row, columns - 1],
  };
  if (event.key in moves) {
    state.cursor = moves[event.key][0] * columns + moves[event.key][1];
    sayCell(state.cursor);
    drawMap();
  } else if (event.key === " " || event.key === "Enter") guarded(toggle)(state.cursor);
  else if (event.key === "Escape") guarded(putBack)();
  else return;
  event.preventDefault();
}
