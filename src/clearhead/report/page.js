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

  const { figures, key, attention, dark } = JSON.parse(document.getElementById("data").textContent);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displayModeBar: false, displaylogo: false };
  const RESOLUTION = 10000;
  const SAVED = 900; // pixels that a file is wide
  // The colours of attention maps follow the signed square root of the weight.
  const ROOTS = { tickvals: [-1, -0.5, 0, 0.5, 1], ticktext: ["−1", "−0.25", "0", "0.25", "1"] };
  const HEADING = 44; // pixels above the axes of a file
  const TICK = 11; // pixels that a token's name takes along an axis

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
    const which = element.parentElement.querySelector(".which");
    const heading = [element.getAttribute("aria-label"), which?.textContent, before.at(-1)?.textContent]
      .filter(Boolean)
      .join(", ");
    const square = element.classList.contains("map");
    const colorbar = { thickness: 12, ...(square ? ROOTS : {}) };
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
        height: square ? SAVED - HEADING : element.clientHeight + HEADING,
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

  function unpack(text, size, causal) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    let offset = 0;
    return Array.from({ length: size }, (_, i) =>
      Array.from({ length: size }, (_, j) => {
        if (causal && j > i) return null;
        offset += 2;
        return view.getInt16(offset - 2, true) / RESOLUTION;
      }),
    );
  }

  // Every n-th token is named on an axis, so that names do not run into each other.
  function ticks(tokens, pixels) {
    const every = Math.max(1, Math.ceil((tokens.length * TICK) / Math.max(pixels, 1)));
    const places = tokens.map((_, i) => i).filter((i) => i % every === 0);
    return { tickmode: "array", tickvals: places, ticktext: places.map((i) => tokens[i]) };
  }

  function fill(panel, layer, place, places) {
    const { figure, signed, causal, tokens, maps, heads } = panel;
    const head = heads[Math.floor((place * heads.length) / places)];
    const packed = maps[`${layer}.${head}`];
    const element = document.getElementById(figure);
    const which = element.parentElement.querySelector(".which");
    const [trace] = figures[figure].data;
    const layout = figures[figure].layout;
    which.textContent =
      `layer ${layer}, head ${head} (of ${heads.length})` +
      (packed === undefined ? ": not recorded" : signed ? ", signed" : "");
    const weights = packed === undefined ? [[null]] : unpack(packed, tokens.length, causal);
    trace.z = weights.map((row) =>
      row.map((w) => (w === null ? null : Math.sign(w) * Math.sqrt(Math.abs(w)))),
    );
    trace.text = weights.map((row, i) =>
      row.map((w, j) =>
        w === null ? "" : `${tokens[i]} (${i}) → ${tokens[j]} (${j})<br>weight ${w.toFixed(4)}`,
      ),
    );
    const pixels = element.clientWidth - 90;
    Object.assign(layout.xaxis, ticks(tokens, pixels));
    Object.assign(layout.yaxis, ticks(tokens, pixels));
  }

  // What is folded away has no size: it is drawn when a reader opens it.
  const folded = (name) => document.getElementById(name).closest("details:not([open])") !== null;
  const drawn = new Set();

  function fillAll() {
    if (attention.length === 0) return;
    const layer = document.getElementById("layer").value;
    const place = Number(document.getElementById("head").value);
    const places = Math.max(...attention.map((panel) => panel.heads.length));
    for (const panel of attention) {
      if (!folded(panel.figure)) fill(panel, layer, place, places);
    }
  }

  async function drawMissing() {
    fillAll();
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

  async function redrawAttention() {
    fillAll();
    for (const panel of attention) {
      if (!folded(panel.figure)) await draw(panel.figure);
    }
  }

  for (const name of ["layer", "head"]) {
    document.getElementById(name)?.addEventListener("change", redrawAttention);
  }
  night.addEventListener("change", drawAnew);
  for (const fold of document.querySelectorAll("details")) {
    fold.addEventListener("toggle", () => fold.open && drawMissing());
  }
  let settled; // plotly fits the figures to a new width; how many tokens can be named changes too
  window.addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(redrawAttention, 250);
  });
  drawMissing();
})();
