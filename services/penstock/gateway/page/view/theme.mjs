// Light or dark: as the system says, or as the reader chose.

const KEY = "penstock.theme";

/** Applies the kept choice. */
export function applyTheme() {
  const chosen = localStorage.getItem(KEY);
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

/** The theme that is shown: "light" or "dark". */
export function shownTheme() {
  return document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

/** Turns to the other of the two. */
export function toggleTheme() {
  document.documentElement.dataset.theme = shownTheme() === "dark" ? "light" : "dark";
  localStorage.setItem(KEY, document.documentElement.dataset.theme);
}
