// One view a model, and the choices that all share.

class ModelView {
  constructor(page, model, index) {
    Object.assign(this, { page, model, index });
    this.maps = new Maps(model, () => page.chunks()[index]);
    const rows = Object.values(model.statistics.first_token_share);
    this.layers = model.names.map((_, layer) => Math.max(0, ...rows.map((map) => map[layer]?.length ?? 0)));
    this.goTo(...this.first());
    this.token = Math.floor(model.tokens.length * 0.6);
    this.grid = new HeadGrid(this);
    this.mapPanel = new MapPanel(this);
    this.text = new TextPanel(this);
    this.hidden = new HiddenPanel(this);
    this.lens = new LensPanel(this);
    const heads = this.layers.reduce((a, b) => a + b, 0);
    const facts = [`${this.layers.length} layers, ${heads} heads, ${model.tokens.length.toLocaleString("en")} tokens`];
    if (model.tokens.length < model.total) facts.push(`the first of ${model.total.toLocaleString("en")}`);
    const lost = model.lost ? make("p", { className: "warning" }, `Not finite ${model.lost}: NaN or infinite numbers of this text are left out.`) : null;
    this.element = make("section", { className: "model" },
      make("h2", {}, make("span", {}, model.name), make("small", {}, facts.join(", "))), lost,
      make("div", { className: "sides" },
        make("div", { className: "side" }, this.grid.element, this.text.element, this.lens.element),
        make("div", { className: "side" }, this.mapPanel.element, this.text.reading, this.hidden.element)));
  }
  // A head to begin with: one that has a map, is focused, and seldom on the first token.
  first() {
    const of = (metric) => Object.values(this.model.statistics[metric])[0];
    const [shares, entropies] = [of("first_token_share"), of("entropy")];
    const kept = Object.keys(this.model.maps).map((key) => key.split(".").map(Number));
    const value = ([layer, head]) => 5 * (shares[layer]?.[head] ?? 1) + (entropies[layer]?.[head] ?? 9);
    return kept.reduce((best, place) => (value(place) < value(best) ? place : best), kept[0] ?? [this.layers.findIndex((n) => n), 0]);
  }
  goTo(layer, head) {
    [this.layer, this.head] = [layer, head];
    this.settleMap();
  }
  hasHead(layer, head) {
    return layer >= 0 && head >= 0 && head < (this.layers[layer] ?? 0);
  }
  lambda() {
    const found = this.model.lambdas[this.layer];
    return found === undefined ? null : Array.isArray(found) ? found[this.head][this.token] : found;
  }
  say(words) {
    this.page.say(words);
  }
  chooseHead(layer, head) {
    if (!this.hasHead(layer, head)) return;
    this.say(this.grid.words(layer, head));
    this.page.views.forEach((view) => {
      const there = Math.min(layer, view.layers.length - 1);
      if (!view.layers[there]) return;
      view.goTo(there, Math.min(head, view.layers[there] - 1));
      view.drawHead();
    });
  }
  chooseMap(name) {
    this.page.views.forEach((view) => {
      if (!view.model.names[view.layer].includes(name)) return;
      view.map = view.wanted = name;
      view.drawHead();
    });
  }
  // Layers may have other maps than the last one had.
  settleMap() {
    const names = this.model.names[this.layer];
    this.map = names.includes(this.wanted) ? this.wanted : names.at(-1);
  }
  chooseToken(token) {
    const { tokens, spans } = this.model;
    if (token < 0 || token >= tokens.length) return;
    const [start, end] = spans[token];
    this.page.views.forEach((view) => {
      const other = view.model.spans.findIndex(([from, to]) => to > from && to > start);
      const special = end === start;
      view.token = view === this ? token : special ? Math.min(token, view.model.tokens.length - 1) : Math.max(0, other);
      view.drawToken();
    });
    this.say(`${visible(tokens[token])} (${token})`);
  }
  async drawHead() {
    const began = performance.now();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.grid.draw();
    const names = this.model.names[this.layer];
    const found = await Promise.all(names.map((name) => this.maps.get(this.layer, this.head, name)));
    if (turn !== this.turn) return; // another head has been chosen meanwhile
    this.shown = Object.fromEntries(names.map((name, i) => [name, found[i]]));
    this.mapPanel.draw(this.shown);
    this.text.draw(this.shown[this.map]);
    this.page.drawn(began);
  }
  drawToken() {
    const began = performance.now();
    this.text.draw(this.shown?.[this.map]);
    if (Array.isArray(this.model.lambdas[this.layer])) this.mapPanel.draw(this.shown ?? {});
    else this.mapPanel.mark();
    this.hidden.mark();
    this.lens.draw();
    this.text.reveal();
    this.page.drawn(began);
  }
  async start() {
    await Promise.all([this.drawHead(), this.hidden.load(), this.lens.load()]);
    this.hidden.draw();
    this.lens.draw();
    this.text.reveal();
  }
}

