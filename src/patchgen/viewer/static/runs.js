"use strict";
// Runs side by side: scores, settings that differ, training curves, summaries (written.js).

const DASHES = [null, "7 4", "2 3", "9 3 2 3", "5 2", "1 4"]; // beside the colours c0 ... c5: lines differ without them
const CHOSEN = 3; // runs that are compared at first

async function showRuns() {
  state.runs = (await ask("/api/runs")).runs;
  const names = [...new Set(state.runs.flatMap((run) => Object.keys(run.scores || {})))];
  const words = ["compare", "name", "method", "unseen domain", "seed", "state"];
  const head = [
    ...words.map((name) => make("th", { scope: "col", class: "text" }, name)),
    ...names.map((name) => make("th", { scope: "col" }, name)),
  ];
  const usable = state.runs.filter((run) => !run.error);
  if (!state.chosen.size) state.chosen = new Set(usable.slice(0, CHOSEN).map((run) => run.id));
  const rows = state.runs.map((run) => runRow(run, names));
  const caption = "Runs and models. Tick those to compare; accuracies in per cent.";
  at("runs-list").replaceChildren(scrolling(caption, head, rows, { id: "runs-table" }));
  await compare();
}

function runRow(run, names) {
  const box = make("input", { type: "checkbox", value: run.id, "aria-label": `Compare ${modelName(run)}` });
  box.disabled = Boolean(run.error);
  box.checked = state.chosen.has(run.id);
  box.addEventListener("change", guarded(async () => {
    if (box.checked) state.chosen.add(run.id);
    else state.chosen.delete(run.id);
    await compare();
  }));
  const word = run.error || (run.kind === "model" ? "model" : run.done ? "finished" : "not finished");
  const texts = [run.method, run.unseen, run.seed, word].map((one) => make("td", { class: "text" }, String(one ?? "")));
  const numbers = names.map((name) => make("td", {}, scoreText(name, (run.scores || {})[name])));
  const name = make("th", { scope: "row", class: "text" }, run.name);
  return make("tr", {}, make("td", {}, box), name, ...texts, ...numbers);
}

function scoreText(name, value) {
  if (value == null) return "";
  return name.startsWith("mask") ? value.toFixed(2) : (100 * value).toFixed(1);
}

const chosenIds = () => state.runs.map((run) => run.id).filter((id) => state.chosen.has(id));

async function compare() {
  const ids = chosenIds();
  const runs = await Promise.all(ids.map((id) => ask(`/api/runs/${id}`)));
  if (ids.join() !== chosenIds().join()) return; // ticked otherwise in the meantime
  const nothing = [make("p", { class: "quiet" }, "Tick runs in the table to compare them.")];
  const parts = runs.length ? [differences(runs), ...charts(runs), ...summaries(runs)] : nothing;
  at("compare").replaceChildren(...parts);
}

function settingText(run, key) {
  const value = (run.settings || {})[key];
  if (value == null) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings || {})))];
  const differ = keys.filter((key) => new Set(runs.map((run) => settingText(run, key))).size > 1);
  const several = differ.length ? "Settings that differ" : "All settings are equal.";
  const caption = runs.length < 2 ? "Tick two runs or more to see the settings that differ." : several;
  const names = runs.map((run) => make("th", { scope: "col", class: "text" }, run.name));
  const rows = differ.map((key) => {
    const cells = runs.map((run) => make("td", { class: "text" }, settingText(run, key)));
    return make("tr", {}, make("th", { scope: "row" }, key), ...cells);
  });
  return scrolling(caption, [make("th", { scope: "col" }, "setting"), ...names], rows, { id: "differences" });
}

// Curves

function line(i, d) {
  return make("path", { class: `curve c${i % DASHES.length}`, d, "stroke-dasharray": DASHES[i % DASHES.length] });
}

function charts(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  if (!names.length) return [];
  const legend = runs.map((run, i) => {
    const sample = make("svg", { viewBox: "0 0 42 14", "aria-hidden": "true" }, line(i, "M2 7H40"));
    return make("li", {}, sample, ` ${modelName(run)}`);
  });
  const drawn = make("div", { class: "charts" }, ...names.map((name) => chart(name, runs)));
  const list = make("ul", { class: "legend", "aria-label": "Lines of the curves" }, ...legend);
  return [make("h3", {}, "Training curves"), list, drawn];
}

/** Lowest and highest of the values, never equal. */
function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

function chart(name, runs) {
  const [left, right, top, bottom] = [44, 350, 26, 172];
  const points = runs.flatMap((run) => run.curves[name] || []);
  const [first, last] = range(points.map(([step]) => step)), [low, high] = range(points.map(([, value]) => value));
  const x = (step) => (left + ((step - first) / (last - first)) * (right - left)).toFixed(1);
  const y = (value) => (bottom - ((value - low) / (high - low)) * (bottom - top)).toFixed(1);
  const lines = runs.map((run, i) => {
    const curve = run.curves[name] || [];
    const d = curve.map(([step, value], k) => `${k ? "L" : "M"}${x(step)} ${y(value)}`).join("");
    return line(i, curve.length === 1 ? `${d}h3` : d);
  });
  const label = (px, py, text, anchor) => make("text", { x: px, y: py, "text-anchor": anchor }, text);
  const axes = [
    make("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` }),
    label(left, 15, name, "start"),
    label(left - 5, top + 8, high.toPrecision(3), "end"),
    label(left - 5, bottom, low.toPrecision(3), "end"),
    label(left, bottom + 15, String(Math.round(first)), "start"),
    label(right, bottom + 15, `step ${Math.round(last)}`, "end"),
  ];
  const said = runs.filter((run) => run.curves[name]).map((run) => {
    const curve = run.curves[name];
    return `${modelName(run)} from ${curve[0][1].toFixed(3)} to ${curve.at(-1)[1].toFixed(3)}`;
  });
  const spoken = `${name} over the steps: ${said.join("; ")}`;
  return make("svg", { viewBox: "0 0 360 196", role: "img", "aria-label": spoken }, ...axes, ...lines);
}

// Summaries

function summaries(runs) {
  const boxes = runs.map((run) => {
    const parts = written(run.summary || "no summary yet");
    return make("div", { class: "summary" }, make("h4", {}, modelName(run)), ...parts);
  });
  const title = "Summaries side by side";
  const side = make("div", { class: "side", tabindex: "0", role: "region", "aria-label": title }, ...boxes);
  return [make("h3", {}, title), side];
}
