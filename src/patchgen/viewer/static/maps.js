"use strict";
// Maps over the image: colours, threshold, patches that are away, rankings side by side.

// matplotlib's colour maps at even steps from 0 to 1
const COLOUR_MAPS = {
  viridis: [
    [68, 1, 84], [72, 24, 106], [71, 45, 123], [66, 64, 134], [59, 82, 139], [51, 99, 141], [44, 114, 142],
    [38, 130, 142], [33, 145, 140], [31, 160, 136], [40, 174, 128], [63, 188, 115], [94, 201, 98], [132, 212, 75],
    [173, 220, 48], [216, 226, 25], [253, 231, 37],
  ],
  cividis: [
    [0, 34, 78], [26, 56, 111], [67, 78, 108], [97, 101, 111], [125, 124, 120], [155, 148, 118], [188, 174, 108],
    [222, 201, 88], [254, 232, 56],
  ],
  magma: [
    [0, 0, 4], [29, 17, 71], [81, 18, 124], [131, 38, 129], [183, 55, 121], [231, 82, 99], [252, 137, 97],
    [254, 196, 136], [252, 253, 191],
  ],
  gray: [[0, 0, 0], [255, 255, 255]],
};
const CONSTANT = 1e-4; // a mask whose range is smaller is never stretched: noise would look like form

/** Whether the picture's answer is the chosen model's: not while another model is being loaded and asked. */
const isReady = () => Boolean(state.current) && state.current.scores.model === state.model.id;
const patches = () => state.model.grid[0] * state.model.grid[1];
const threshold = () => Number(at("threshold").value);

function place(patch) {
  const columns = state.model.grid[1];
  return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
}

/** The colour of a value at the opacity that is set: 0.6 at first, as in `patchgen explain`. */
function colour(value) {
  const colours = COLOUR_MAPS[at("colours").value];
  const position = Math.min(Math.max(value, 0), 1) * (colours.length - 1);
  const low = Math.min(Math.floor(position), colours.length - 2);
  const mixed = colours[low].map((one, i) => Math.round(one + (position - low) * (colours[low + 1][i] - one)));
  return `rgba(${mixed.join(",")},${at("opacity").value})`;
}

/** Whether a map is shown on the fixed scale of masks. */
function isFixed(name, values) {
  return name === "mask" && (!at("stretch").checked || Math.max(...values) - Math.min(...values) <= CONSTANT);
}

/** Values from 0 to 1: the mask as it is unless asked otherwise, other rankings stretched to their own range. */
function scaled(name, values) {
  if (isFixed(name, values)) return values;
  const low = Math.min(...values), high = Math.max(...values);
  return values.map((value) => (high > low ? (value - low) / (high - low) : 0.5));
}

/** The map that is shown over the image, from 0 to 1; null for the image alone. */
function shownMap() {
  const name = at("map").value, values = name ? state.current.maps[name] : null;
  return values ? scaled(name, values) : null;
}

/** Draws the current picture with a map: colours where `keep` says so, darkness elsewhere. */
function draw(canvas, values, keep, look) {
  const { longest = 1024, least = 0, off = null, lines = false, cursor = null, grid = state.model.grid } = look;
  const { element } = state.current, [rows, columns] = grid;
  const side = Math.max(element.naturalWidth, element.naturalHeight);
  const scale = Math.min(Math.max(side, least), longest) / side;
  const width = canvas.width = Math.max(1, Math.round(element.naturalWidth * scale));
  const height = canvas.height = Math.max(1, Math.round(element.naturalHeight * scale));
  const pen = canvas.getContext("2d");
  pen.filter = values ? "grayscale(1)" : "none";
  pen.drawImage(element, 0, 0, width, height);
  pen.filter = "none";
  for (let patch = 0; patch < rows * columns; patch++) {
    const column = patch % columns, row = Math.floor(patch / columns);
    const left = Math.round((column * width) / columns), top = Math.round((row * height) / rows);
    const wide = Math.round(((column + 1) * width) / columns) - left;
    const high = Math.round(((row + 1) * height) / rows) - top;
    const box = [left, top, wide, high];
    if (values) {
      pen.fillStyle = keep[patch] ? colour(values[patch]) : "rgba(0,0,0,0.72)";
      pen.fillRect(...box);
    }
    if (lines) outline(pen, box, "rgba(255,255,255,0.5)", 1, 0.5);
    if (off && off.has(patch)) cross(pen, box);
    if (cursor === patch) {
      outline(pen, box, "#000", 3, 1.5);
      outline(pen, box, "#fff", 3, 4.5);
    }
  }
}

