// Draws plotly's plots for the width of the screen: on a phone, panels stand one below the other.
(() => {
  const NARROW_PX = 640, MIN_PANEL_PX = 190, MAX_PANEL_PX = 240, LINE_PX = 18, CHARACTER_PX = 7, LEGEND_PX = 20;
  const MAX_LOG_TICKS = 3, MAX_NAME = 34, MAX_CATEGORY = 20, CATEGORY_PX = 30, AXIS_PX = 90;

  const wrapped = (text, most) => {
    const lines = [""];
    for (const word of String(text).split(" ")) {
      const line = lines.at(-1);
      if (line && line.length + word.length >= most) lines.push(word);
      else lines[lines.length - 1] = line ? `${line} ${word}` : word;
    }
    return lines.join("<br>");
  };
  const numLines = text => String(text).split("<br>").length;
  const longest = texts => Math.max(0, ...texts.flatMap(text => String(text).split("<br>")).map(t => t.length));
  const names = values => [...new Set(Array.isArray(values) ? values.filter(v => typeof v === "string") : [])];

  // The panels of a layout in reading order, each with its axes, its place and its title.
  function panelsOf(layout) {
    const found = Object.keys(layout).filter(key => /^xaxis\d*$/.test(key)).map(key => {
      const x = layout[key], yKey = `yaxis${(x.anchor ?? "y").slice(1)}`, y = layout[yKey] ?? {};
      const across = x.domain ?? [0, 1], up = y.domain ?? [0, 1];
      const title = (layout.annotations ?? []).findIndex(a => a.xref === "paper" && a.yref === "paper"
        && Math.abs(a.x - (across[0] + across[1]) / 2) < 0.02 && Math.abs(a.y - up[1]) < 0.02);
      return { key, yKey, across, up, title };
    });
    return found.sort((a, b) => b.up[1] - a.up[1] || a.across[0] - b.across[0]);
  }

  // Axes that showed no labels because a neighbour had them show their own.
  function standAlone(layout, key) {
    const axis = layout[key];
    if (!axis) return;
    const matched = axis.matches && layout[axis.matches.replace(/^([xy])/, "$1axis")];
    if (axis.showticklabels === false) axis.showticklabels = true;
    if (matched?.title?.text && !axis.title?.text) axis.title = matched.title;
  }

  // Names of categories: below the panel they are turned, beside it they are wrapped.
  // Returns the height that they need below and beside the panel.
  function nameCategories(data, layout, panel, width) {
    const axes = [panel.key, panel.yKey].map(key => key.replace("axis", ""));
    const own = data.filter(t => (t.xaxis ?? "x") === axes[0] && (t.yaxis ?? "y") === axes[1]);
    const below = names(own.flatMap(t => names(t.x))), beside = names(own.flatMap(t => names(t.y)));
    let needed = 0;
    if (beside.some(name => name.length > MAX_CATEGORY)) {
      const text = beside.map(name => wrapped(name, MAX_CATEGORY));
      Object.assign(layout[panel.yKey] ??= {}, { tickvals: beside, ticktext: text, tickfont: { size: 11 } });
      needed = CATEGORY_PX * beside.length;
    }
    const turned = below.length * (longest(below) + 2) * CHARACTER_PX > width - 60;
    if (turned) layout[panel.key].tickangle = -50;
    return [turned ? 5.5 * longest(below) : 0, needed];
  }

  function stack(data, layout, width, margin) {
    const panels = panelsOf(layout);
    const isGrid = new Set(panels.map(panel => panel.across[0].toFixed(3))).size > 1;
    const inner = layout.height - margin.t - margin.b;
    const rows = panels.map(panel => {
      if (isGrid) [panel.key, panel.yKey].forEach(key => standAlone(layout, key));
      const x = layout[panel.key], title = layout.annotations?.[panel.title];
      if (title) title.text = wrapped(title.text, (width - 40) / CHARACTER_PX);
      if (x.title?.text) {
        x.title.text = wrapped(x.title.text, (width - 90) / 7.5);
        x.title.standoff = 6;
      }
      const [namesBelow, besides] = nameCategories(data, layout, panel, width);
      const height = Math.max((panel.up[1] - panel.up[0]) * inner, besides);
      const labels = x.showticklabels === false ? 8 : 26 + namesBelow;
      return {
        panel, title,
        above: title ? 10 + LINE_PX * numLines(title.text) : 12,
        height: isGrid ? Math.min(Math.max(height, MIN_PANEL_PX), Math.max(MAX_PANEL_PX, besides)) : height,
        below: labels + (x.title?.text ? 6 + LINE_PX * numLines(x.title.text) : 0),
      };
    });
    const total = rows.reduce((sum, row) => sum + row.above + row.height + row.below, 0);
    let from = 0;
    for (const { panel, title, above, height, below } of rows) {
      const top = 1 - (from + above) / total, bottom = 1 - (from + above + height) / total;
      layout[panel.key].domain = [0, 1];
      Object.assign(layout[panel.yKey] ??= {}, { domain: [bottom, top], automargin: true });
      if (title) Object.assign(title, { x: 0.5, y: top });
      const x = layout[panel.key]; // a wide logarithmic axis shows powers of ten only
      if (x.type === "log" && x.nticks > MAX_LOG_TICKS) x.nticks = Math.ceil(0.65 * x.nticks);
      from += above + height + below;
    }
    return total;
  }

  // Puts the legend below the panels, in as many columns as fit. Returns its height.
  function legendBelow(data, layout, width) {
    const shown = data.filter(t => t.showlegend !== false && t.visible !== false && t.name);
    if (layout.showlegend === false || !shown.length || (shown.length < 2 && !layout.showlegend)) return 0;
    const entry = longest(shown.map(t => t.name)) * CHARACTER_PX;
    const columns = Math.max(1, Math.floor(width / (entry + 50)));
    const lines = shown.map(t => numLines(t.name));
    let height = layout.legend?.title?.text ? LEGEND_PX : 0;
    for (let i = 0; i < lines.length; i += columns) height += LEGEND_PX + 14 * (Math.max(...lines.slice(i, i + columns)) - 1);
    layout.legend = {
      ...layout.legend, orientation: "h", x: 0, xanchor: "left", xref: "container", y: 0, yanchor: "bottom",
      yref: "container", entrywidth: entry, title: { ...layout.legend?.title, side: "top" },
    };
    return height + 10;
  }

  // Labelled cells need no colour bar; others keep a slim one, as the heading names the figure.
  function slimColourBar(data, layout) {
    if (!layout.coloraxis?.colorbar) return;
    if (data.every(t => t.texttemplate)) layout.coloraxis.showscale = false;
    Object.assign(layout.coloraxis.colorbar, { thickness: 10, title: { text: "" }, tickfont: { size: 10 } });
  }

  function narrowed(data, layout, width) {
    data = data.map(t => t.name ? { ...t, name: wrapped(t.name, MAX_NAME) } : t);
    const margin = { t: 40, b: 48, ...layout.template?.layout?.margin, ...layout.margin };
    const height = stack(data, layout, width, margin);
    const below = legendBelow(data, layout, width);
    slimColourBar(data, layout);
    layout.margin = { l: 10, r: 24, t: 4, b: below + 4, pad: 0 };
    layout.height = height + below + 8;
    layout.dragmode = false; // a finger on a plot scrolls the page
    return [data, layout];
  }

  const isNarrow = plot => plot.clientWidth > 0 && plot.clientWidth < NARROW_PX;
  const plots = new WeakMap(); // plot -> whether it was drawn for a narrow screen, and how to draw it again
  const sizes = new ResizeObserver(entries => entries.forEach(({ target }) => {
    const { narrow, again } = plots.get(target);
    if (target.clientWidth && isNarrow(target) !== narrow) again();
  }));

  function fitted(plot, data, asked) {
    let layout = structuredClone(asked); // plotly writes into it
    const parallel = data.find(t => t.type === "parcoords"); // too wide for a phone: it scrolls sideways
    if (parallel) plot.style.minWidth = `${AXIS_PX * (parallel.dimensions.length + 1)}px`;
    else if (isNarrow(plot) && layout.height) [data, layout] = narrowed(data, layout, plot.clientWidth);
    if (layout.height) {
      plot.style.height = `${layout.height}px`;
      plot.parentElement.style.height = "auto";
    }
    return [data, layout];
  }

  function adopt(plotly) {
    for (const method of ["newPlot", "react"]) {
      const draw = plotly[method].bind(plotly);
      plotly[method] = (target, data, ...rest) => {
        const plot = typeof target === "string" ? document.getElementById(target) : target;
        plots.set(plot, { narrow: isNarrow(plot), again: () => plotly.react(plot, data, ...rest) });
        sizes.observe(plot);
        if (Array.isArray(data)) return draw(plot, ...fitted(plot, data, rest[0] ?? {}), ...rest.slice(1));
        const [traces, layout] = fitted(plot, data.data ?? [], data.layout ?? {});
        return draw(plot, { ...data, data: traces, layout });
      };
    }
    return plotly;
  }

  if (window.Plotly) adopt(window.Plotly);
  else {
    let plotly; // the dashboard loads plotly later
    Object.defineProperty(window, "Plotly", {
      configurable: true, get: () => plotly, set: value => { plotly = value && adopt(value); },
    });
  }
})();
