// Loaded before the page is drawn, so that a chosen theme does not flash. The system's theme is the default.
(() => {
  const chosen = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    root.dataset.theme = ["light", "dark"].includes(chosen()) ? chosen() : dark.matches ? "dark" : "light";
  };
  globalThis.toggleTheme = () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("theme", next);
    } catch {
      // without storage the choice lasts as long as the page
    }
    root.dataset.theme = next;
  };
  dark.addEventListener("change", apply);
  apply();
})();
