// Draws the overview's charts from the table of the same figures, which stays for those who do not see charts.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const numbers = (name) => [...document.querySelectorAll("#buckets tbody tr")].map((row) => {
    const value = row.querySelector(`[data-name="${name}"]`).dataset.value;
    return value === "" ? null : Number(value);
  });
  const times = numbers("since");
  const form = (options) => new Intl.DateTimeFormat("en-GB", { timeZone: "UTC", ...options });
  const clock = form({ hour: "2-digit", minute: "2-digit" });
  const day = form({ day: "numeric", month: "short" });
  const hours = times.at(-1) - times[0] <= 86400;
  const colour = (name) => {
    const probe = document.createElement("span");
    probe.className = name;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const drawn = [];
  for (const place of document.querySelectorAll(".chart[data-series]")) {
    const names = place.dataset.series.split(" ");
    const labels = place.dataset.labels.split("|");
    const unit = place.dataset.unit;
    const write = (value) => value == null ? "–" : unit === "$" ? `$${Number(value.toPrecision(2))}` : `${Number(value.toPrecision(4))}${unit}`;
    const axis = { stroke: colour("ink"), grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule"), width: 1 } };
    const series = names.map((name, at) => ({
      label: labels[at], stroke: colour(`line-${at}`), width: 2, dash: at ? [6, 4] : [], points: { show: times.length < 40 },
      value: (_, value) => write(value),
    }));
    const options = {
      width: place.clientWidth, height: 180, tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      series: [{ label: "Began (UTC)" }, ...series],
      axes: [{ ...axis, space: 90, values: (_, ticks) => ticks.map((tick) => hours ? clock.format(tick * 1000) : day.format(tick * 1000)) }, { ...axis, size: 80, values: (_, ticks) => ticks.map(write) }],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    };
    const chart = new uPlot(options, [times, ...names.map(numbers)], place);
    drawn.push(() => chart.setData([numbers("since"), ...names.map(numbers)]));
    addEventListener("resize", () => chart.setSize({ width: place.clientWidth, height: 180 }));
  }
  // The table is replaced when the page is patched.
  const holder = document.getElementById("overview-buckets").parentElement;
  new MutationObserver(() => drawn.forEach((draw) => draw())).observe(holder, { childList: true, subtree: true, attributes: true });
});