class Page {
  constructor() {
    Object.assign(this, { metric: "first_token_share", text: "attention" });
    this.bar = make("div", { className: "choice", role: "toolbar", "aria-label": "Contents" });
    this.main = make("div", { className: "models" });
    this.status = make("p", { className: "said", "aria-live": "polite" });
    document.body.classList.add("viewer");
    document.getElementById("viewer").prepend(this.bar, this.main, this.status);
    document.addEventListener("keydown", (event) => this.key(event));
    darkness.addEventListener("change", () => this.redraw());
    addEventListener("resize", () => this.views.forEach((view) => view.grid.draw()));
  }
  show(models, chunks) {
    this.chunks = chunks;
    this.views = models.map((model, i) => new ModelView(this, model, i));
    const [{ layer, head }] = this.views;
    for (const view of this.views) if (view.hasHead(layer, head)) view.goTo(layer, head);
    this.main.replaceChildren(...this.views.map((view) => view.element));
    this.main.classList.toggle("two", this.views.length > 1);
    this.controls();
    this.views.forEach((view) => view.grid.draw());
  }
  async start() {
    await Promise.all(this.views.map((view) => view.start()));
    document.documentElement.dataset.ready = Math.round(performance.now());
  }
  controls() {
    const { views } = this;
    const metrics = Object.keys(METRICS).filter((name) => views.some((view) => view.model.statistics[name]));
    if (!metrics.includes(this.metric)) [this.metric] = metrics;
    const choice = (label, options, value, change) => {
      const select = make("select", { onchange: (event) => change(event.target.value) },
        ...options.map(([name, words]) => make("option", { value: name, selected: name === value }, words)));
      return make("label", {}, `${label} `, select);
    };
    const ways = [...metrics.map((name) => [name, METRICS[name][0]]), [SMALL, "small maps"]];
    const parts = [choice("Heads by", ways, this.metric, (value) => {
      this.metric = value;
      views.forEach((view) => (value === SMALL && !view.grid.small ? view.grid.loadSmall() : view.grid.draw()));
    })];
    parts[0].lastChild.id = "metric";
    if (views.some((view) => view.model.surprise)) {
      parts.push(choice("Text by", [["attention", "attention"], ["surprise", "surprise"]], this.text, (value) => {
        this.text = value;
        views.forEach((view) => view.text.draw(view.shown?.[view.map]));
      }));
      parts[1].lastChild.id = "textby";
    }
    this.bar.replaceChildren(...parts);
  }
  // One scale of colour for both models.
  scale(metric) {
    const values = this.views.flatMap((view) => Object.values(view.model.statistics[metric] ?? {}).flat(2));
    return Math.max(...values, 1e-9);
  }
  say(words) {
    this.status.textContent = words;
  }
  drawn(began) {
    document.documentElement.dataset.redraw = (performance.now() - began).toFixed(1);
  }
  redraw() {
    for (const view of this.views) {
      if (view.grid.small) view.grid.loadSmall();
      view.drawHead();
      view.hidden.draw();
      view.lens.draw();
    }
  }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const inside = this.views.find((view) => view.element.contains(document.activeElement)) ?? this.views[0];
    const target = {
      h: inside.grid.canvas, t: inside.text.body, m: inside.mapPanel.element,
      c: this.bar.querySelector("select"),
    }[event.key.toLowerCase()];
    if (!target) return;
    event.preventDefault();
    target.focus();
  }
}

const page = new Page();
let parsed = null;
page.show(JSON.parse(document.getElementById("data").textContent).models,
  () => (parsed ??= JSON.parse(document.getElementById("late").textContent)));
requestAnimationFrame(() => setTimeout(() => (document.documentElement.dataset.painted = Math.round(performance.now()))));
if (document.readyState === "loading") addEventListener("DOMContentLoaded", () => page.start());
else page.start();
