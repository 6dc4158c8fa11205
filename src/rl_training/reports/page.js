// Draws the charts of the pages. Colours of the ground come from page.css.
(function () {
  "use strict";
  var charts = JSON.parse(document.getElementById("charts").textContent);
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function theme() {
    var style = getComputedStyle(document.documentElement);
    function of(name) { return style.getPropertyValue(name).trim(); }
    return { ink: of("--soft"), line: of("--line"), raised: of("--raised"), text: of("--ink") };
  }
  function layout(chart) {
    var t = theme(), given = chart.layout;
    var axis = { gridcolor: t.line, linecolor: t.line, zerolinecolor: t.line, tickcolor: t.line,
      automargin: true, separatethousands: true };
    if (chart.small) { axis.nticks = 5; }
    var axes = { xaxis: axis, yaxis: axis };
    Object.keys(given).forEach(function (name) {
      if (/^[xy]axis[0-9]*$/.test(name)) { axes[name] = Object.assign({}, axis, given[name]); }
    });
    return Object.assign({
      margin: { l: 52, r: 12, t: chart.small ? 6 : 26, b: chart.small ? 24 : 36 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: t.line, activecolor: t.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: t.ink, size: 12, family: "system-ui, 'DejaVu Sans', sans-serif" }, hovermode: "x unified",
      hoverlabel: { bgcolor: t.raised, bordercolor: t.line, font: { color: t.text } }, showlegend: false,
      legend: { orientation: "h", x: 0, y: -0.18, yanchor: "top", font: { color: t.text } }
    }, given, axes);
  }
  function draw(chart) {
    var config = { responsive: true, displaylogo: false, plotlyServerURL: "",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
    if (chart.small) { config.displayModeBar = false; }
    return Plotly.newPlot(chart.id, chart.traces, layout(chart), config);
  }
  function redraw() { charts.forEach(function (chart) { Plotly.relayout(chart.id, layout(chart)); }); }
  Promise.all(charts.map(draw)).then(function () {
    document.documentElement.setAttribute("data-drawn", charts.length);
  });
  dark.addEventListener("change", redraw);
  document.querySelectorAll("details").forEach(function (fold) {
    fold.addEventListener("toggle", function () {
      fold.querySelectorAll(".chart").forEach(function (box) { Plotly.Plots.resize(box); });
    });
  });
})();
