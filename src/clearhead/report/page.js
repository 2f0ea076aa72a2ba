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

  const { figures, key, dark } = JSON.parse(document.getElementById("data").textContent);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displayModeBar: false, displaylogo: false };
  const SAVED = 900; // pixels that a file is wide
  const HEADING = 44; // pixels above the axes of a file

  // The figures come in the colours of a light page. Only values of colour attributes are
  // translated, so that text which happens to read like a colour stays as it is.
  function themed(value, colour = false) {
    if (typeof value === "string") return colour && night.matches ? dark[value] ?? value : value;
    if (Array.isArray(value)) return colour ? value.map((item) => themed(item, true)) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([key, item]) => [
        key,
        themed(item, /color(scale)?$/.test(key)),
      ]),
    );
  }

  // Traces are objects in an array: each is themed on its own.
  function draw(name) {
    const { data, layout, ownLegend } = figures[name];
    const dragmode = window.matchMedia("(pointer: fine)").matches ? "zoom" : false;
    return Plotly.react(
      name,
      data.map((trace) => themed(trace)),
      {
        ...themed(layout),
        showlegend: layout.showlegend && (ownLegend || !key),
        dragmode,
        shapes: (layout.shapes ?? []).map((shape) => themed(shape)),
        annotations: (layout.annotations ?? []).map((note) => themed(note)),
      },
      config,
    );
  }

  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // A file stands alone: light on white whatever the page's colours, under a heading that says all
  // that the page says around the figure, with a legend or colour scale of its own at the right.
  async function save(name) {
    const element = document.getElementById(name);
    const { data, layout } = figures[name];
    const before = [...element.closest("section").querySelectorAll(".tag b")].filter(
      (tag) => tag.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING,
    );
    const heading = [element.getAttribute("aria-label"), before.at(-1)?.textContent]
      .filter(Boolean)
      .join(", ");
    const colorbar = { thickness: 12 };
    const address = await Plotly.toImage(
      {
        data: data.map((trace) =>
          trace.type === "heatmap" ? { ...trace, showscale: true, colorbar } : trace,
        ),
        layout: {
          ...layout,
          paper_bgcolor: "#ffffff",
          margin: { ...layout.margin, t: HEADING },
          legend: { x: 1.02, y: 1, tracegroupgap: 0 },
          title: { text: escaped(heading), font: { size: 15 }, x: 0.02, y: 0.98, yanchor: "top" },
        },
      },
      {
        format: "svg",
        width: SAVED,
        height: element.clientHeight + HEADING,
      },
    );
    const text = decodeURIComponent(address.slice(address.indexOf(",") + 1));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    link.download = `${heading.replace(/[^\p{L}\p{N}]+/gu, "-").toLowerCase()}.svg`;
    link.click();
  }

  for (const name of Object.keys(figures)) {
    const plot = document.getElementById(name);
    const button = document.createElement("button");
    button.className = "save";
    button.textContent = "save as SVG";
    button.setAttribute("aria-label", `save as SVG: ${plot.getAttribute("aria-label")}`);
    button.addEventListener("click", () => save(name));
    plot.after(button);
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

  async function drawAnew() {
    drawn.clear();
    await drawMissing();
  }

  night.addEventListener("change", drawAnew);
  for (const fold of document.querySelectorAll("details")) {
    fold.addEventListener("toggle", () => fold.open && drawMissing());
  }
  drawMissing();
})();
