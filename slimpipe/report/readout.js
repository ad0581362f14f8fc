// Shows, under the pointer, the step and every line's number there.
for (const chart of JSON.parse(document.getElementById("data").textContent)) {
  const svg = document.getElementById(chart.name), cursor = svg.querySelector(".cursor");
  const figure = svg.closest("figure"), legend = figure.querySelector(".legend"), plain = legend.innerHTML;
  const [first, last] = chart.x, inside = chart.right - chart.left;
  const nearest = (points, step) => points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
  const number = (y) => y === null ? "–" : Math.abs(y) >= 1e5 || (y !== 0 && Math.abs(y) < 1e-3) ? y.toExponential(3)
    : y.toLocaleString("en", {maximumSignificantDigits: 5});
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * chart.width;
    const step = first + (last - first) * Math.min(1, Math.max(0, (at - chart.left) / inside));
    const x = nearest(chart.lines[0].points, step)[0];
    const place = chart.left + (last > first ? (x - first) / (last - first) : 0.5) * inside;
    cursor.setAttribute("x1", place); cursor.setAttribute("x2", place); cursor.setAttribute("visibility", "visible");
    legend.replaceChildren(...[["step", x.toLocaleString("en"), -1],
      ...chart.lines.map((line) => [line.label, number(nearest(line.points, x)[1]), line.colour])]
      .map(([label, value, colour]) => {
        const item = document.createElement("span"), bold = document.createElement("b");
        if (colour >= 0) item.append(Object.assign(document.createElement("i"), {className: `key c${colour}`}));
        bold.textContent = value;
        item.append(label ? label + " " : "", bold);
        return item;
      }));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); legend.innerHTML = plain; });
}
