(function (id) {
  // A figure can be inserted twice (Colab and Lab re-run outputs), so take the first one that is not running yet.
  var root = document.querySelector('[id="' + id + '"]:not([data-on])');
  if (!root) return;
  root.setAttribute("data-on", "");
  var data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  var image = root.querySelector("img");
  var controls = root.querySelector(".player-controls");
  var slider = controls.querySelector("input");
  var output = controls.querySelector("output");
  var button = controls.querySelector("button");
  var last = data.frames.length - 1;
  var timer = null;

  function show(i) {
    i = Math.max(0, Math.min(last, i));
    slider.value = i;
    slider.setAttribute("aria-valuetext", data.labels[i]);
    image.src = "data:image/png;base64," + data.frames[i];
    output.textContent = data.labels[i];
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  }
  slider.addEventListener("input", function () { stop(); show(+slider.value); });
  slider.addEventListener("keydown", function (event) {
    // JupyterLab keeps the arrow keys for itself unless they are handled here.
    var i = +slider.value;
    var goal = { ArrowLeft: i - 1, ArrowDown: i - 1, ArrowRight: i + 1, ArrowUp: i + 1, Home: 0, End: last }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    stop();
    show(goal);
  });
  button.addEventListener("click", function () {
    if (timer) return stop();
    button.textContent = "Pause";
    if (+slider.value === last) show(0);
    timer = setInterval(function () {
      show(+slider.value + 1);
      if (+slider.value === last) stop();
    }, data.milliseconds);
  });
  controls.hidden = false;
  show(+slider.value);
})
