// The maps of the head that is chosen: rows are queries, columns are keys.

const WIDEST = 1024; // pixels: of a longer text one shows the strongest of several weights

function paint(canvas, map, widest = WIDEST) {
  const fold = Math.ceil(map.length / widest);
  const side = Math.ceil(map.length / fold);
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = table(map.steps);
  const { levels, length, steps } = map;
  for (let x = 0; x < side; x++) {
    const lastKey = Math.min(length, (x + 1) * fold);
    for (let y = map.causal ? x : 0; y < side; y++) {
      const lastQuery = Math.min(length, (y + 1) * fold);
      let strongest = 0;
      for (let key = x * fold; key < lastKey; key++) {
        for (let query = y * fold; query < lastQuery; query++) {
          const level = levels[key * length + query];
          if (level * level > strongest * strongest) strongest = level;
        }
      }
      pixels[y * side + x] = colours[strongest + steps];
    }
  }
  context.putImageData(image, 0, 0);
}

class MapPanel {
  constructor(view) {
    this.view = view;
    this.title = make("h3");
    this.row = make("div", { className: "maps" });
    this.note = make("p", { className: "note" });
    this.element = make("figure", {
      className: "panel map", tabIndex: 0, role: "group",
      "aria-label": `Attention map of ${view.model.name}: up and down choose a token`,
    }, this.title, this.row, this.note);
    onArrows(this.element, (right, down) => view.chooseToken(view.token + right + down));
    this.frames = [];
  }
  // All maps of the head: of a differential head "map 1 − λ × map 2 = difference".
  draw(maps) {
    const { view } = this;
    const names = view.model.names[view.layer];
    const lambda = view.lambda();
    const several = names.length > 1;
    this.title.textContent = `Layer ${view.layer}, head ${view.head}`;
    this.frames = [];
    const parts = [];
    names.forEach((name, i) => {
      const map = maps[name];
      if (!map) return;
      const sign = { "map 2": lambda === null ? "" : `− ${shown(lambda)} ×`, difference: "=" }[name] ?? "";
      const canvas = make("canvas", { className: "weights" });
      paint(canvas, map);
      const across = make("i", { className: "row" });
      const down = make("i", { className: "column" });
      const square = make("div", { className: "square" }, canvas, across, down);
      square.addEventListener("pointermove", (event) => this.hover(event, square, map, name));
      square.addEventListener("click", (event) => {
        const [query] = this.place(event, square, map);
        if (several) view.chooseMap(name);
        view.chooseToken(query);
      });
      this.frames.push({ across, down, map });
      const label = several
        ? make("button", { className: "pick", "aria-pressed": name === view.map, onclick: () => view.chooseMap(name) }, `${sign} ${name}`)
        : null;
      parts.push(make("div", { className: "one" }, label, square));
    });
    this.row.replaceChildren(...parts);
    this.row.classList.toggle("several", parts.length > 1);
    this.note.textContent = this.numbers();
    this.mark();
  }
  numbers() {
    const { view } = this;
    const found = Object.keys(METRICS).flatMap((metric) => {
      const maps = view.model.statistics[metric] ?? {};
      const value = maps[view.map]?.[view.layer]?.[view.head];
      return value === undefined ? [] : [`${METRICS[metric][0]} ${shown(value)}`];
    });
    return `${found.join(" · ")}. Rows are queries, columns the keys they read${view.map === "softmax" ? "" : `; ${view.map}`}.`;
  }
  mark() {
    for (const { across, down, map } of this.frames) {
      const start = `${(100 * this.view.token) / map.length}%`;
      const size = `max(3px, ${100 / map.length}%)`;
      Object.assign(across.style, { top: start, height: size });
      Object.assign(down.style, { left: start, width: size });
    }
  }
  place(event, square, map) {
    const { left, top, width } = square.getBoundingClientRect();
    const at = (x) => Math.min(map.length - 1, Math.max(0, Math.floor((x / width) * map.length)));
    return [at(event.clientY - top), at(event.clientX - left)];
  }
  hover(event, square, map, name) {
    const [query, key] = this.place(event, square, map);
    const { tokens } = this.view.model;
    const weight = map.value(map.at(query, key));
    this.view.say(`${visible(tokens[query])} (${query}) reads ${visible(tokens[key])} (${key}): ${shown(weight)}, ${name}`);
  }
}
