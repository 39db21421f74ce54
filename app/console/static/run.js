/* Moves the cursor of a run's page over the journal: by the slider, and by playing it back. Every picture comes from the
server; without this script the slider's button and the links do the same. */
(() => {
  "use strict";
  const PICTURES_PER_SECOND = 10;
  const SWEEP_SECONDS = 10;
  let timer = 0;
  let busy = false;
  let wanted = null;

  const form = () => document.getElementById("run-cursor");

  function address(path, t) {
    const given = new URLSearchParams(new FormData(form()));
    given.set("t", t);
    return path + "?" + given;
  }

  async function show(t) {
    document.getElementById("run-live")?.remove(); // a page that shows an instant stands still
    wanted = t;
    if (busy) return;
    busy = true;
    while (wanted !== null) {
      const now = wanted;
      wanted = null;
      const begun = performance.now();
      const page = address(location.pathname, now);
      await htmx.ajax("GET", address(form().dataset.views, now), { target: "#run-views", swap: "outerMorph" });
      history.replaceState(null, "", page);
      reveal();
      await new Promise((go) => setTimeout(go, Math.max(0, 1000 / PICTURES_PER_SECOND - (performance.now() - begun))));
    }
    busy = false;
  }

  function stop() {
    clearInterval(timer);
    timer = 0;
    reveal();
  }

  function play(kind) {
    stop();
    const instants = form().dataset.instants.split(" ").map(Number);
    const length = instants[instants.length - 1];
    const from = Number(form().dataset.now) < length ? Number(form().dataset.now) : 0;
    const speed = kind === "ten" ? length / SWEEP_SECONDS : 1;
    const begun = performance.now();
    let shown = -1;
    timer = setInterval(() => {
      const t = from + ((performance.now() - begun) / 1000) * speed;
      const place = instants.filter((one) => one <= t).length - 1;
      if (place !== shown) {
        shown = place;
        show(instants[place]);
      }
      if (t >= length) stop();
    }, 1000 / PICTURES_PER_SECOND);
    reveal();
  }

  function reveal() {
    for (const button of document.querySelectorAll("[data-play]")) {
      button.hidden = (button.dataset.play === "stop") !== Boolean(timer);
    }
  }

  function reach() {
    const node = document.querySelector(".node.chosen");
    const box = node?.closest(".scroll");
    if (box) box.scrollLeft = node.getBBox().x + node.getBBox().width / 2 - box.clientWidth / 2;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-play]");
    if (!button) return;
    if (button.dataset.play === "stop") stop();
    else play(button.dataset.play);
    (document.querySelector("[data-play]:not([hidden])") || form()).focus();
  });
  document.addEventListener("input", (event) => {
    if (event.target.id !== "t") return;
    stop();
    show(event.target.value);
  });
  document.addEventListener("htmx:sse:after:message", reveal);
  reveal();
  reach();
})();
