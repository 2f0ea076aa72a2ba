// Through the layers: norms and outlier channels by token, and predictions by layer.

const layerName = (row) => (row ? String(row - 1) : "in");

class HiddenPanel {
  constructor(view) {
    this.view = view;
    this.canvas = make("canvas", { className: "stream" });
    this.choice = make("select", { "aria-label": "Hidden states by" },
      make("option", { value: "norms" }, "norm"), make("option", { value: "largest" }, "largest channel ÷ median"));
    this.choice.addEventListener("change", () => this.draw());
    this.note = make("p", { className: "note" });
    this.element = make("figure", { className: "panel hidden-states" },
      make("h3", {}, "Hidden states: ", this.choice), this.canvas, this.note);
    this.canvas.addEventListener("click", (event) => view.chooseToken(this.at(event)[1]));
    this.canvas.addEventListener("pointermove", (event) => this.ready && view.say(this.words(...this.at(event))));
  }
  async load() {
    const { hidden } = this.view.model;
    this.norms = await unpackFloats(hidden.norms);
    this.largest = await unpackFloats(hidden.largest);
    this.channels = new Uint32Array(await inflate(hidden.channels));
    this.ready = true;
  }
  at(event) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const { length } = this.view.model.tokens;
    const { rows } = this.view.model.hidden;
    const token = Math.floor(((event.clientX - left) / width) * length);
    const row = Math.floor(((event.clientY - top) / height) * rows);
    return [Math.min(rows - 1, Math.max(0, row)), Math.min(length - 1, Math.max(0, token))];
  }
  words(row, token) {
    const place = row * this.view.model.tokens.length + token;
    const after = row ? `after layer ${row - 1}` : "before the first layer";
    return `${visible(this.view.model.tokens[token])} (${token}) ${after}: ` + (this.norms[place] ? `norm ${shown(this.norms[place])}, ` +
      `channel ${this.channels[place]} is ${shown(this.largest[place])} × the median` : "norm 0 or not finite");
  }
  draw() {
    if (!this.ready) return;
    const { rows } = this.view.model.hidden;
    const { length } = this.view.model.tokens;
    const values = this[this.choice.value];
    let [low, high] = [Infinity, 0];
    for (const value of values) {
      if (value > 0 && value < low) low = value;
      if (value > high) high = value;
    }
    this.canvas.width = length;
    this.canvas.height = rows;
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(length, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = table(255);
    const range = Math.log(high / low) || 1;
    values.forEach((value, i) => {
      pixels[i] = colours[255 + Math.round(255 * (value > 0 ? Math.log(value / low) / range : 0))];
    });
    context.putImageData(image, 0, 0);
    this.mark();
  }
  // The chosen token's largest channel, and the channels that are often the largest.
  mark() {
    if (!this.ready) return;
    const { length } = this.view.model.tokens;
    let best = 0;
    const often = new Map();
    this.largest.forEach((value, place) => {
      if (place % length === this.view.token && value > this.largest[best * length + this.view.token]) best = Math.floor(place / length);
      if (value >= 30) {
        const channel = this.channels[place];
        often.set(channel, Math.max(often.get(channel) ?? 0, value));
      }
    });
    const most = [...often].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([channel, value]) => `${channel} (${shown(value)} ×)`);
    this.note.textContent = `Rows are layers from the first down, columns tokens; log scale. ${this.words(best, this.view.token)}. ` +
      (most.length ? `Outlier channels, at their largest: ${most.join(", ")}.` : "No channel reaches 30 × the median.");
  }
}

class LensPanel {
  constructor(view) {
    this.view = view;
    this.body = make("tbody");
    this.element = make("section", { className: "panel lens" }, make("h3", {}, "Predictions by layer"),
      view.model.lens
        ? make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Predictions by layer" }, make("table", {}, this.body))
        : make("p", { className: "note" }, view.model.causal
          ? "No logit lens: the final norm and head alone do not give this model's own predictions."
          : "No logit lens: this model does not predict the next token."));
  }
  async load() {
    const { lens } = this.view.model;
    if (!lens) return;
    this.tokens = new Uint32Array(await inflate(lens.tokens));
    this.shares = new Uint8Array(await inflate(lens.shares));
  }
  draw() {
    const { lens, tokens, hidden } = this.view.model;
    if (!this.tokens) return;
    const next = tokens[this.view.token + 1];
    const rows = [];
    for (let row = hidden.rows - 1; row >= 0; row--) {
      const cells = [make("th", { scope: "row" }, layerName(row))];
      for (let k = 0; k < lens.best; k++) {
        const place = (row * tokens.length + this.view.token) * lens.best + k;
        const share = (this.shares[place] / 255) ** 2;
        const word = lens.strings[this.tokens[place]];
        const rgb = ramp("positive", Math.sqrt(share));
        const cell = make("td", { title: `${shown(100 * share)} %` }, visible(word));
        cell.style.backgroundColor = css(rgb);
        cell.style.color = readable(rgb);
        cell.classList.toggle("next", word === next);
        cells.push(cell);
      }
      rows.push(make("tr", {}, ...cells));
    }
    this.body.replaceChildren(...rows);
  }
}
