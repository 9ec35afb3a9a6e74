// Starts what the page has. Charts do not wait for the completions, which stand at the end of the page.

if (typeof DecompressionStream === "undefined") {
  document.getElementById("too-old").hidden = false;
} else {
  startCharts();
  // A page without completions has no `startBrowser`.
  addEventListener("DOMContentLoaded", () => document.querySelectorAll(".browser").forEach((box) => startBrowser(box)));
}
