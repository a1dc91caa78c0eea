width => {
  const problems = [], TOLERANCE_PX = 2;
  const box = element => element.getBoundingClientRect();
  const shown = element => element.checkVisibility() && box(element).width > 0 && box(element).height > 0;
  const named = element => `"${(element.innerText ?? element.textContent).trim().slice(0, 40)}"`;
  const overlap = (a, b) => {
    const [p, q] = [box(a), box(b)];
    return Math.min(p.right, q.right) - Math.max(p.left, q.left) > TOLERANCE_PX
      && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > TOLERANCE_PX;
  };
  const apart = (elements, where) => elements.forEach((a, i) => elements.slice(i + 1).forEach(b => {
    if (!a.contains(b) && !b.contains(a) && overlap(a, b)) problems.push(`${where}: ${named(a)} overlaps ${named(b)}`);
  }));
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)].filter(shown);

  if (innerWidth > width || document.documentElement.scrollWidth > width)
    problems.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  const texts = all("h1, h2, h3, p, li, dt, label, pre, code, input:not([aria-hidden]), button, summary, .block, .verdict, .plotly-graph-div");
  apart(texts.filter(e => !e.closest(".plotly-graph-div") || e.matches(".plotly-graph-div")), "page");
  for (const element of texts.filter(e => !e.closest(".scroll, pre")))
    if (box(element).left < -1 || box(element).right > width + 1) problems.push(`${named(element)} leaves the screen`);

  for (const plot of all(".js-plotly-plot")) {
    const title = plot.closest("section, .scroll")?.querySelector("h2")?.innerText ?? plot.id;
    const parallel = plot.data.some(trace => trace.type === "parcoords");
    if (parallel) continue; // its labels are turned, and on a phone it scrolls sideways
    const turned = element => /rotate\((?!0)/.test(element.getAttribute("transform") ?? "");
    const labels = all(".xtick text, .ytick text, .annotation-text, .g-xtitle text, .g-ytitle text, "
      + "[class*=title] text, .legendtext, .legendtitletext", plot);
    const straight = labels.filter(e => !turned(e) || e.closest("[class*=title]"));
    apart([...new Set(straight)], title);
    const drawing = box(plot), svg = plot.querySelector(".main-svg");
    if (box(svg).height > drawing.height + 1) problems.push(`${title}: the plot is cut at its bottom`);
    for (const label of labels) {
      const place = box(label);
      if (place.left < drawing.left - 1 || place.right > drawing.right + 1 || place.bottom > drawing.bottom + 1
        || place.top < drawing.top - 1) problems.push(`${title}: ${named(label)} is cut`);
    }
    const panels = all(".nsewdrag", plot);
    apart(panels, `panels of ${title}`);
    if (width < 640 && new Set(panels.map(panel => Math.round(box(panel).left))).size > 1)
      problems.push(`${title}: panels stand side by side`);
    for (const panel of panels) if (box(panel).width < 150 || box(panel).height < 60) problems.push(`${title}: a panel is small`);
    const numTicks = all(".xtick text", plot).length;
    if (plot._fullLayout.xaxis?.type === "log" && numTicks < 2) problems.push(`${title}: ${numTicks} ticks`);
  }
  return problems;
}
