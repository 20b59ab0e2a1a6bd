// What playgrounds share. fill(root, data, panel) builds one in its panel and returns its CSS.
(function (id, fill) {
  // Colab and Lab may insert an output twice, so take the first that is not running yet.
  const root = document.querySelector('[id="' + id + '"]:not([data-on])');
  if (!root) return;
  root.setAttribute("data-on", "");
  const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  const panel = document.createElement("div");
  panel.className = "panel";
  panel.setAttribute("role", "group");
  panel.addEventListener("keydown", (event) => {
    // JupyterLab keeps keys for itself, the arrows even on a slider, unless they are handled here.
    event.stopPropagation();
    const slider = event.target;
    if (slider.type !== "range") return;
    const by = slider.step * (event.key.startsWith("Page") ? 5 : 1);
    const move = { ArrowLeft: -by, ArrowDown: -by, PageDown: -by, ArrowRight: by, ArrowUp: by,
      PageUp: by, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    // rounded to a step by the slider itself
    slider.value = Math.max(slider.min, Math.min(slider.max, +slider.value + move));
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  });
  // An id outweighs the themes' own rules, which would restyle the tables and the controls.
  const style = document.createElement("style");
  style.textContent = [
    ` * {all:revert; box-sizing:border-box}`,
    ` .panel {display:block; background:#fff; color:#1a1a1a; color-scheme:light; padding:.7em;
      border:1px solid #999; border-radius:6px; text-align:left;
      font:15px/1.4 system-ui,sans-serif}`,
    ` .line {display:flex; flex-wrap:wrap; gap:.4em .8em; align-items:center; margin:0 0 .6em}`,
    ` .scroll {overflow-x:auto; margin:0 0 .6em}`,
    ` p {margin:0 0 .6em}`,
    ` label {display:inline-flex; gap:.4em; align-items:center; white-space:nowrap}`,
    ` :is(button, select, input) {font:inherit; min-height:40px; max-width:100%; color:#1a1a1a}`,
    ` input[type=number] {width:4.6em}`,
    ` input[type=range] {width:8em}`,
    ` fieldset {border:1px solid #999; border-radius:6px; padding:.3em .7em;
      margin:0; min-width:0}`,
    ` table {border-collapse:collapse; font-variant-numeric:tabular-nums}`,
    ` caption {text-align:left; font-size:13px}`,
    ` :is(th, td) {border:1px solid #ddd; padding:.2em .35em; text-align:right;
      font-weight:normal; font-size:13px}`,
    ...fill(root, data, panel),
  ].map((css) => "#" + id + css).join("\n");
  root.append(style, panel);
  root.querySelector("img").style.display = "none";
})
