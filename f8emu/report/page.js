// Light or dark colours: the reader's scheme, or what the button says.
"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light colours" : "Dark colours";
  };
  button.hidden = false;
  button.addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", (event) => show(event.matches ? "dark" : "light"));
  show(root.dataset.theme);
})();
