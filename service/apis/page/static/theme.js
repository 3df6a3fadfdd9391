// Colours before the first paint: the reader's own choice, or else the system's, which the stylesheet asks for.
(() => {
  const root = document.documentElement;
  try {
    const chosen = localStorage.getItem("longshore-theme");
    if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  } catch { /* a browser that keeps nothing */ }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const say = () => button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    say();
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try { localStorage.setItem("longshore-theme", root.dataset.theme); } catch { /* as above */ }
      say();
    });
  });
})();
