(function (root, data, panel) {
  // lab/shapes.py and lab/costs.py once more: same names, same order of operations and of checks.
  const LARGEST = 1e15, CHUNK = 64;
  const commas = (x) => x.toLocaleString("en-US");
  function got(x) {
    if (Number.isInteger(x)) return BigInt(x).toString();
    return Number.isFinite(x) ? String(x) : String(x).toLowerCase().replace("infinity", "inf");
  }
  function refuse(sentence) {
    throw new RangeError(sentence);
  }
  function whole(name, n, least = 1, most = LARGEST) {
    if (Number.isInteger(n) && n >= least && n <= most) return;
    refuse(`${name}: expected a whole number from ${least} to ${commas(most)}, got ${got(n)}`);
  }
  function finite(name, x, zero = false) {
    if (Number.isFinite(x) && (x > 0 || (zero && x === 0))) return;
    refuse(`${name}: expected a finite number ${zero ? ">=" : ">"} 0, got ${got(x)}`);
  }

  const total = (shape) => shape.growing.layers + shape.state.layers;
  function checked(shape) {
    for (const part of ["growing", "state"]) {
      for (const [field, n] of Object.entries(shape[part])) {
        const least = field === "layers" || field === "expand_flops" ? 0 : 1;
        if (field !== "kind") whole(`${part} ${field}`, n, least);
      }
    }
    for (const f of ["weights", "head_weights", "lookup_weights"]) whole(f, shape[f], 0);
    if (!total(shape)) refuse("layers: expected at least one, growing or with a state, got none");
    return shape;
  }
  function withGrowing(shape, layers) {
    whole("growing layers", layers, 0, total(shape));
    return { ...shape, growing: { ...shape.growing, layers },
      state: { ...shape.state, layers: total(shape) - layers } };
  }
  function own({ layers, width, heads, kv_heads, head_dim, ffn_width, vocabulary }) {
    const sizes = { width, heads, kv_heads, head_dim, ffn_width, vocabulary };
    for (const [name, n] of Object.entries(sizes)) whole(name, n);
    if (heads % kv_heads) {
      refuse(`heads: expected a multiple of kv_heads=${kv_heads}, got ${heads}`);
    }
    const flops = 4 * heads * head_dim, d = head_dim, numbers = heads * d * d;
    const growing = { kind: heads === kv_heads ? "MHA" : "GQA", layers,
      weights: width * d * (2 * heads + 2 * kv_heads), cache_numbers: 2 * kv_heads * d,
      decode_flops: flops, prefill_flops: flops, expand_flops: 0 };
    const state = { kind: "KDA", layers: 0, weights: 4 * width * heads * d, state_numbers: numbers,
      decode_flops: 7 * numbers,
      prefill_flops: heads * (6 * d * d + 3 * CHUNK * d + CHUNK * CHUNK) };
    return checked({ name: "own numbers", growing, state, weights: layers * 3 * width * ffn_width,
      head_weights: vocabulary * width, lookup_weights: vocabulary * width,
      experts: { layers: 0, number: 1, per_token: 1, weights: 1 },
      bytes_per_weight: 2, bytes_per_expert_weight: 2, bytes_per_cache_number: 2,
      bytes_per_state_number: 4 });
  }

  function kept(shape, tokens) {
    whole("tokens", tokens);
    const layer_cache_bytes = tokens * shape.growing.cache_numbers * shape.bytes_per_cache_number;
    const layer_state_bytes = shape.state.state_numbers * shape.bytes_per_state_number;
    const cache_bytes = shape.growing.layers * layer_cache_bytes;
    const state_bytes = shape.state.layers * layer_state_bytes;
    return { layer_cache_bytes, layer_state_bytes, cache_bytes, state_bytes,
      bytes: cache_bytes + state_bytes };
  }
  function weightsOf({ growing, state, weights, head_weights, experts: e }) {
    const dense = growing.layers * growing.weights + state.layers * state.weights + weights +
      head_weights;
    return { dense, active: dense + e.layers * e.per_token * e.weights };
  }
  function weightReadBytes(shape, rows) {
    const e = shape.experts, touched = e.number * (1 - (1 - e.per_token / e.number) ** rows);
    return weightsOf(shape).dense * shape.bytes_per_weight +
      e.layers * touched * e.weights * shape.bytes_per_expert_weight;
  }
  function prefillFlops(shape, tokens) {
    const rows = 2 * tokens * (weightsOf(shape).active - shape.head_weights) +
      2 * shape.head_weights;
    const attention = tokens * (tokens + 1) / 2 * shape.growing.prefill_flops;
    return rows + shape.growing.layers * attention +
      tokens * shape.state.layers * shape.state.prefill_flops;
  }
  // All figures of costs.bill; if the batch does not fit only the sizes, and why in `refused`.
  function bill(shape, tokens, batch, device, dollars_per_hour, gpus) {
    finite("read_bytes_per_second", device.read_bytes_per_second);
    finite("flops_per_second", device.flops_per_second);
    finite("memory_bytes", device.memory_bytes, true);
    whole("gpus", gpus);
    whole("batch", batch);
    const memory_bytes = gpus * device.memory_bytes, one = kept(shape, tokens), e = shape.experts;
    const weight_bytes = (weightsOf(shape).dense + shape.lookup_weights) * shape.bytes_per_weight +
      e.layers * e.number * e.weights * shape.bytes_per_expert_weight;
    const largest_batch = Math.max(0, Math.floor((memory_bytes - weight_bytes) / one.bytes));
    const { bytes, ...figures } = { ...one, weight_bytes, largest_batch };
    if (batch > largest_batch) {
      return { ...figures, refused: `batch: expected at most ${commas(largest_batch)} ` +
        `sequences of ${commas(tokens)} tokens, got ${commas(batch)}: with the weights they need ` +
        `${commas(Math.ceil(weight_bytes + batch * bytes))} bytes, ` +
        `and there are ${commas(Math.floor(memory_bytes))}` };
    }
    finite("dollars_per_hour", dollars_per_hour, true);
    const read_speed = gpus * device.read_bytes_per_second;
    const compute_speed = gpus * device.flops_per_second;
    const weight_read_bytes = weightReadBytes(shape, batch);
    const decode_read_bytes = weight_read_bytes + batch * bytes;
    const decode_flops = batch * (2 * weightsOf(shape).active +
      shape.growing.layers * tokens * shape.growing.decode_flops +
      shape.state.layers * shape.state.decode_flops);
    const read_seconds = decode_read_bytes / read_speed;
    const compute_seconds = decode_flops / compute_speed;
    const decode_seconds = Math.max(read_seconds, compute_seconds);
    const prefill_flops = prefillFlops(shape, tokens);
    return { ...figures, weight_read_bytes, decode_read_bytes, decode_flops, read_seconds,
      compute_seconds, decode_seconds, tokens_per_second: batch / decode_seconds,
      dollars_per_million_tokens: 1e6 * decode_seconds / batch * gpus * dollars_per_hour / 3600,
      prefill_flops, prefill_seconds: Math.max(
        weightReadBytes(shape, tokens) / read_speed, prefill_flops / compute_speed) };
  }
  function breakEvenTokens(hybrid, all) {
    const h = kept(hybrid, 1), a = kept(all, 1), saved = a.cache_bytes - h.cache_bytes;
    const more = h.state_bytes - a.state_bytes;
    return saved > 0 ? Math.max(1, Math.floor(more / saved) + 1) : Infinity;
  }
  function equalMemoryBatch(shape, other, tokens, batch) {
    return Math.floor(batch * kept(other, tokens).bytes / kept(shape, tokens).bytes);
  }
  // On the element, not on the window: tests compare these with the library.
  root.bill = { own, withGrowing, bill, breakEvenTokens, equalMemoryBatch };

  const { shapes, numbers, settings } = data, last = shapes.length;
  settings.shape = 0;
  settings.growing = shapes[0].growing.layers;
  const UNITS = { memory_bytes: 1e9, read_bytes_per_second: 1e12, flops_per_second: 1e12 };
  const round = (x, digits = 3) => +x.toPrecision(digits);
  function human(x, unit) {
    let power = 0;
    for (; Math.abs(x) >= 999.5 && power < 6; power++) x /= 1000;
    return `${round(x)}\u00a0${" kMGTPE"[power].trim()}${unit}`;
  }
  const time = (s) => (s < 1 ? `${round(s * 1e3)}\u00a0ms` : `${commas(round(s))}\u00a0s`);
  // names are the author's own
  const safe = (text) => text.replace(/[&<]/g, (c) => `&#${c.charCodeAt()};`);
  const kinds = ({ growing, state }) => [growing, state].filter((part) => part.layers)
    .map((part) => `${part.layers}\u00a0${safe(part.kind)}`).join(" + ");
  const SIZES = 6; // rows that a batch which does not fit has too
  const ROWS = [
    ["Cache of one sequence", (f, s) => s.growing.layers && human(f.cache_bytes, "B")],
    ["in one layer", (f, s) => s.growing.layers && human(f.layer_cache_bytes, "B"), true],
    ["States of one sequence", (f, s) => s.state.layers && human(f.state_bytes, "B")],
    ["in one layer", (f, s) => s.state.layers && human(f.layer_state_bytes, "B"), true],
    ["Weights stored", (f) => human(f.weight_bytes, "B")],
    ["Sequences that fit", (f) => commas(f.largest_batch)],
    ["Read in one step", (f) => human(f.decode_read_bytes, "B")],
    ["weights", (f) => human(f.weight_read_bytes, "B"), true],
    ["caches", (f) => human(settings.batch * f.cache_bytes, "B"), true],
    ["states", (f) => human(settings.batch * f.state_bytes, "B"), true],
    ["Computed in one step", (f) => human(f.decode_flops, "FLOP")],
    ["What takes the time", (f) =>
      (f.read_seconds < f.compute_seconds ? "computing" : "reading")],
    ["Time per token", (f) => time(f.decode_seconds)],
    ["Tokens per second, each", (f) => commas(round(1 / f.decode_seconds))],
    ["Tokens per second, all", (f) => commas(round(f.tokens_per_second))],
    // No dollar sign: JupyterLab would take what stands between two of them for a formula.
    ["Dollars a million tokens", (f) => commas(round(f.dollars_per_million_tokens))],
    ["Prompt, computed", (f) => human(f.prefill_flops, "FLOP")],
    ["Prompt, time", (f) => time(f.prefill_seconds)],
  ];

  const field = (set, label, value, unit = "") => `<label>${label} <input type="number" step="any"
    data-set="${set}" value="${unit ? round(value / (UNITS[set] ?? 1), 4) : value}"
    >${unit}</label>`;
  panel.setAttribute("aria-label", "Playground: the bill of a decoded token");
  panel.innerHTML = `
<div class="line"><label>Model <select data-set="shape">${[...shapes.map((s) => s.name),
    "own numbers"].map((name, i) => `<option value="${i}">${safe(name)}</option>`).join("")}
</select></label>
<label>Growing layers <input type="number" data-set="growing"></label>
<span data-show="others"></span></div>
<fieldset data-show="own"><legend>Own numbers</legend><div class="line">${
    Object.entries(numbers).map(([name, n]) => field(name, name, n)).join("")}</div></fieldset>
<div class="line"><label>Context <input type="range" min="10" max="20" step="0.5"
  data-set="doublings"></label>
${field("tokens", "Tokens", settings.tokens)}
${field("batch", "Batch", settings.batch)}</div>
<fieldset><legend>Hardware, at first ${safe(data.device)}</legend><div class="line">
${field("gpus", "GPUs", settings.gpus)}
${field("memory_bytes", "Memory", settings.memory_bytes, "GB each")}
${field("read_bytes_per_second", "Bandwidth", settings.read_bytes_per_second, "TB/s")}
${field("flops_per_second", "Compute", settings.flops_per_second, "TFLOP/s")}
${field("dollars_per_hour", "Dollars", settings.dollars_per_hour, "an hour")}</div></fieldset>
<p aria-live="polite" data-show="summary"></p>
<div class="scroll" data-show="table" role="group" aria-label="The bill" tabindex="0"></div>`;
  const show = {}, input = {};
  panel.querySelectorAll("[data-show]").forEach((box) => { show[box.dataset.show] = box; });
  panel.querySelectorAll("[data-set]").forEach((box) => { input[box.dataset.set] = box; });

  function compared(shape, all, mine, other) {
    const { tokens, batch, dollars_per_hour, gpus } = settings;
    const kind = `all ${shape.growing.kind}`, from = breakEvenTokens(shape, all);
    let text = `It keeps less than ${kind} from ${commas(from)} tokens on. `;
    if (other.refused) return `${text}The same with ${kind}: ${other.refused}.`;
    const ratio = (f) => round(f.tokens_per_second / other.tokens_per_second);
    text += `Tokens per second against ${kind}: ${ratio(mine)} times at the same batch`;
    const more = equalMemoryBatch(shape, all, tokens, batch);
    if (!more) return `${text}; in the same cache memory not one sequence fits.`;
    const equal = bill(shape, tokens, more, settings, dollars_per_hour, gpus);
    return `${text}; in the same cache memory (${commas(more)} sequences to ${commas(batch)}) ` +
      (equal.refused ? "its weights leave no room for so many." : `${ratio(equal)} times.`);
  }
  function draw() {
    const { tokens, batch, dollars_per_hour, gpus, growing } = settings;
    show.own.hidden = settings.shape !== last;
    show.table.innerHTML = "";
    input.doublings.setAttribute("aria-valuetext", `${commas(tokens)} tokens`);
    try {
      const base = settings.shape === last ? own(numbers) : shapes[settings.shape];
      show.others.textContent = `of ${total(base)}; ${base.growing.kind}, the others ` +
        base.state.kind;
      const shape = withGrowing(base, growing), all = withGrowing(shape, total(shape));
      const columns = (shape.state.layers ? [shape, all] : [shape])
        .map((s) => [s, bill(s, tokens, batch, settings, dollars_per_hour, gpus)]);
      const mine = columns[0][1], rows = ROWS.slice(0, mine.refused ? SIZES : ROWS.length);
      const head = columns.map(([s]) => `<th scope="col">${kinds(s)}</th>`).join("");
      show.table.innerHTML = `<table><caption>Batch ${commas(batch)}, ${commas(tokens)} tokens ` +
        `each; every time is a lower bound</caption><tr><td></td>${head}</tr>` +
        rows.map(([label, value, part], i) => `<tr${part ? ' class="part"' : ""}>` +
          `<th scope="row">${label}</th>` + columns.map(([s, f]) =>
          `<td>${(i < SIZES || !f.refused) && value(f, s) || "–"}</td>`).join("") + "</tr>")
          .join("") + "</table>";
      show.summary.className = mine.refused ? "refused" : "";
      show.summary.textContent = mine.refused ? `${mine.refused}.`
        : `${base.name}: ${time(mine.decode_seconds)} a token, ` +
          `${commas(round(mine.dollars_per_million_tokens))} dollars a million tokens. ` +
          (columns[1] ? compared(shape, all, mine, columns[1][1]) : "");
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      show.summary.className = "refused";
      show.summary.textContent = `${error.message}.`;
    }
  }
  function setGrowing(n) {
    settings.growing = input.growing.value = n;
  }
  panel.addEventListener("input", ({ target }) => {
    const set = target.dataset.set, value = +target.value;
    // an empty field is a number half typed: the old one stays
    if (target.value === "") return;
    if (set === "doublings") settings.tokens = input.tokens.value = Math.round(2 ** value);
    else if (set in numbers) numbers[set] = value;
    else settings[set] = value * (UNITS[set] ?? 1);
    if (set === "tokens") input.doublings.value = Math.log2(value);
    // another model, or another number of layers: the mix starts anew
    if (set === "shape") setGrowing(shapes[value]?.growing.layers ?? numbers.layers);
    if (set === "layers") setGrowing(value);
    draw();
  });
  input.doublings.value = Math.log2(settings.tokens);
  setGrowing(settings.growing);
  draw();
  return [
    ` [hidden] {display:none}`,
    ` fieldset {margin:0 0 .6em}`,
    ` fieldset .line {margin:0}`,
    ` .line span {font-size:13px}`,
    ` input[type=number] {width:5.6em}`,
    ` input[data-set=tokens] {width:7em}`,
    ` .refused {border-left:4px solid #b00020; padding-left:.6em}`,
    ` th[scope=row] {text-align:left}`,
    ` .part th {padding-left:1.4em; color:#555}`,
  ];
})
