// Light or dark: as the system says, or as the reader chose.

const KEY = "penstock.theme";

/** Applies the kept choice. */
export function applyTheme() {
  const chosen = localStorage.getItem(KEY);
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

/** Turns to the other of the two. */
export function toggleTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem(KEY, document.documentElement.dataset.theme);
}
