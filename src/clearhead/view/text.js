// The text itself, coloured by what the chosen token reads, and by what reads it.

const LISTED = 6;

class TextPanel {
  constructor(view) {
    this.view = view;
    this.body = make("div", {
      className: "text", tabIndex: 0, role: "group",
      "aria-label": `Text as ${view.model.name} reads it: arrow keys choose a token`,
    });
    this.tokens = view.model.tokens.map((token, i) => {
      const span = make("span", { className: "token" }, token.replace(/\r?\n/g, "⏎\n") || "⋯");
      span.dataset.i = i;
      return span;
    });
    this.body.append(...this.tokens);
    this.legend = make("p", { className: "note" });
    this.lists = make("div", { className: "lists" });
    this.element = make("section", { className: "panel words" }, make("h3", {}, "Text"), this.body, this.legend);
    this.reading = make("section", { className: "panel reading" }, this.lists);
    this.body.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token) view.chooseToken(Number(token.dataset.i));
    });
    onArrows(this.body, (right, down) => view.chooseToken(view.token + right + down));
  }
  // Scroll the text, and not the page, to the chosen token.
  reveal() {
    const { offsetTop, offsetHeight } = this.tokens[this.view.token];
    const { scrollTop, clientHeight } = this.body;
    if (offsetTop < scrollTop || offsetTop + offsetHeight > scrollTop + clientHeight) {
      this.body.scrollTop = offsetTop - clientHeight / 2;
    }
  }
  draw(map) {
    const { view } = this;
    const surprise = view.page.text === "surprise" ? view.model.surprise : null;
    const top = 12; // bits
    this.tokens.forEach((span, i) => {
      let [name, part, under] = ["positive", 0, 0];
      if (surprise) [name, part] = ["other", (surprise[i] ?? 0) / top];
      else if (map) {
        const level = map.at(view.token, i);
        name = level < 0 ? "negative" : "positive";
        part = Math.abs(level) / map.steps;
        under = map.at(i, view.token) / map.steps;
      }
      const { style } = span;
      const rgb = part > 0 ? ramp(name, part) : null;
      style.backgroundColor = rgb ? css(rgb) : "";
      style.color = rgb ? readable(rgb) : "";
      // The bar below is as thick as the weight, and in the colour of its sign.
      const bar = under && i !== view.token ? css(ramp(under < 0 ? "negative" : "positive", 0.35 + 0.5 * Math.abs(under))) : "";
      style.boxShadow = bar ? `inset 0 -${(1 + 4 * Math.abs(under)).toFixed(1)}px ${bar}` : "";
      span.classList.toggle("chosen", i === view.token);
    });
    this.legend.textContent = surprise
      ? `Colour: surprise of each token after those before it, 0 to ${top} bits and more.`
      : "Colour: what the framed token reads. Bar below: what reads it. Blue is positive, orange negative.";
    this.list(map);
  }
  list(map) {
    const { view } = this;
    const i = view.token;
    const { tokens, surprise } = view.model;
    const bits = surprise?.[i];
    const head = make("h3", {}, "Token ", make("b", { className: "word" }, visible(tokens[i])), ` (${i})`);
    const parts = [head];
    if (bits === null && i) parts.push(make("p", { className: "note" }, "Surprise: not finite."));
    else if (bits !== undefined && bits !== null) {
      parts.push(make("p", { className: "note" }, `Surprise ${shown(bits)} bits: the model gave it ${shown(100 * 2 ** -bits)} %.`));
    }
    if (map) {
      const row = Array.from({ length: map.length }, (_, j) => [j, map.at(i, j)]);
      const column = Array.from({ length: map.length }, (_, j) => [j, map.at(j, i)]);
      if (map.nulls) row.push([null, map.nulls[i]]);
      parts.push(make("div", { className: "pair" }, this.bars("Reads", row, map), this.bars("Is read by", column, map)));
    }
    this.lists.replaceChildren(...parts);
  }
  bars(title, weights, map) {
    const { view } = this;
    const best = weights.filter(([, level]) => level).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, LISTED);
    const none = weights.find(([j]) => j === null);
    if (none && !best.includes(none)) best.splice(LISTED - 1, 1, none);
    const rows = best.map(([j, level]) => {
      const bar = make("i");
      bar.style.width = `${(Math.abs(level) / map.steps) * 100}%`;
      bar.style.backgroundColor = css(ramp(level < 0 ? "negative" : "positive", 0.6));
      const word = j === null ? (view.model.statistics.prefix_mass ? "learned keys" : "nothing (null key)") : visible(view.model.tokens[j]);
      const button = make("button", { disabled: j === null, onclick: () => view.chooseToken(j) },
        make("span", { className: "word" }, word), make("span", { className: "bar" }, bar), make("span", { className: "number" }, shown(map.value(level))));
      return make("li", {}, button);
    });
    if (!rows.length) rows.push(make("li", { className: "note" }, "nothing that can be seen"));
    return make("div", {}, make("h4", {}, title), make("ul", {}, ...rows));
  }
}
