// Starts what the page has.

if (typeof DecompressionStream === "undefined") {
  document.getElementById("too-old").hidden = false;
} else {
  startCharts();
  document.querySelectorAll(".browser").forEach(startBrowser);
}
