"use strict";
// Draws what elixir/show/page.py wrote: each view in a column. All charts are of Apache ECharts.

const TICKS = 100000;
const SIZES = [["TiB", 2 ** 40 * 10, 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const DARK = "#333333";

function bytes(amount) {
  for (const [unit, from, size = from] of SIZES) if (Math.abs(amount) >= from) return (amount / size).toFixed(2) + " " + unit;
  return amount.toFixed(0) + " B";
}

function seconds(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3]]) {
    if (Math.abs(value) >= size / 100 || value === 0) return (value / size).toFixed(3) + " " + unit;
  }
  return (value / 1e-6).toFixed(3) + " us";
}

const signed = (value) => (value > 0 ? "+" : "") + seconds(value);

function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}

function table(heads, rows) {
  const cell = (value) =>
    value instanceof Node ? element("td", {}, value)
      : element("td", { className: /^[-+]?[\d,.]+( ?\S{1,3})?$/.test(value) ? "number" : "" }, value);
  const head = element("tr", {}, ...heads.map((text) => element("th", {}, text)));
  const body = rows.map(({ cells, className = "" }) => element("tr", { className }, ...cells.map(cell)));
  return element("div", { className: "wide" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

function copied(text) {
  const button = element("button", { type: "button", textContent: "copy" });
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = element("textarea", { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
  };
  return button;
}

function chart(section, name, height) {
  const place = element("div", { className: "chart " + name });
  place.style.height = height + "px";
  section.append(place);
  const made = echarts.init(place, null, { renderer: "canvas" });
  new ResizeObserver(() => made.resize()).observe(place);
  return made;
}

const TEXT = { color: DARK, fontSize: 12 };
const GRID = { left: 92, right: 14, outerBoundsMode: "none" };
const TIP = { confine: true, textStyle: { fontSize: 12 }, extraCssText: "max-width: 90vw; white-space: normal;" };
const escaped = (text) => element("i", { textContent: text }).innerHTML;

// --- budgets -----------------------------------------------------------------------------------------------------------

function drawBudgets(section, budgets) {
  const texts = budgets.map(({ memory, budget, reserve, must_be_free, parts }) => {
    const peak = parts.reduce((sum, part) => sum + part[1], 0);
    const kept = reserve ? `, ${bytes(reserve)} kept back` : "";
    const free = must_be_free ? `; ${bytes(must_be_free)} must be free` : "";
    return `${memory}: ${bytes(peak)} of ${bytes(budget)}${kept}${free}`;
  });
  section.append(element("h2", {}, "Memory at its peak, and the budget"));
  budgets.forEach(({ memory, budget, parts, must_be_free }, row) => {
    const made = chart(section, "budget", 64);
    const marks = [{ xAxis: budget, name: "budget" }];
    if (must_be_free) marks.push({ xAxis: must_be_free, name: "must be free", lineStyle: { type: "dashed" } });
    made.setOption({
      aria: { enabled: true },
      title: { text: texts[row], left: 4, textStyle: { fontSize: 12, fontWeight: "normal" }, padding: 0 },
      grid: { left: 4, right: 10, top: 22, bottom: 4 },
      tooltip: {
        ...TIP,
        formatter: ({ seriesIndex }) => {
          const [name, size, , about] = parts[seriesIndex];
          return `<b>${escaped(name)}</b> ${bytes(size)}<br>${escaped(about)}`;
        },
      },
      xAxis: { type: "value", min: 0, max: Math.max(budget, must_be_free || 0, parts.reduce((sum, part) => sum + part[1], 0)) * 1.01, show: false },
      yAxis: { type: "category", data: [memory], show: false },
      series: parts.map(([name, size, colour], index) => ({
        name, type: "bar", stack: "all", data: [size], itemStyle: { color: colour, borderColor: "#fff", borderWidth: 0.5 }, barWidth: "90%",
        markLine: index ? undefined : { symbol: "none", silent: true, label: { show: false }, lineStyle: { color: DARK, width: 2, type: "solid" }, data: marks },
      })),
    });
  });
}

// --- one step over time ----------------------------------------------------------------------------------------------

function nice(most, parts) {
  // A round distance of ticks: 1, 2 or 5 times a power of ten.
  const least = most / parts;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least);
}

function byteAxis(most) {
  const [name, from, unit = from] = SIZES.find(([, least]) => most >= least) || ["B", 1];
  return { type: "value", max: most, interval: nice(most / unit, 5) * unit, axisLabel: { formatter: (value) => `${+(value / unit).toPrecision(3)} ${name}`, showMaxLabel: false, ...TEXT } };
}

function unpacked(view, step) {
  const spans = [];
  let start = 0;
  for (let at = 0; at < step.spans.length; at += 5) {
    const [lane, kind, chunk, after, length] = step.spans.slice(at, at + 5);
    start += after;
    spans.push({ lane, kind, chunk, start, end: start + length });
  }
  const kinds = view.kinds_over_step.map((kind) => ({ ...kind, values: Array.isArray(kind.values) ? step.entries.map((entry) => kind.values[entry]) : kind.values }));
  return { ...step, kinds, spans, lanes: [...new Set(spans.map((span) => span.lane))].sort((a, b) => b - a) };
}

function areas(kinds, at, last) {
  // Each value holds until the next moment.
  return kinds.map(({ name, colour, values }) => ({
    id: "memory " + name, name, type: "line", stack: "memory", step: "end", symbol: "none", lineStyle: { width: 0 }, color: colour,
    areaStyle: { color: colour, opacity: 1 }, emphasis: { disabled: true }, xAxisIndex: 0, yAxisIndex: 0,
    data: [...at, last].map((x, index) => [x, Array.isArray(values) ? values[Math.min(index, at.length - 1)] : values]),
  }));
}

const valueAt = ({ values }, index) => (Array.isArray(values) ? values[index] : values);

function lastUntil(at, x) {
  let found = 0;
  while (found + 1 < at.length && at[found + 1] <= x) found += 1;
  return found;
}

function highest(kinds, count) {
  const totals = Array.from({ length: count }, (_, index) => kinds.reduce((sum, kind) => sum + valueAt(kind, index), 0));
  return totals.reduce((best, total, index) => (total > totals[best] ? index : best), 0);
}

function peakMark(kinds, at) {
  const index = highest(kinds, at.length);
  const total = kinds.reduce((sum, kind) => sum + valueAt(kind, index), 0);
  return { symbol: "triangle", symbolSize: 12, symbolRotate: 180, symbolOffset: [0, -8], itemStyle: { color: DARK },
    label: { show: true, position: "top", formatter: "peak " + bytes(total) }, data: [{ name: "peak", coord: [at[index], total], value: total }] };
}

function memoryRows(kinds, index) {
  const shown = kinds.map((kind) => [kind, valueAt(kind, index)]).filter(([, size]) => size).reverse();
  const total = shown.reduce((sum, [, size]) => sum + size, 0);
  const rows = shown.map(([{ name, colour }, size]) => `<span style="color:${colour}">&#9632;</span> ${escaped(name)} ${bytes(size)}`);
  return [`<b>${bytes(total)}</b> on the device`, ...rows];
}

function drawStep(section, view, say) {
  section.append(element("h2", {}, "One step: device memory, and what each lane does"));
  const buttons = element("div", { className: "scenarios" });
  const verdict = element("div", { className: "step-verdict" });
  section.append(buttons, verdict);
  const steps = view.steps.map((step) => unpacked(view, step));
  const rows = Math.max(...steps.map((step) => step.lanes.length));
  const made = chart(section, "step", 250 + 26 * rows + 90);
  const state = { step: steps[0], picked: null, zoom: 1 };

  function bars({ step, picked, zoom }) {
    // A bar is a thick line from its start to its end, at least a pixel long; a gap ends it.
    const least = (TICKS * zoom) / 1000;
    const line = (name, spans, colour, width, opacity) => ({
      id: "lane " + name, name, type: "line", symbol: "none", xAxisIndex: 1, yAxisIndex: 1, emphasis: { disabled: true }, silent: true,
      color: colour, lineStyle: { width, cap: "butt", opacity },
      data: spans.flatMap((span) => {
        const y = step.lanes.indexOf(span.lane);
        return [[span.start, y], [Math.max(span.end, span.start + least), y], [span.end, null]];
      }),
    });
    const kinds = view.kinds.map(([name, colour], kind) => [name, colour, step.spans.filter((span) => span.kind === kind)]);
    const lines = kinds.filter(([, , spans]) => spans.length).map(([name, colour, spans]) => line(name, spans, colour, 15, 1));
    return [...lines, line("of the chunk", step.spans.filter((span) => span.chunk === picked), "#000", 21, 0.65)];
  }

  function tip(x) {
    const { step } = state;
    const module = view.modules[step.entries[lastUntil(step.at, x)]];
    const lines = [`at ${seconds((x / TICKS) * step.step_s)}, in ${escaped(module === undefined ? "the optimizer's step" : module || "no module")}`, ...memoryRows(step.kinds, lastUntil(step.at, x))];
    for (const lane of [...step.lanes].reverse()) {
      const now = step.spans.find((span) => span.lane === lane && span.start <= x && x < span.end);
      const chunk = now && now.chunk >= 0 ? ` chunk ${now.chunk}` : "";
      lines.push(`${escaped(view.lanes[lane])}: ${now ? escaped(view.kinds[now.kind][0]) + chunk : "-"}`);
    }
    return lines.join("<br>");
  }

  function draw() {
    const { step } = state;
    state.zoom = 1;
    verdict.textContent = step.verdict;
    for (const [index, button] of [...buttons.children].entries()) button.setAttribute("aria-pressed", String(steps[index] === step));
    const axis = { type: "value", min: 0, max: TICKS, interval: (nice(step.step_s, 6) / step.step_s) * TICKS, axisLabel: { formatter: (x) => +((x / TICKS) * step.step_s).toPrecision(3) + " s", hideOverlap: true, showMaxLabel: false }, splitLine: { show: false } };
    const series = areas(step.kinds, step.at, TICKS);
    const budget = view.budgets[0].budget;
    series[series.length - 1].markPoint = peakMark(step.kinds, step.at);
    series[0].markLine = { symbol: "none", silent: true, lineStyle: { color: DARK, type: "dashed" }, label: { formatter: "budget", position: "insideEndTop" }, data: [{ yAxis: budget }] };
    const names = [...series.map((each) => each.name), ...new Set(step.spans.map((span) => view.kinds[span.kind][0]))];
    made.setOption({
      aria: { enabled: true }, animation: false,
      legend: { type: "scroll", bottom: 24, data: names, itemHeight: 14, itemWidth: 14, textStyle: TEXT },
      axisPointer: { link: [{ xAxisIndex: [0, 1] }], snap: false },
      tooltip: { ...TIP, trigger: "axis", formatter: (params) => tip(params[0].axisValue) },
      dataZoom: [{ type: "inside", xAxisIndex: [0, 1], zoomOnMouseWheel: "ctrl" }, { type: "slider", xAxisIndex: [0, 1], height: 16, bottom: 4, labelFormatter: "" }],
      grid: [{ ...GRID, top: 26, height: 200 }, { ...GRID, top: 240, height: 26 * rows }],
      xAxis: [{ ...axis, gridIndex: 0, axisLabel: { show: false }, axisTick: { show: false } }, { ...axis, gridIndex: 1 }],
      yAxis: [
        { ...byteAxis(budget * 1.12), gridIndex: 0 },
        { type: "category", gridIndex: 1, data: step.lanes.map((lane) => view.lanes[lane]), axisLabel: { ...TEXT, width: 84, overflow: "break", lineHeight: 12, fontSize: 11, interval: 0 }, axisTick: { show: false } },
      ],
      series: [...series, ...bars(state)],
    }, { notMerge: true });
  }

  steps.forEach((step) => {
    const button = element("button", { type: "button", textContent: step.scenario });
    button.onclick = () => { state.step = step; draw(); };
    buttons.append(button);
  });
  made.on("click", ({ componentType }) => {
    if (componentType === "markPoint") sayPeak(view, say);
  });
  made.on("datazoom", () => {
    const [{ start, end }] = made.getOption().dataZoom;
    state.zoom = (end - start) / 100;
    made.setOption({ series: bars(state) });
  });
  draw();
  return (chunk) => { state.picked = chunk; made.setOption({ series: bars(state) }); };
}

function sayPeak(view, say) {
  const { module, operator, holders } = view.peak;
  const head = `At the peak of forward and backward, in ${module || "no module"} (${operator}), these are alive:`;
  const rows = holders.map(([kind, where, by, count, size]) => ({ cells: [kind, where, by, String(count), bytes(size)] }));
  say(element("div", { className: "alive" }, head, table(["kind", "module", "operator", "tensors", "size"], rows)));
}

function drawTrace(section, view, say) {
  const { at, kinds, phases } = view.memory;
  section.append(element("h2", {}, "Device memory over the step, by operator"));
  const made = chart(section, "step", 340);
  const series = areas(kinds, at, at[at.length - 1]);
  series[series.length - 1].markPoint = peakMark(kinds, at);
  series[0].markArea = { silent: true, itemStyle: { color: "rgba(0,0,0,0.05)" }, label: { show: true, position: "insideTop", color: DARK, fontSize: 11 },
    data: phases.filter(([, from, to]) => to - from > (at[at.length - 1] - at[0]) / 30).map(([phase, from, to], index) => [{ name: phase, xAxis: from, itemStyle: { opacity: index % 2 } }, { xAxis: to }]) };
  made.setOption({
    aria: { enabled: true }, animation: false,
    legend: { type: "scroll", bottom: 24, itemHeight: 14, itemWidth: 14, textStyle: TEXT },
    tooltip: { ...TIP, trigger: "axis", formatter: (params) => [`operator ${Math.round(params[0].axisValue)}`, ...memoryRows(kinds, lastUntil(at, params[0].axisValue))].join("<br>") },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl" }, { type: "slider", height: 16, bottom: 4, labelFormatter: "" }],
    grid: { ...GRID, top: 30, bottom: 76 },
    xAxis: { type: "value", min: at[0], max: at[at.length - 1], splitLine: { show: false }, axisLabel: { hideOverlap: true } },
    yAxis: byteAxis(Math.max(...at.map((_, index) => kinds.reduce((sum, kind) => sum + valueAt(kind, index), 0))) * 1.12),
    series,
  });
  made.on("click", ({ componentType }) => {
    if (componentType === "markPoint") sayPeak(view, say);
  });
}

// --- chunks ------------------------------------------------------------------------------------------------------------

function drawChunks(section, view, say, pick) {
  const { rows, texts, colours } = view.chunks;
  section.append(element("h2", {}, `${rows.length} chunks in order of first use, as wide as their weights: a click tells more`));
  const made = chart(section, "chunks", 130);
  const total = rows.reduce((sum, row) => sum + row[1], 0);
  const edge = rows.length > 120 ? 0 : 0.5;
  const home = (name) => (name === "resident" ? "on the device, gathered all step" : name === "frozen" ? "none: frozen" : "on the " + name);
  const text = ([index, size, weights, states, early, about]) =>
    `chunk ${index}: ${bytes(size)} of weights ${home(weights)}; gradients and states ${home(states)}${early ? ", updated early" : ""}; ${about}`;
  made.setOption({
    aria: { enabled: true }, animation: false,
    grid: { ...GRID, top: 4, bottom: 40 },
    tooltip: { ...TIP, formatter: ({ seriesIndex }) => escaped(text(rows[seriesIndex])) },
    xAxis: { ...byteAxis(total), splitLine: { show: false } },
    yAxis: { type: "category", inverse: true, data: ["weights", "gradients\nand states"], axisTick: { show: false }, axisLabel: { ...TEXT, lineHeight: 13 } },
    series: rows.map(([index, size, weights, states]) => ({
      name: "chunk " + index, type: "bar", stack: "all", barWidth: "86%",
      data: [weights, states].map((name) => ({ value: size, itemStyle: { color: colours[name], borderColor: "#fff", borderWidth: edge } })),
    })),
  });
  const used = new Set(rows.flatMap((row) => [row[2], row[3]]));
  section.append(element("div", { className: "legend" }, ...[...used].map((name) =>
    element("span", { innerHTML: `<span style="color:${colours[name]}">&#9632;</span> ${escaped(home(name))} &nbsp; ` }))));
  let picked = null;
  made.on("click", ({ seriesIndex }) => {
    const row = rows[seriesIndex];
    picked = picked === row[0] ? null : row[0];
    if (pick) pick(picked);
    if (picked === null) return say("");
    const others = row[6].map(([spot, fits, change]) => ({ cells: [texts[spot], signed(change), texts[fits]] }));
    say(element("div", { className: "chunk" }, text(row), ...(others.length ? [table(["if it were", "the step", "fits"], others)] : [])));
  });
}

// --- tables ------------------------------------------------------------------------------------------------------------

function drawLevers(section, levers) {
  const rows = levers.map(([action, flags, step, gain, tokens, device, host]) => ({
    cells: step === null ? [action, element("span", {}, element("code", {}, flags)), "does not fit", "", "", "", ""] : [
      action, element("span", {}, element("code", {}, flags + " "), flags ? copied(flags) : ""), seconds(step),
      gain === null ? "" : gain.toFixed(2) + " x", tokens === null ? "" : Math.round(tokens).toLocaleString("en-US"), bytes(device), bytes(host)],
  }));
  section.append(element("h2", {}, "What would help, one change at a time"),
    table(["change", "add", "step", "speed", "tokens/s", "device", "host"], rows));
}

function drawMeasured(section, measured) {
  const show = (unit, value) => (unit === "bytes" ? bytes(value) : unit === "seconds" ? seconds(value) : String(value));
  const rows = measured.map(({ name, unit, predicted, measured: found }) => ({
    cells: [name, show(unit, predicted), show(unit, found), predicted ? ((100 * (found - predicted)) / predicted).toFixed(1) + " %" : ""] }));
  section.append(element("h2", {}, "Predicted and measured"), table(["of one step", "predicted", "measured", "difference"], rows));
}

function draw(view) {
  const section = element("section");
  document.querySelector("main").append(section);
  section.append(element("h1", {}, view.title), element("p", { className: "verdict" }, view.verdict));
  const said = element("div", { className: "said", textContent: "Click the mark at the peak, or a chunk, to see what is there." });
  const say = (what) => said.replaceChildren(what);
  let pick = null;
  if (view.measured && view.measured.length) drawMeasured(section, view.measured);
  if (view.budgets) drawBudgets(section, view.budgets);
  if (view.memory) drawTrace(section, view, say);
  if (view.steps) pick = drawStep(section, view, say);
  if (view.chunks) drawChunks(section, view, say, pick);
  section.append(said);
  if (view.levers && view.levers.length) drawLevers(section, view.levers);
  if (view.notes) section.append(element("h2", {}, "What to write"), copied(view.notes), element("pre", {}, view.notes));
  if (view.words) section.append(element("details", {}, element("summary", {}, "The plan in words"), element("pre", {}, view.words)));
}

const data = JSON.parse(document.getElementById("data").textContent);
if (data.rows.length) {
  const rows = data.rows.map(([name, a, b, differs]) => ({ cells: [name.replaceAll("_", " "), a, b], className: differs ? "differs" : "" }));
  document.getElementById("compared").append(element("details", { open: rows.length < 12 }, element("summary", {}, "All figures of both, side by side"), table(["", "a", "b"], rows)));
}
data.views.forEach(draw);
