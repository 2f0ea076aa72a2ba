// The grid of heads: a column is a layer, a row a head; coloured by a statistic, or small maps.

const METRICS = {
  first_token_share: ["first-token share", "queries that look most at the first token"],
  null_mass: ["null mass", "weight on no token"],
  prefix_mass: ["prefix mass", "weight on learned keys and values"],
  entropy: ["entropy", "nats; low is focused, high is spread"],
  negative_share: ["negative share", "part of the weight that is below 0"],
};
const SMALL = "maps"; // in place of a metric
const SIDE = 28; // pixels of a small map, at most

// [layer][head] of a metric: of the map shown where it has one.
function statistic(view, metric) {
  const maps = view.model.statistics[metric];
  if (!maps) return null;
  const name = view.map in maps ? view.map : Object.keys(maps)[0];
  return { name, rows: maps[name] };
}

class HeadGrid {
  constructor(view) {
    this.view = view;
    this.canvas = make("canvas", {
      className: "grid", tabIndex: 0, role: "group", "aria-label": `Heads of ${view.model.name}: arrow keys choose one`,
    });
    this.legend = make("p", { className: "note" });
    this.element = make("figure", { className: "panel heads" },
      make("h3", {}, "Heads"), this.canvas, this.legend);
    this.canvas.addEventListener("click", (event) => {
      const place = this.at(event);
      if (place) view.chooseHead(...place);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const place = this.at(event);
      if (place) view.say(this.words(...place));
    });
    onArrows(this.canvas, (right, down) => {
      let layer = view.layer + right;
      while (view.layers[layer] === 0) layer += right; // layers without attention
      const most = Math.max(0, (view.layers[layer] ?? 0) - 1);
      view.chooseHead(layer, right ? Math.min(view.head, most) : view.head + down);
    });
  }
  words(layer, head) {
    const { metric } = this.view.page;
    const value = statistic(this.view, metric)?.rows[layer]?.[head];
    const kept = this.view.maps.entry(layer, head) ? "" : "; its map is not on this page";
    const number = value === undefined ? "" : `: ${METRICS[metric][0]} ${shown(value)}`;
    return `layer ${layer}, head ${head}${number}${kept}`;
  }
  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientX - left - this.edge) / this.cell);
    const head = Math.floor((event.clientY - top) / this.row);
    return this.view.hasHead(layer, head) ? [layer, head] : null;
  }
  draw() {
    const { view } = this;
    const layers = view.layers.length;
    const heads = Math.max(...view.layers);
    this.edge = 24;
    this.cell = Math.min(48, (this.canvas.clientWidth - this.edge) / layers);
    this.row = Math.min(view.page.metric === SMALL ? 48 : 30, Math.max(9, this.cell));
    const [context] = sized(this.canvas, heads * this.row + 18);
    const found = statistic(view, view.page.metric);
    const top = view.page.scale(view.page.metric);
    const gap = this.cell > 12 ? 2 : 1;
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < view.layers[layer]; head++) {
        const value = found?.rows[layer]?.[head];
        const kept = view.maps.entry(layer, head);
        const inset = kept ? 0 : 0.26; // heads without a map are smaller
        const small = this.small?.get(`${layer}.${head}`);
        if (view.page.metric === SMALL && small) {
          context.drawImage(small, this.edge + layer * this.cell, head * this.row, this.cell - gap, this.row - gap);
          continue;
        }
        context.fillStyle = value === undefined ? colour("--rule") : css(ramp("positive", value / top));
        context.fillRect(this.edge + (layer + inset) * this.cell, (head + inset) * this.row,
          this.cell * (1 - 2 * inset) - gap, this.row * (1 - 2 * inset) - gap);
      }
    }
    context.fillStyle = colour("--muted");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const every = (size, least) => Math.max(1, Math.ceil(least / size));
    for (let head = 0; head < heads; head += every(this.row, 13)) {
      context.fillText(head, 4, (head + 0.5) * this.row);
    }
    for (let layer = 0; layer < layers; layer += every(this.cell, 22)) {
      context.fillText(layer, this.edge + layer * this.cell + 2, heads * this.row + 10);
    }
    context.strokeStyle = colour("--mark");
    context.lineWidth = 2.5;
    context.strokeRect(this.edge + view.layer * this.cell - 1, view.head * this.row - 1 + (view.head ? 0 : 1.5),
      this.cell - gap + 2, this.row - gap + 2 - (view.head ? 0 : 1.5));
    this.describe(found, top);
  }
  // Small maps of all heads that have one, drawn as they are unpacked.
  async loadSmall() {
    const { view } = this;
    const small = (this.small = new Map());
    for (const place of Object.keys(view.model.maps)) {
      const [layer, head] = place.split(".").map(Number);
      const map = await view.maps.get(layer, head, view.model.names[layer].at(-1));
      if (this.small !== small) return; // another text, or other colours
      const canvas = document.createElement("canvas");
      paint(canvas, map, SIDE);
      small.set(place, canvas);
      if (small.size % 30 === 0) this.draw();
    }
    this.draw();
  }
  describe(found, top) {
    const { metric } = this.view.page;
    this.legend.textContent = metric === SMALL ? "The map of every head, small. Columns are layers, rows heads." : "";
    if (metric === SMALL) return;
    const [name, meaning] = METRICS[metric];
    if (!found) return this.legend.append(`${name}: this model has none.`);
    const bar = make("i", { className: "ramp" });
    bar.style.background = `linear-gradient(to right, ${stopsOf("positive").join()})`;
    const of = Object.keys(this.view.model.statistics[metric]).length > 1 ? ` of ${found.name}` : "";
    this.legend.append("0 ", bar, ` ${shown(top)} `, make("b", {}, name + of), `: ${meaning}. Columns are layers, rows heads.`);
  }
}
