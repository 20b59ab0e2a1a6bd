(function (root, data, panel) {
  const { rules, directions, tokens } = data;
  const correct = "S ← S + β kᵀ(v − kS)";
  const RULES = {
    "linear attention": { equation: "S ← S + kᵀv" },
    "decay": { decay: true, equation: "S ← αS, S ← S + kᵀv" },
    "delta rule": { delta: true, equation: correct },
    "gated delta rule": { decay: true, delta: true, equation: "S ← αS, " + correct },
    "KDA": { decay: true, channels: true, delta: true, equation: "S ← Diag(α)S, " + correct },
  };

  function read(q, S) {
    return S[0].map((_, j) => q.reduce((sum, x, i) => sum + x * S[i][j], 0));
  }
  function step(rule, S, k, v, beta, alpha) {
    const { decay, channels, delta } = RULES[rule];
    const kept = S.map((row, i) => row.map((x) => (decay ? (channels ? alpha[i] : alpha) * x : x)));
    const seen = read(k, kept);
    const erased = k.map((x) => seen.map((y) => (delta ? beta * x * y : 0)));
    const written = k.map((x) => v.map((y) => (delta ? beta * x * y : x * y)));
    const next = kept.map((row, i) => row.map((x, j) => x - erased[i][j] + written[i][j]));
    return { kept, read: seen, erased, written, S: next };
  }
  // On the element, not on the window: tests compare these with the library.
  root.memory = { step, read };

  let rule = rules[0], query = data.query, now = 0, edited = 1, timer = null;
  const names = Object.keys(directions);
  const empty = directions.k1.map(() => tokens[0].value.map(() => 0));

  function run() {
    const steps = [{ S: empty }];
    tokens.forEach((t, i) => {
      const alpha = RULES[rule].channels ? t.channels : t.alpha;
      steps.push(step(rule, steps[i].S, directions[t.key], t.value, t.beta, alpha));
    });
    return steps;
  }

  const short = (x) => String(+x.toFixed(2) || 0).replace("-", "−");
  const row = (v) => "(" + v.map(short).join(", ") + ")";
  const distance = (a, b) => Math.hypot(...a.map((x, j) => x - b[j]));
  const options = (list, chosen) =>
    list.map((x) => `<option${x === chosen ? " selected" : ""}>${x}</option>`).join("");

  function colour(x, top) {
    // blue above 0, orange below, white at 0; dark text stays legible on all of them
    const end = x < 0 ? [255, 169, 14] : [63, 144, 218], share = Math.min(1, Math.abs(x) / top);
    return `rgb(${end.map((c) => Math.round(255 + (c - 255) * share)).join(",")})`;
  }
  function heat(sign, caption, M, top) {
    const head = M[0].map((_, j) => `<th scope="col">v${j + 1}</th>`).join("");
    const body = M.map((cells, i) => `<tr><th scope="row">${i + 1}</th>` + cells.map((x) =>
      `<td style="background:${colour(x, top)}">${short(x)}</td>`).join("") + "</tr>").join("");
    return `<div class="part">${sign}<table><caption>${caption}</caption>
<tr><td></td>${head}</tr>${body}</table></div>`;
  }
  function answers(S) {
    const last = new Map();
    tokens.slice(0, now).forEach((t) => last.set(t.key, t.value));
    return [...last].map(([key, truth]) => {
      const answer = read(directions[key], S);
      return { key, truth, answer, error: distance(truth, answer) };
    });
  }

  panel.setAttribute("aria-label", "Playground: watch a memory");
  const title = rules.length === 1 ? `<b>${rule}</b>`
    : `<label>Rule <select data-set="rule">${options(rules, rule)}</select></label>`;
  panel.innerHTML = `
<div class="line">${title} <span data-show="equation"></span></div>
<div class="line" role="group" aria-label="Tokens">${tokens.map((_, i) =>
    `<button type="button" data-go="${i + 1}"></button>`).join("")}</div>
<div class="line"><button type="button" data-go="reset">Reset</button>
<button type="button" data-go="back">Back</button>
<button type="button" data-go="forward">Forward</button>
<button type="button" data-go="play">Play</button></div>
<p aria-live="polite" data-show="summary"></p>
<div class="line scroll" data-show="memory" role="group" aria-label="The step" tabindex="0"></div>
<div class="line"><label>Query q <select data-set="query">${options(names, query)}</select></label>
<span data-show="answer"></span></div>
<div class="scroll" data-show="answers" role="group" aria-label="Answers" tabindex="0"></div>
<fieldset><legend><label>Change token <select data-set="token">${
    options(tokens.map((_, i) => i + 1), 1)}</select></label></legend>
<div class="line" data-show="editor"></div></fieldset>`;
  const show = {};
  panel.querySelectorAll("[data-show]").forEach((box) => { show[box.dataset.show] = box; });
  const chooser = panel.querySelector("[data-set=token]");
  const player = panel.querySelector("[data-go=play]");

  function drawEditor() {
    const token = tokens[edited - 1], { decay, channels, delta } = RULES[rule];
    const range = (set, name, max) => `<label class="range">${name} <input type="range" min="0"
      max="${max}" step="0.05" data-set="${set}"><span aria-hidden="true"></span></label>`;
    let html = `<label>key <select data-set="key">${options(names, token.key)}</select></label>`;
    html += token.value.map((x, j) => `<label>v${j + 1} <input type="number" step="0.5" value="${x}"
      data-set="value.${j}"></label>`).join("");
    if (delta) html += range("beta", "β, write strength", tokens.some((t) => t.beta > 1) ? 2 : 1);
    if (channels) {
      html += token.channels.map((_, i) =>
        range(`channels.${i}`, `α of channel ${i + 1}`, 1)).join("");
    } else if (decay) html += range("alpha", "α, what stays", 1);
    show.editor.innerHTML = html;
    chooser.value = edited;
  }
  const setting = (set) => set.split(".").reduce((at, key) => at[key], tokens[edited - 1]);

  function draw() {
    const steps = run(), at = steps[now], { decay, delta } = RULES[rule];
    const top = Math.max(1, ...steps.flatMap((s) => s.S.flat().map(Math.abs)));
    show.equation.textContent = `${RULES[rule].equation}, o\u00a0=\u00a0qS` +
      (rule === "linear attention" ? " (without the normaliser: no division by q·z)" : "");
    tokens.forEach((t, i) => {
      const button = panel.querySelector(`[data-go="${i + 1}"]`);
      button.textContent = `${i + 1}: ${t.key} → ${row(t.value)}`;
      button.className = i < now ? "done" : "";
      if (i + 1 === now) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    panel.querySelector("[data-go=back]").setAttribute("aria-disabled", now === 0);
    panel.querySelector("[data-go=forward]").setAttribute("aria-disabled", now === tokens.length);
    const rows = answers(at.S), answer = row(read(directions[query], at.S));
    show.answer.textContent = `o = qS = ${answer}`;
    if (now) {
      const t = tokens[now - 1], worst = rows.reduce((a, b) => (b.error > a.error ? b : a));
      show.summary.textContent = `Token ${now} of ${tokens.length}, key ${t.key}, ` +
        `value ${row(t.value)}. Before the write its key read kS = ${row(at.read)}. ` +
        `Largest error: ${short(worst.error)}, at ${worst.key}. Asked with ${query}: ${answer}.`;
      show.memory.innerHTML = heat("", decay ? "after decay" : "before", at.kept, top) +
        (delta ? heat("−", "erased β kᵀ(kS)", at.erased, top) : "") +
        heat("+", delta ? "written β kᵀv" : "written kᵀv", at.written, top) +
        heat("=", "memory S", at.S, top);
    } else {
      show.summary.textContent = `Before the first of ${tokens.length} tokens the memory is empty.`;
      show.memory.innerHTML = heat("", "memory S", at.S, top);
    }
    const head = ["key", "last written", "memory answers", "error"];
    show.answers.innerHTML = "<table><caption>Each key written so far</caption><tr>" +
      head.map((x) => `<th scope="col">${x}</th>`).join("") + "</tr>" +
      rows.map((r) => `<tr><th scope="row">${r.key}</th><td>${row(r.truth)}</td>` +
        `<td>${row(r.answer)}</td><td>${short(r.error)}</td></tr>`).join("") + "</table>";
    show.editor.querySelectorAll("[type=range]").forEach((slider) => {
      const value = setting(slider.dataset.set);
      slider.value = value;
      slider.nextElementSibling.textContent = short(value);
      slider.setAttribute("aria-valuetext", short(value));
    });
  }
  function go(i) {
    now = Math.max(0, Math.min(tokens.length, i));
    edited = Math.max(1, now);
    drawEditor();
    draw();
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    player.textContent = "Play";
  }
  function play() {
    player.textContent = "Pause";
    if (now === tokens.length) go(0);
    timer = setInterval(() => {
      // the cell may have been run again
      if (!panel.isConnected) return stop();
      go(now + 1);
      if (now === tokens.length) stop();
    }, 1500);
  }

  panel.addEventListener("click", ({ target }) => {
    const goal = target.dataset.go;
    if (!goal) return;
    const playing = timer;
    stop();
    if (goal === "play") return playing || play();
    go({ reset: 0, back: now - 1, forward: now + 1 }[goal] ?? +goal);
  });
  function change(set, value) {
    const [name, index] = set.split("."), token = tokens[edited - 1];
    if (name === "rule") rule = value;
    else if (name === "query") query = value;
    else if (name === "token") edited = +value;
    else if (name === "key") token.key = value;
    // an empty field is a number half typed: the old one stays
    else if (value === "") return;
    else if (index) token[name][index] = +value;
    else token[name] = +value;
    stop();
    if (name === "rule" || name === "token") drawEditor();
    draw();
  }
  panel.addEventListener("input", ({ target }) => change(target.dataset.set, target.value));
  go(0);
  return [
    ` button {background:#fff; border:2px solid #767676; border-radius:6px; padding:.1em .7em}`,
    ` button.done {background:#dcebf9}`,
    ` button[aria-current] {border-color:#1a1a1a; box-shadow:0 0 0 2px #1a1a1a}`,
    ` button[aria-disabled=true] {border-color:#ccc}`,
    ` .range span {min-width:2.3em}`,
    ` [data-show=memory] {gap:.4em}`,
    ` .part {display:flex; gap:.4em; align-items:center}`,
    ` .part :is(caption, th, td) {font-size:12px}`,
    ` .part td {min-width:3.1em; padding:.25em .2em}`,
    ` .part :is(th, tr:first-child td) {border:0; min-width:0; padding:.2em; color:#555}`,
  ];
})
