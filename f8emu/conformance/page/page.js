// Draws the figures of a page, and draws them again in the other colours when the reader's scheme changes.
"use strict";
(() => {
  const root = document.documentElement;
  const darkColours = JSON.parse(document.getElementById("dark-colours").textContent);
  const button = document.getElementById("theme");

  // Figures are written in light colours; each has its counterpart.
  const coloured = (text, theme) =>
    theme === "dark" ? text.replace(/#[0-9a-f]{6}\b/gi, (c) => darkColours[c.toLowerCase()] ?? c) : text;

  const draw = async () => {
    const theme = root.dataset.theme;
    for (const plot of document.querySelectorAll(".plot")) {
      const { data, layout } = JSON.parse(coloured(plot.nextElementSibling.textContent, theme));
      await Plotly.react(plot, data, layout, { displaylogo: false, responsive: true });
    }
    root.dataset.drawn = String(document.querySelectorAll(".plot .main-svg:first-child").length);
  };

  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light colours" : "Dark colours";
    return draw();
  };
  button.hidden = false;
  button.addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", (event) => show(event.matches ? "dark" : "light"));
  show(root.dataset.theme);
})();
