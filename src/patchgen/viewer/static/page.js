"use strict";
// What listens to what, and the start.

function chooseTab(tab) {
  for (const one of document.querySelectorAll("[role=tab]")) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    at(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (tab.id === "tab-runs") guarded(showRuns)();
}

function listenToTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [i, tab] of tabs.entries()) {
    tab.addEventListener("click", () => chooseTab(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      chooseTab(next);
      next.focus();
    });
  }
}

function listenToFiles() {
  at("files").addEventListener("change", guarded(async () => {
    const files = [...at("files").files];
    at("files").value = ""; // so that the same file can be chosen again
    await openFiles(files);
  }));
  at("show-example").addEventListener("click", guarded(openExample));
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      document.body.classList.toggle("dropping", name === "dragover");
    });
  }
  document.addEventListener("drop", guarded(async (event) => {
    const files = [...event.dataTransfer.files];
    if (files.length) await openFiles(files);
  }));
}

function listenToPicture() {
  const canvas = at("canvas");
  const redraw = () => {
    drawMap();
    drawRankings();
  };
  at("map").addEventListener("change", guarded(fetchMaps));
  at("ranking-names").addEventListener("change", guarded(fetchMaps));
  at("lines").addEventListener("change", drawMap);
  at("stretch").addEventListener("change", redraw);
  for (const id of ["colours", "opacity"]) {
    at(id).addEventListener("input", () => {
      drawScale();
      redraw();
    });
  }
  at("save-picture").addEventListener("click", savePicture);
  at("save-array").addEventListener("click", saveArray);
  at("compare-methods").addEventListener("click", guarded(compareMethods));
  at("threshold").addEventListener("input", redraw);
  at("operator").addEventListener("change", guarded(perturb));
  at("reset").addEventListener("click", guarded(putBack));
  at("below").addEventListener("click", guarded(takeDimmed));
  canvas.addEventListener("click", guarded((event) => toggle(patchUnder(event))));
  canvas.addEventListener("keydown", canvasKeys);
  canvas.addEventListener("focus", drawMap);
  canvas.addEventListener("blur", drawMap);
}

listenToTabs();
listenToFiles();
listenToPicture();
at("model").addEventListener("change", guarded(chooseModel));
options(at("colours"), Object.keys(COLOUR_MAPS).map((name) => [name, name]));
drawScale();
guarded(listModels)();
