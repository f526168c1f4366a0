"use strict";
// One image, several models: the answer and the mask of each, side by side.

const THREE = ["lp-ln", "patchgen", "patchgen-select"]; // the baseline, the method as published, selection inside

/** Models to begin with: one of each method, of the same unseen domain and seed as the chosen model if there are. */
function suggested() {
  const own = state.usable.find((row) => row.id === state.model.id);
  const alike = (row) => (row.unseen === own.unseen ? 2 : 0) + (row.seed === own.seed ? 1 : 0);
  const best = (method) => state.usable.filter((row) => row.method === method).sort((a, b) => alike(b) - alike(a))[0];
  const found = THREE.map(best).filter(Boolean);
  const others = state.usable.filter((row) => !found.includes(row));
  return [...found, ...others].slice(0, Math.min(3, state.usable.length));
}

function fillMethods() {
  const chosen = suggested(), pairs = state.usable.map((row) => [row.id, modelName(row)]);
  at("methods-panel").hidden = state.usable.length < 2;
  at("methods-choice").replaceChildren(...chosen.map((row, i) => {
    const select = make("select", {});
    options(select, pairs);
    select.value = row.id;
    return make("label", { class: "field" }, `Model ${i + 1}`, select);
  }));
}

async function compareMethods() {
  if (!isReady()) return;
  const picture = state.current, ids = [...at("methods-choice").querySelectorAll("select")].map((one) => one.value);
  const figures = [];
  for (const id of ids) {
    at("methods-status").textContent = `Asking model ${figures.length + 1} of ${ids.length} …`;
    const about = await ask(`/api/models/${id}`);
    const scores = await ask("/api/score", { model: id, image: picture.image });
    if (picture !== state.current) return;
    figures.push(methodFigure(picture, state.usable.find((row) => row.id === id), about, scores));
  }
  at("methods-status").textContent = "";
  at("methods").replaceChildren(...figures);
}

function methodFigure(picture, row, about, scores) {
  const values = scores.mask ? scores.mask.flat() : null;
  const reading = values ? maskReading(values) : `no selection to read: ${about.method} has no mask`;
  const verdict = picture.truth === scores.label ? "right" : `wrong, true class: ${picture.truth}`;
  const answer = `${scores.label}, ${percent(scores.confidence)}${picture.truth ? ` (${verdict})` : ""}`;
  const canvas = make("canvas", { role: "img", "aria-label": `${modelName(row)}: ${answer}; ${reading}` });
  const shown = values ? scaled("mask", values) : null;
  draw(canvas, shown, shown ? shown.map(() => true) : [], { longest: 480, least: 320, grid: about.grid });
  const lines = [make("strong", {}, modelName(row)), make("div", {}, answer), make("span", { class: "quiet" }, reading)];
  return make("figure", {}, canvas, make("figcaption", {}, ...lines));
}