function outline(pen, [left, top, wide, high], style, thick, inset) {
  pen.strokeStyle = style;
  pen.lineWidth = thick;
  pen.strokeRect(left + inset, top + inset, Math.max(1, wide - 2 * inset), Math.max(1, high - 2 * inset));
}

/** A patch that was taken away: grey with a cross, so that it does not rest on colour. */
function cross(pen, [left, top, wide, high]) {
  pen.fillStyle = "rgba(128,128,128,0.9)";
  pen.fillRect(left, top, wide, high);
  for (const [style, thick] of [["#000", 4], ["#fff", 2]]) {
    pen.strokeStyle = style;
    pen.lineWidth = thick;
    pen.beginPath();
    pen.moveTo(left + 3, top + 3);
    pen.lineTo(left + wide - 3, top + high - 3);
    pen.moveTo(left + wide - 3, top + 3);
    pen.lineTo(left + 3, top + high - 3);
    pen.stroke();
  }
}

function drawMap() {
  if (!isReady()) return;
  const picture = state.current, name = at("map").value;
  const values = shownMap(), keep = values ? values.map((value) => value >= threshold()) : [];
  const cursor = document.activeElement === at("canvas") ? state.cursor : null;
  draw(at("canvas"), values, keep, { least: 560, off: picture.off, lines: at("lines").checked, cursor });
  const [rows, columns] = state.model.grid;
  const label = `${picture.name}: ${rows} rows and ${columns} columns of patches, map ${name || "none"}`;
  at("canvas").setAttribute("aria-label", label);
  describeThreshold(values, keep.filter(Boolean).length);
  describeScale(name, values);
  describeReading();
  drawHistogram();
  at("save-array").disabled = !values;
  const away = picture.off.size;
  at("reset").disabled = !away;
  at("away").textContent = away ? `${away} of ${patches()} patches are away.` : "All patches are there.";
}

function describeThreshold(values, kept) {
  const text = `${threshold().toFixed(2)}: ${kept} of ${patches()} patches at or above`;
  at("kept").textContent = values ? text : "choose a map to use the threshold";
  at("threshold").disabled = !values;
  at("threshold").setAttribute("aria-valuetext", at("kept").textContent);
  at("below").disabled = !values || kept === patches();
}

function describeScale(name, values) {
  at("scale").parentElement.hidden = !values;
  at("scale-note").textContent = "";
  if (!values) return;
  const raw = state.current.maps[name], low = Math.min(...raw), high = Math.max(...raw);
  const short = (value) => Number(value.toPrecision(2));
  at("scale-note").textContent = isFixed(name, raw)
    ? `Mask, fixed scale: 0 is left out, 1 is selected. Here from ${low.toFixed(2)} to ${high.toFixed(2)}.`
    : `${name}, STRETCHED to this image's range (${short(low)} to ${short(high)}).`;
}

/** The colour bar; its colours lie on grey as they do on the image. */
function drawScale() {
  const canvas = at("scale"), pen = canvas.getContext("2d");
  pen.fillStyle = "#808080";
  pen.fillRect(0, 0, 1, canvas.height);
  for (let y = 0; y < canvas.height; y++) {
    pen.fillStyle = colour(1 - y / (canvas.height - 1));
    pen.fillRect(0, y, 1, 1);
  }
}

/** Each ranking keeps as many of its best patches as the map above keeps at the threshold. */
function drawRankings() {
  if (!isReady()) return;
  const { maps } = state.current, above = shownMap();
  const count = above ? above.filter((value) => value >= threshold()).length : patches();
  const names = wantedRankings().filter((name) => maps[name]);
  at("rankings").replaceChildren(...names.map((name) => rankingFigure(name, maps[name], count)));
}

function rankingFigure(name, raw, count) {
  const values = scaled(name, raw), order = [...values.keys()].sort((a, b) => values[b] - values[a]);
  const best = new Set(order.slice(0, count)), keep = values.map((_, patch) => best.has(patch));
  const label = `${name} over ${state.current.name}; highest at ${place(order[0])}`;
  const canvas = make("canvas", { role: "img", "aria-label": label });
  draw(canvas, values, keep, { longest: 360, least: 240 });
  const range = isFixed(name, raw) ? "fixed scale, 0 to 1" : "own range";
  const note = state.model.controls.includes(name) ? "control: knows nothing of the model" : range;
  const small = make("span", { class: "quiet" }, `${note}; ${count} of ${values.length} kept`);
  return make("figure", {}, canvas, make("figcaption", {}, name, small));
}

function wantedRankings() {
  return [...at("ranking-names").querySelectorAll("input:checked")].map((box) => box.value);
}
