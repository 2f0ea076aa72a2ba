"use strict";
(() => {
  const root = document.documentElement;
  const errors = [];
  const report = (message) => {
    errors.push(String(message));
    root.dataset.errors = errors.join(" | ");
  };
  window.addEventListener("error", (event) => report(event.message));
  window.addEventListener("unhandledrejection", (event) => report(event.reason));
  document.addEventListener("securitypolicyviolation", (event) => report(event.violatedDirective));

  const { figures, dark } = JSON.parse(document.getElementById("data").textContent);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  // One button, which saves the figure.
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["toImage"]],
    toImageButtonOptions: { format: "svg" },
  };

  // The figures come in the colours of a light page. Only values of colour attributes are
  // translated, so that text which happens to read like a colour stays as it is.
  function themed(value, colour = false) {
    if (typeof value === "string") return colour && night.matches ? dark[value] ?? value : value;
    if (Array.isArray(value)) return value.map((item) => themed(item, colour));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([key, item]) => [key, themed(item, /color(scale)?$/.test(key))]),
    );
  }

  function draw(name) {
    const { data, layout } = figures[name];
    const dragmode = window.matchMedia("(pointer: fine)").matches ? "zoom" : false;
    return Plotly.react(name, themed(data), { ...themed(layout), dragmode }, config);
  }

  // What is folded away has no size: it is drawn when a reader opens it.
  const folded = (name) => document.getElementById(name).closest("details:not([open])") !== null;
  const drawn = new Set();

  async function drawMissing() {
    for (const name of Object.keys(figures)) {
      if (folded(name)) continue;
      if (drawn.has(name)) Plotly.Plots.resize(name);
      else {
        drawn.add(name);
        await draw(name);
      }
    }
    root.dataset.theme = night.matches ? "dark" : "light";
    root.dataset.drawn = drawn.size;
  }

  night.addEventListener("change", () => {
    drawn.clear();
    drawMissing();
  });
  for (const fold of document.querySelectorAll("details")) {
    fold.addEventListener("toggle", () => fold.open && drawMissing());
  }
  drawMissing();
})();
