"use strict";
(() => {
  const one = (query, within = document) => within.querySelector(query);
  const all = (query, within = document) => [...within.querySelectorAll(query)];
  const root = document.documentElement;
  const charts = new Map(); // by their elements
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  async function unpacked(element) {
    const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // Charts

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  function look() {
    const [ink, quiet, line] = ["ink", "quiet", "line"].map(colour);
    const font = getComputedStyle(root).fontFamily;
    return {
      background: null,
      font,
      view: { stroke: null },
      axis: { labelColor: quiet, titleColor: quiet, gridColor: line, domainColor: line, tickColor: line,
        labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" },
      legend: { labelColor: ink, titleColor: quiet, labelFontSize: 12, titleFontWeight: "normal" },
      rule: { color: quiet }, text: { color: quiet }, tick: { color: ink },
      point: { strokeWidth: 1.5 },
    };
  }

  function showTip(handler, event, item, value) {
    tip.hidden = !value;
    if (!value) return;
    const { "": name, ...rest } = value;
    tip.textContent = [name, ...Object.entries(rest).map(([key, text]) => `${key} ${text}`)].filter(Boolean).join("\n");
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 12)}px`;
  }

  function chartOf(element) { // read when it is first asked for
    if (!charts.has(element)) {
      const spec = JSON.parse(one(`#chart-${element.dataset.chart}`).textContent);
      charts.set(element, { spec, rows: spec.data.values, all: spec.data.values, view: null });
    }
    return charts.get(element);
  }

  function draw(element) {
    const chart = chartOf(element);
    chart.spec.data.values = chart.rows;
    nameSeries(chart.spec, chart.rows, element.clientWidth);
    chart.view?.finalize();
    const compiled = vegaLite.compile(withLines(chart.spec, element.clientWidth), { config: look() }).spec;
    chart.view = new vega.View(vega.parse(compiled, {}, { ast: true }), {
      expr: vega.expressionInterpreter, renderer: "svg", container: element, hover: true, loader: null,
    });
    chart.view.tooltip(showTip).run();
  }

  const inLines = (most) => `split(trim(replace(datum.label, regexp('(.{1,${most}})(?: +|$)', 'g'), '$1\\n')), '\\n')`;

  function withLines(spec, width) { // of names of rows that are too long for one: else a phone has no room for the marks
    const most = width < 480 ? 22 : 36;
    const names = new Set(spec.data.values.map((row) => row.subject ?? ""));
    if ([...names].every((name) => name.length <= most)) return spec;
    const broken = structuredClone(spec);
    const labelExpr = inLines(most);
    for (const { encoding } of broken.layer) {
      if (encoding?.y?.field !== "subject") continue;
      const condition = [8, 7, 6, 5, 4, 3, 2].map((lines) => ({ test: `length(${labelExpr}) >= ${lines}`, value: 6 * (1 - lines) }));
      encoding.y.axis = { ...encoding.y.axis, labelExpr, labelLineHeight: 12, labelOffset: { condition, value: 0 } };
    }
    const lines = Math.max(...[...names].map((name) => name.match(RegExp(`.{1,${most}}(?: +|$)`, "g"))?.length ?? 1));
    broken.height = Math.max(width < 480 ? 42 : 26, 13 * lines) * names.size;
    return broken;
  }

  function nameSeries(spec, rows, width) { // those of another page too; one below the other where two have no room
    for (const { encoding } of spec.layer) for (const channel of ["color", "shape", "stroke"]) {
      const told = encoding?.[channel];
      if (told?.field !== "series" || !rows.length) continue;
      const names = new Set([...told.scale.domain, ...rows.map((row) => row.series)]);
      const longest = 30 + 7 * Math.max(...[...names].map((name) => name.length));
      if (names.size > told.scale.domain.length || (told.legend && 2 * longest > width)) {
        const labelExpr = inLines(Math.floor((width - 100) / 7));
        told.legend = { ...told.legend, orient: "bottom", columns: 1, labelLimit: 0, labelExpr };
      }
      told.scale.domain = [...names];
    }
  }

  function show(element, rows) { // in a chart that may be drawn later
    const chart = chartOf(element);
    chart.rows = rows;
    chart.view?.data("rows", rows).run();
  }

  // A chart is drawn where a reader comes near it, so that a page of many opens at once

  function drawNear() {
    return new Promise((done) => {
      const near = new IntersectionObserver((entries) => {
        for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
          near.unobserve(target);
          if (!chartOf(target).view) draw(target);
        }
        done();
      }, { rootMargin: "600px" });
      all(".chart").forEach((element) => near.observe(element));
      if (!one(".chart")) done();
    });
  }

  // Service-level objective

  const NAMES = ["ttft", "tpot", "e2e"];
  const field = (name) => one(`#${name}`);
  let points = [];

  function latenciesOf(window) { // seconds, by the operations of the package, so that equal bounds give equal counts
    let sent = 0;
    const rows = { ttft: [], tpot: [], e2e: [] };
    window.sent.forEach((gap, i) => {
      sent += gap;
      const begin = sent / 1e6, tokens = window.tokens[i];
      const first = window.first[i] === null ? NaN : (sent + window.first[i]) / 1e6 - begin;
      const whole = (sent + window.last[i]) / 1e6 - begin;
      rows.ttft.push(first);
      rows.e2e.push(whole);
      rows.tpot.push(tokens > 1 ? (whole - first) / (tokens - 1) : 0);
    });
    return { ...rows, seconds: window.seconds, dropped: window.dropped };
  }

  function goodputOf(point, bounds) {
    let good = 0, requests = 0, dropped = 0, rate = 0;
    for (const window of point.windows) {
      let met = 0;
      for (let i = 0; i < window.e2e.length; i++) if (bounds.every(([name, most]) => window[name][i] <= most)) met++;
      good += met;
      requests += window.e2e.length + window.dropped;
      dropped += window.dropped;
      rate += met / window.seconds;
    }
    const percent = requests ? (100 * good) / requests : null;
    return { series: point.series, x: point.x, per_s: rate / point.windows.length, percent, requests, good, dropped };
  }

  function figure(value, digits) { // as `report/text_table.py` has it
    const rounded = Number(value.toPrecision(digits));
    if (rounded === 0) return "0";
    const decimals = Math.min(Math.max(digits - 1 - Math.floor(Math.log10(Math.abs(rounded))), 0), 6);
    return rounded.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }

  function judge() {
    const bounds = NAMES.map((name) => [name, parseFloat(field(name).value) / 1e3]).filter(([, most]) => most > 0);
    const wanted = parseFloat(field("attainment").value);
    const rows = points.map((point) => goodputOf(point, bounds));
    const body = one("#goodput-table tbody");
    rows.forEach((row, i) => {
      const cells = body.rows[i].cells;
      cells[2].textContent = figure(row.per_s, 4);
      cells[3].textContent = row.percent === null ? "-" : row.percent.toFixed(1);
    });
    for (const element of all("#slo .chart")) {
      const name = chartOf(element).spec.usermeta.field;
      show(element, rows.map((row) => ({ ...row, y: row[name], shown: figure(row[name], 4) })));
    }
    const best = new Map();
    for (const row of rows) if (row.percent >= wanted) best.set(row.series, row);
    const words = [...new Set(rows.map((row) => row.series))].map((name) => {
      const row = best.get(name);
      return row ? `${name}: up to ${row.x} concurrent requests, ${figure(row.per_s, 4)} good requests/s`
        : `${name}: no load has so many good requests`;
    });
    one("#best").textContent = words.join("\n");
  }

  // A slider goes over the latencies that there are, on a logarithmic scale; at its right end there is no bound.
  const span = {};
  const slid = (name, place) => span[name][0] * (span[name][1] / span[name][0]) ** (place / 999);
  const placeOf = (name, ms) =>
    ms > 0 ? Math.round((999 * Math.log(ms / span[name][0])) / Math.log(span[name][1] / span[name][0])) : 1000;

  async function prepare() {
    points = JSON.parse(await unpacked(one("#requests")));
    for (const point of points) point.windows = point.windows.map(latenciesOf);
    for (const name of NAMES) {
      let least = Infinity, most = 0;
      for (const point of points) for (const window of point.windows) for (const seconds of window[name]) {
        if (seconds > 0 && seconds < least) least = seconds;
        if (seconds > most) most = seconds;
      }
      span[name] = [1e3 * Math.min(least, most || 1) || 1, 1e3 * (most || 1) * 1.01];
      const slider = one(`#${name}-slider`);
      slider.addEventListener("input", () => {
        const place = Number(slider.value);
        field(name).value = place === 1000 ? "" : Number(slid(name, place).toPrecision(3));
        judge();
        remember("slo");
      });
    }
    for (const name of NAMES) one(`#${name}-slider`).value = placeOf(name, parseFloat(field(name).value));
    one("#bounds").addEventListener("submit", (event) => event.preventDefault());
    for (const input of all("#bounds input[type=number]")) {
      input.addEventListener("input", () => {
        const slider = one(`#${input.id}-slider`);
        if (slider) slider.value = placeOf(input.id, parseFloat(input.value));
        judge();
        remember("slo");
      });
    }
  }

  // Cost

  function price() {
    const [hour, kwh] = ["price-hour", "price-kwh"].map((name) => parseFloat(field(name).value));
    const rows = one("#cost-table tbody").rows;
    JSON.parse(one("#cost-table").dataset.points).forEach(([rate, joules], i) => {
      const gpu = hour > 0 ? (hour / (3600 * rate)) * 1e6 : null;
      const energy = kwh > 0 && joules !== null ? (joules / 3.6e6) * 1e6 * kwh : null;
      const both = gpu === null || energy === null ? null : gpu + energy;
      [gpu, energy, both].forEach((cost, at) => {
        rows[i].cells[4 + at].textContent = cost === null ? "-" : figure(cost, 3);
      });
    });
  }

  function prepareCosts() {
    for (const input of all("#cost input")) input.addEventListener("input", () => {
      price();
      remember("cost");
    });
    one("#cost form").addEventListener("submit", (event) => event.preventDefault());
    price();
  }

  // The state is in the address, behind what a link to a part has there

  const fields = [...NAMES, "attainment", "price-hour", "price-kwh"].filter((name) => one(`#${name}`));
  function remember(part) {
    const state = new URLSearchParams(fields.map((name) => [name, field(name).value]).filter(([, value]) => value));
    for (const name of fields) if (field(name).defaultValue && !field(name).value) state.set(name, "");
    const shown = one("[data-filter][aria-pressed=true]")?.dataset.filter;
    if (shown) state.set("show", shown);
    if (root.dataset.chosen) state.set("theme", root.dataset.theme);
    history.replaceState(null, "", `#${part}?${state}`);
  }
  function recall() {
    const [, state] = location.hash.split("?");
    for (const [name, value] of new URLSearchParams(state ?? "")) {
      if (fields.includes(name)) field(name).value = value;
      else if (name === "show" && ["passes", "fails", "inconclusive"].includes(value)) filter(value);
      else if (name === "theme" && ["dark", "light"].includes(value)) choose(value);
    }
  }

  // Buttons

  function save(text, name, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(text instanceof Blob ? text : new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
  }

  async function download(button) {
    const figureElement = button.closest("figure");
    const { view, rows, spec } = charts.get(one(".chart", figureElement));
    const name = one("figcaption span", figureElement).textContent.toLowerCase().replace(/\W+/g, "-");
    const kind = button.dataset.save;
    if (kind === "svg") save(await view.toSVG(), `${name}.svg`, "image/svg+xml");
    if (kind === "png") (await view.toCanvas(2)).toBlob((blob) => save(blob, `${name}.png`));
    if (kind === "csv") {
      const values = rows.length ? rows : spec.layer
        .map((layer) => layer.data?.values ?? []).reduce((most, each) => (each.length > most.length ? each : most), []);
      const heads = Object.keys(values[0] ?? {});
      const text = (value) => (typeof value === "string" && /^[=+\-@\t\r\n]/.test(value) ? `'${value}` : value ?? "");
      const cell = (value) => `"${String(text(value)).replaceAll('"', '""')}"`; // no text is a formula
      save([heads, ...values.map((row) => heads.map((head) => row[head]))].map((row) => row.map(cell).join()).join("\n"),
        `${name}.csv`, "text/csv");
    }
  }

  async function layBeside(file) {
    const plane = (page) => all("script[type='application/json']", page)
      .find((each) => JSON.parse(each.textContent).description === "throughput against latency");
    const other = plane(new DOMParser().parseFromString(await file.text(), "text/html"));
    one("#trouble").textContent = other ? "" : `${file.name} is no page with throughput against latency.`;
    if (!other) return;
    const element = one(".chart", plane(document).closest("figure"));
    const chart = chartOf(element);
    const rows = JSON.parse(other.textContent).data.values;
    chart.rows = [...chart.all, ...rows.map((row) => ({ ...row, series: `${file.name}: ${row.series}` }))];
    draw(element);
    element.scrollIntoView({ block: "nearest" });
  }

  function filter(state) {
    for (const button of all("[data-filter]")) button.setAttribute("aria-pressed", String(button.dataset.filter === state));
    for (const card of all(".claim")) {
      const verdicts = all("[data-state]", card);
      for (const verdict of verdicts) verdict.hidden = state !== "" && verdict.dataset.state !== state;
      card.hidden = verdicts.every((verdict) => verdict.hidden);
      const chart = one(".chart", card);
      if (chart) show(chart, chartOf(chart).all.filter((row) => state === "" || row.state === state));
    }
  }

  function paint(theme) {
    root.dataset.theme = theme;
    one("#theme").setAttribute("aria-pressed", String(theme === "dark"));
  }

  function choose(theme) {
    paint(theme);
    root.dataset.chosen = "yes";
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.id === "theme") {
      choose(root.dataset.theme === "dark" ? "light" : "dark");
      remember("answer");
      for (const [element, chart] of charts) if (chart.view) draw(element);
    } else if ("copy" in button.dataset) {
      const code = one("code", button.parentElement);
      getSelection().selectAllChildren(code); // for who may not write to the clipboard
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } else if ("filter" in button.dataset) {
      filter(button.dataset.filter);
      remember("claims");
    }
    else if ("save" in button.dataset) await download(button);
  });
  document.addEventListener("change", (event) => {
    if (event.target.id === "other" && event.target.files.length) layBeside(event.target.files[0]);
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (one("#other") && event.dataTransfer.files.length) layBeside(event.dataTransfer.files[0]);
  });
  addEventListener("beforeprint", () => {
    for (const each of all("details")) each.open = true;
    for (const element of all(".chart")) if (!chartOf(element).view) draw(element);
  });

  async function start() {
    for (const element of all("[data-library]")) {
      const script = document.createElement("script");
      script.textContent = await unpacked(element);
      document.head.append(script);
    }
    recall();
    if (one("#cost")) prepareCosts();
    if (one("#requests")) await prepare();
    if (one("#requests")) judge();
    await drawNear();
    root.dataset.ready = "yes";
  }

  paint(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  start().catch((error) => {
    one("#trouble").textContent = `The charts could not be drawn: ${error.message}. Every number is in the tables.`;
    throw error;
  });
})();
