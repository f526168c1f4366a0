"use strict";
// The numbers of a map: their histogram, what there is to read in them, and files to keep.

const BINS = 20;
const SELECTED = 0.5; // mask value from which a patch counts as selected

/** What `patchgen explain` says of a mask: how many patches are selected, or that there is nothing to read. */
function maskReading(values) {
  const selected = values.filter((value) => value >= SELECTED).length;
  const text = `${selected} of ${values.length} patches selected (mask at least ${SELECTED})`;
  return selected === 0 || selected === values.length ? `${text}: no selection to read.` : `${text}.`;
}

function describeReading() {
  const { mask } = state.current.maps, { method, has_mask: has } = state.model;
  const none = `No selection to read: ${method} has no mask. Other rankings can be shown.`;
  at("reading").textContent = has ? (mask ? maskReading(mask) : "") : none;
}

/** How many patches have which value, with the threshold as a line. */
function drawHistogram() {
  const name = at("map").value, raw = name ? state.current.maps[name] : null;
  at("histogram").hidden = !raw;
  if (!raw) return;
  const values = scaled(name, raw), counts = new Array(BINS).fill(0);
  for (const value of values) counts[Math.min(Math.floor(value * BINS), BINS - 1)] += 1;
  const [left, right, top, bottom] = [30, 352, 10, 150], high = Math.max(...counts), wide = (right - left) / BINS;
  const bars = counts.map((count, i) => {
    const tall = (count / high) * (bottom - top), x = left + i * wide;
    return make("path", { class: "bin", d: `M${x + 1} ${bottom}v${-tall}h${wide - 2}v${tall}z` });
  });
  const label = (x, y, text, anchor) => make("text", { x, y, "text-anchor": anchor }, text);
  const line = left + threshold() * (right - left);
  const axes = [
    make("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` }),
    label(left - 4, top + 8, String(high), "end"), label(left - 4, bottom, "0", "end"),
    label(left, bottom + 14, isFixed(name, raw) ? "0" : "lowest", "start"),
    label(right, bottom + 14, isFixed(name, raw) ? "1" : "highest", "end"),
    label((left + right) / 2, bottom + 14, `${name} of a patch`, "middle"),
  ];
  const mark = make("path", { class: "mark", d: `M${line} ${top}V${bottom}` });
  const said = counts.map((count, i) => `${count} from ${(i / BINS).toFixed(2)}`);
  const spoken = `Histogram of ${name}: ${said.join(", ")}`;
  const chart = make("svg", { viewBox: "0 0 360 168", role: "img", "aria-label": spoken }, ...axes, ...bars, mark);
  at("histogram-chart").replaceChildren(chart);
}

// Files

/** A NumPy file (format 1.0) of float32 values, row by row. */
function npyFile(values, rows, columns) {
  let header = `{'descr': '<f4', 'fortran_order': False, 'shape': (${rows}, ${columns}), }`;
  header = header.padEnd(128 - 10 - 1) + "\n"; // magic, version and length are 10 bytes; the data start at 128
  const bytes = new Uint8Array(128 + 4 * values.length), view = new DataView(bytes.buffer);
  bytes.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0]);
  view.setUint16(8, header.length, true);
  bytes.set(new TextEncoder().encode(header), 10);
  values.forEach((value, i) => view.setFloat32(128 + 4 * i, value, true));
  return bytes;
}

function save(blob, ending) {
  const address = URL.createObjectURL(blob), name = state.current.name.replace(/[^\w.-]+/g, "_");
  const link = make("a", { href: address, download: `${name}-${at("map").value || "image"}.${ending}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function savePicture() {
  if (isReady()) at("canvas").toBlob((blob) => save(blob, "png"), "image/png");
}

function saveArray() {
  const values = isReady() && state.current.maps[at("map").value];
  if (values) save(new Blob([npyFile(values, ...state.model.grid)]), "npy");
}
