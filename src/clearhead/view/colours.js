// Colour ramps for a light and for a dark page, from the paper to the strongest.

const RAMPS = {
  positive: [
    ["#f4f1ea", "#c6d7e6", "#7cadd2", "#2c73ad", "#0b3763"],
    ["#20252d", "#1d3d5c", "#2c6ca5", "#64b0e6", "#e6f4ff"],
  ],
  negative: [
    ["#f4f1ea", "#f5d9c3", "#edb287", "#c4621f", "#7a2e00"],
    ["#20252d", "#4f2f17", "#9a5420", "#f09a52", "#ffe9d6"],
  ],
  other: [
    ["#f4f1ea", "#e3d3ec", "#c29bd6", "#8c4a9e", "#4a1a5c"],
    ["#20252d", "#3b2447", "#77468c", "#cf96e0", "#fbe9ff"],
  ],
};
const darkness = matchMedia("(prefers-color-scheme: dark)");

const stopsOf = (name) => RAMPS[name][darkness.matches ? 1 : 0];
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// [red, green, blue] at `part` from 0 to 1 of a ramp.
function ramp(name, part) {
  const stops = stopsOf(name);
  const place = Math.min(1, Math.max(0, part || 0)) * (stops.length - 1);
  const from = Math.min(stops.length - 2, Math.floor(place));
  const [a, b] = [channels(stops[from]), channels(stops[from + 1])];
  return a.map((value, i) => Math.round(value + (b[i] - value) * (place - from)));
}

const css = (rgb) => `rgb(${rgb.join(",")})`;

function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white: one of them has a contrast of at least 4.58 on any colour.
function readable(rgb) {
  return luminance(rgb) > 0.1791 ? "#000000" : "#ffffff";
}

// The colour of every level of a map, as the 32-bit numbers of an ImageData.
function table(steps) {
  const colours = new Uint32Array(2 * steps + 1);
  for (let level = -steps; level <= steps; level++) {
    const [r, g, b] = ramp(level < 0 ? "negative" : "positive", Math.abs(level) / steps);
    colours[level + steps] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return colours;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// An element with properties, attributes ("aria-label", "data-…") and children; text stays text.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Calls `act` with the step of an arrow key to the right and down.
function onArrows(element, act) {
  element.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    act(...step);
  });
}

// A canvas of the size that its style gives it, sharp on any screen; drawn in CSS pixels.
function sized(canvas, height) {
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return [context, width];
}

function shown(number) {
  if (number === null) return "not finite";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1000) return Math.round(number).toLocaleString("en");
  return size < 0.001 ? number.toExponential(0) : String(Number(number.toPrecision(size < 0.1 ? 2 : 3)));
}

// A token in one line: spaces and line ends made visible.
function visible(token) {
  return token.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "⋯";
}
