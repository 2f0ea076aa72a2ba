// Numbers from the page's packed text: see trace.py.

async function inflate(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return (await new Response(stream).arrayBuffer());
}

// One map: levels[key * T + query] around 0, and nulls[query]; value(level) is the weight.
async function unpackMap(packed, chunk, length, causal) {
  const bytes = new Uint8Array(await inflate(chunk));
  const levels = new Int8Array(length * length);
  let at = 0;
  for (let key = 0; key < length; key++) {
    for (let query = causal ? key : 0; query < length; query++) {
      levels[key * length + query] = bytes[at++] - packed.centre;
    }
  }
  const nulls = packed.null ? Int8Array.from(bytes.subarray(at), (n) => n - packed.centre) : null;
  const { peak, steps } = packed;
  return {
    levels, nulls, steps, length, causal,
    at: (query, key) => levels[key * length + query],
    value: (level) => peak * Math.sign(level) * (level / steps) ** 2,
  };
}

const unpackFloats = async (packed) => new Float32Array(await inflate(packed));

// The maps looked at last, as many as 64 MB hold.
class Maps {
  constructor(model, chunks) {
    this.model = model;
    this.chunks = chunks;
    this.known = new Map();
  }
  entry(layer, head) {
    return this.model.maps[`${layer}.${head}`];
  }
  async get(layer, head, name) {
    const packed = this.entry(layer, head)?.[name];
    if (!packed) return null;
    const length = this.model.tokens.length;
    let found = this.known.get(packed.chunk);
    this.known.delete(packed.chunk);
    found ??= await unpackMap(packed, this.chunks()[packed.chunk], length, this.model.causal);
    this.known.set(packed.chunk, found);
    const most = Math.max(4, Math.floor(64e6 / length ** 2));
    if (this.known.size > most) this.known.delete(this.known.keys().next().value);
    return found;
  }
}
